"""The shape of a `qwen4exp` model, read from GGUF metadata and checked against the tensors.

Read by every process: the gateway needs the context length, the stager the n-gram hash, the cpu_worker the
expert tensors, the gpu_worker all of it. Whatever this version does not run is refused here, at start, with
the file, the key and the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from shared.config import GpuWorkerConfig
from shared.errors import UnsupportedModelError
from shared.gguf.file import MetadataValue, StringArray
from shared.gguf.model import GGUFModel
from shared.rope_scaling import (
    DEFAULT_BETA_FAST,
    DEFAULT_BETA_SLOW,
    RopeScaling,
    ScalingType,
    recommended_attention_factor,
    with_settings,
)

ARCHITECTURE = "qwen4exp"

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """The n-gram embedding (PLE): one table, gathered by hashes of the last `ngram_size` token ids."""

    layer: int
    ngram_size: int
    heads_per_ngram: int
    conv_kernel: int
    eos_token_id: int
    multipliers: tuple[int, ...]
    head_vocab_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    row_width: int

    @property
    def num_heads(self) -> int:
        """Rows gathered for one token."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def feature_width(self) -> int:
        """Width of the concatenated rows of one token."""
        return self.num_heads * self.row_width

    @property
    def history_length(self) -> int:
        """Earlier vectors that the dilated convolution reaches back to."""
        return (self.conv_kernel - 1) * self.ngram_size


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """QSA block selection of the attention layers."""

    num_heads: int
    head_dim: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    """Everything the forward pass has to know about the model, apart from the weights."""

    num_layers: int
    num_prediction_layers: int
    vocab_size: int
    hidden: int
    num_streams: int
    stream_rank: int
    rms_epsilon: float
    # Attention layers.
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    rope_scaling: RopeScaling
    indexer: IndexerConfig
    # Of each layer, and of the prediction block behind them, which is an attention layer: both this and
    # `is_recurrent` have `num_expert_layers` entries.
    compress_ratios: tuple[int, ...]
    # Delta-net layers.
    is_recurrent: tuple[bool, ...]
    conv_kernel: int
    delta_head_dim: int
    num_delta_key_heads: int
    num_delta_value_heads: int
    # Mixture of experts.
    num_experts: int
    num_experts_used: int
    expert_weights_scale: float
    ngram: NgramConfig | None

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts: those of the trunk, then the prediction block, whose number is
        `num_layers`."""
        return self.num_layers + self.num_prediction_layers

    @property
    def stream_width(self) -> int:
        """Width of all residual streams of one token together."""
        return self.num_streams * self.hidden

    @property
    def delta_channels(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values."""
        return (2 * self.num_delta_key_heads + self.num_delta_value_heads) * self.delta_head_dim

    @property
    def context_length(self) -> int:
        """The longest sequence: what the model was trained for, or what scaled positions are good for."""
        return self.rope_scaling.context_length

    def longest_sequence(self, max_context: int) -> int:
        """The longest sequence where `--max-context` is this; 0 asks for all there is."""
        return min(max_context or self.context_length, self.context_length)

    def without_prediction(self) -> "Qwen4ExpConfig":
        """The same model as if it had no prediction block."""
        return replace(
            self,
            num_prediction_layers=0,
            compress_ratios=self.compress_ratios[: self.num_layers],
            is_recurrent=self.is_recurrent[: self.num_layers],
        )


def read_model_config(
    model: GGUFModel, settings: GpuWorkerConfig | None = None, *, with_prediction: bool = True
) -> Qwen4ExpConfig:
    """Reads and checks the metadata. With `settings`, they say how positions are scaled; who does without
    must not need to know, nor how long a context may be. Without prediction the model is taken as one that
    has no prediction block. Raises UnsupportedModelError naming file, key and value; ConfigError for settings
    of the scaling that do not go together."""
    config = _Reader(model).config(settings)
    return config if with_prediction else config.without_prediction()


class _Reader:
    """Typed look-ups of `qwen4exp.*` keys, each failure with the file, the key and the value."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._metadata: Mapping[str, MetadataValue] = model.metadata

    def config(self, settings: GpuWorkerConfig | None) -> Qwen4ExpConfig:
        self._check_architecture()
        num_prediction_layers = self.integer("nextn_predict_layers", default=0)
        if num_prediction_layers > 1:
            raise self._refused("nextn_predict_layers", num_prediction_layers, "at most 1 prediction block")
        num_blocks = self.integer("block_count", smallest=1 + num_prediction_layers)
        num_layers = num_blocks - num_prediction_layers
        # First, since the length of an array in the file shows that the number of blocks is no nonsense.
        compress_ratios = self.integers("attention.compress_ratios", length=num_blocks)
        # The prediction block attends, whatever the interval says of its number.
        is_recurrent = (*self._recurrent_layers(num_blocks)[:num_layers], *num_prediction_layers * (False,))
        head_dim = self.integer("attention.key_length")
        if self.integer("attention.value_length", default=head_dim) != head_dim:
            raise self._refused(
                "attention.value_length", self._get("attention.value_length"), f"the key length, {head_dim}"
            )
        rope_scaling = self._rope_scaling()
        if settings is not None:
            rope_scaling = with_settings(rope_scaling, settings)
        self._check_router()
        hidden = self.integer("embedding_length")
        config = Qwen4ExpConfig(
            num_layers=num_layers,
            num_prediction_layers=num_prediction_layers,
            vocab_size=self._vocab_size(hidden),
            hidden=hidden,
            num_streams=self.integer("hyper_connection.count"),
            stream_rank=self.integer("hyper_connection.low_rank"),
            rms_epsilon=self.positive("attention.layer_norm_rms_epsilon"),
            num_query_heads=self.integer("attention.head_count"),
            num_kv_heads=self.integer("attention.head_count_kv"),
            head_dim=head_dim,
            rope_dim=self.integer("rope.dimension_count"),
            rope_base=self.positive("rope.freq_base"),
            rope_scaling=rope_scaling,
            indexer=IndexerConfig(
                num_heads=self.integer("attention.indexer.head_count"),
                head_dim=self.integer("attention.indexer.key_length"),
                token_budget=self.integer("attention.indexer.top_k"),
            ),
            compress_ratios=compress_ratios,
            is_recurrent=is_recurrent,
            conv_kernel=self.integer("ssm.conv_kernel", smallest=2),
            delta_head_dim=self.integer("ssm.state_size"),
            num_delta_key_heads=self.integer("ssm.group_count"),
            num_delta_value_heads=self.integer("ssm.time_step_rank"),
            num_experts=self.integer("expert_count"),
            num_experts_used=self.integer("expert_used_count"),
            expert_weights_scale=self.number("expert_weights_scale", default=1.0) or 1.0,
            ngram=self._ngram(num_layers, is_recurrent),
        )
        self._check_consistency(config)
        return config

    # Look-ups.

    def integer(self, key: str, *, default: int | None = None, smallest: int = 1) -> int:
        """An integer; arrays are accepted where all their entries agree (per-layer keys)."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(key, value, "an integer")
        if value < smallest and value != default:
            raise self._refused(key, value, f"at least {smallest}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self._refused(key, value, "a number")
        return float(value)

    def positive(self, key: str, *, default: float | None = None) -> float:
        value = self.number(key, default=default)
        if value <= 0:
            raise self._refused(key, value, "a number above 0")
        return value

    def integers(self, key: str, *, length: int | None = None) -> tuple[int, ...]:
        """An integer array of any width; the values stay exact, since hash multipliers exceed 2^53."""
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self._refused(key, value, "an array of integers")
        if length is not None and len(value) != length:
            raise self._refused(key, value, f"an array of {length}")
        return tuple(int(v) for v in value)

    def _get(self, key: str, default: MetadataValue | None = None) -> MetadataValue:
        value = self._metadata.get(f"{ARCHITECTURE}.{key}", default)
        if value is None:
            raise UnsupportedModelError(f"{self._model.path}: the key {ARCHITECTURE}.{key} is missing")
        return value

    def _refused(self, key: str, value: object, expected: str) -> UnsupportedModelError:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return UnsupportedModelError(
            f"{self._model.path}: {ARCHITECTURE}.{key} is {shown}; this version supports {expected}"
        )

    # Parts and checks.

    def _check_architecture(self) -> None:
        architecture = self._metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture != ARCHITECTURE:
            raise UnsupportedModelError(
                f"{self._model.path}: general.architecture is {architecture!r}; "
                f"this version runs {ARCHITECTURE!r} only"
            )

    def _recurrent_layers(self, num_blocks: int) -> tuple[bool, ...]:
        """True for delta-net blocks. The explicit list, where a converter wrote one, wins."""
        key = "attention.recurrent_layers"
        if f"{ARCHITECTURE}.{key}" in self._metadata:
            listed = self._get(key)
            if not isinstance(listed, np.ndarray) or len(listed) != num_blocks:
                raise self._refused(key, listed, f"an array of {num_blocks} booleans")
            return tuple(bool(entry) for entry in listed)
        interval = self.integer("full_attention_interval")
        return tuple((block + 1) % interval != 0 for block in range(num_blocks))

    def _rope_scaling(self) -> RopeScaling:
        """The keys are those of llama.cpp's converter."""
        trained = self.integer("context_length")
        has_factor = f"{ARCHITECTURE}.rope.scaling.factor" in self._metadata
        # A factor without a type is linear to llama.cpp.
        name = self._get("rope.scaling.type", "linear" if has_factor else "none")
        if not isinstance(name, str) or name not in set(ScalingType):
            raise self._refused("rope.scaling.type", name, f"{', '.join(map(repr, map(str, ScalingType)))}")
        scaling, original = ScalingType(name), "rope.scaling.original_context_length"
        if scaling is not ScalingType.YARN and self.number("rope.scaling.attn_factor", default=1.0) != 1:
            attn_factor = self._get("rope.scaling.attn_factor")
            raise self._refused("rope.scaling.attn_factor", attn_factor, "1, or the scaling type 'yarn'")
        if scaling is ScalingType.NONE:
            return RopeScaling(scaling, self.integer(original, default=trained))
        factor = self.number("rope.scaling.factor")
        if factor < 1:
            raise self._refused("rope.scaling.factor", factor, "factors from 1 on")
        if scaling is ScalingType.LINEAR:
            # Checkpoints with linear scaling were tuned with it: the length they state includes the factor.
            original_context = self.integer(original, default=max(1, int(trained / factor)))
            return RopeScaling(scaling, original_context, factor)
        return self._yarn(factor, self.integer(original, default=trained))

    def _yarn(self, factor: float, original_context: int) -> RopeScaling:
        # llama.cpp's mix of both kinds of frequencies beyond the ramp; below 0 is its way to say none.
        extrapolation = self.number("rope.scaling.yarn_ext_factor", default=1.0)
        if extrapolation >= 0 and extrapolation != 1:
            raise self._refused("rope.scaling.yarn_ext_factor", extrapolation, "1 (the ramp as published)")
        # Converters disagree about what it is a multiple of.
        log_multiplier = self.number("rope.scaling.yarn_log_multiplier", default=0.0)
        if log_multiplier:
            raise self._refused("rope.scaling.yarn_log_multiplier", log_multiplier, "0 (none)")
        # The converter writes transformers' `attention_factor` here, which stands in for the recommended one.
        recommended = recommended_attention_factor(factor)
        stated = self.positive("rope.scaling.yarn_attn_factor", default=recommended)
        beta_fast = self.positive("rope.scaling.yarn_beta_fast", default=DEFAULT_BETA_FAST)
        beta_slow = self.positive("rope.scaling.yarn_beta_slow", default=DEFAULT_BETA_SLOW)
        if beta_fast <= beta_slow:
            raise self._refused(
                "rope.scaling.yarn_beta_fast", beta_fast, f"more than beta_slow, {beta_slow:g}"
            )
        multiplier = self.positive("rope.scaling.attn_factor", default=1.0) * stated / recommended
        return RopeScaling(ScalingType.YARN, original_context, factor, multiplier, beta_fast, beta_slow)

    def _check_router(self) -> None:
        gating = self.integer("expert_gating_func", default=1)
        if gating != 1:
            raise self._refused("expert_gating_func", gating, "1 (softmax)")

    def _vocab_size(self, hidden: int) -> int:
        name = "token_embd.weight"
        if name not in self._model:
            raise UnsupportedModelError(f"{self._model.path}: the tensor {name} is missing")
        shape = self._model.info(name).shape
        if len(shape) != 2 or shape[1] != hidden:
            raise UnsupportedModelError(
                f"{self._model.path}: {name} has shape {shape}, expected (vocabulary, {hidden})"
            )
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray) and len(tokens) > shape[0]:
            raise UnsupportedModelError(
                f"{self._model.path}: tokenizer.ggml.tokens lists {len(tokens)} tokens, "
                f"but {name} has only {shape[0]} rows"
            )
        return shape[0]

    def _ngram(self, num_layers: int, is_recurrent: tuple[bool, ...]) -> NgramConfig | None:
        if f"{ARCHITECTURE}.ple.layers" not in self._metadata:
            return None
        layers = self.integers("ple.layers")
        if not layers:
            return None
        if len(layers) > 1:
            raise self._refused("ple.layers", list(layers), "one n-gram layer")
        layer = layers[0]
        if not 0 <= layer < num_layers or not is_recurrent[layer]:
            raise self._refused("ple.layers", list(layers), "an n-gram layer on a delta-net block")
        ngram_size = self.integer("ple.ngram_size", smallest=2)
        heads_per_ngram = self.integer("ple.heads_per_ngram")
        num_heads = (ngram_size - 1) * heads_per_ngram
        return NgramConfig(
            layer=layer,
            ngram_size=ngram_size,
            heads_per_ngram=heads_per_ngram,
            conv_kernel=self.integer("ple.conv_kernel", smallest=2),
            eos_token_id=self.integer("ple.eos_token_id", smallest=0),
            multipliers=self.integers("ple.layer_multipliers", length=ngram_size),
            head_vocab_sizes=self.integers("ple.head_vocab_sizes", length=num_heads),
            head_offsets=self.integers("ple.head_offsets", length=num_heads),
            row_width=self.integer("embedding_length_per_layer_input"),
        )

    def _check_consistency(self, config: Qwen4ExpConfig) -> None:
        if config.num_experts_used > config.num_experts:
            raise self._refused(
                "expert_used_count", config.num_experts_used, f"at most the {config.num_experts} experts"
            )
        if config.num_query_heads % config.num_kv_heads:
            raise self._refused(
                "attention.head_count",
                config.num_query_heads,
                f"a multiple of {config.num_kv_heads} kv heads",
            )
        if config.num_delta_value_heads % config.num_delta_key_heads:
            raise self._refused(
                "ssm.time_step_rank",
                config.num_delta_value_heads,
                f"a multiple of the {config.num_delta_key_heads} key heads",
            )
        inner = config.num_delta_value_heads * config.delta_head_dim
        if self.integer("ssm.inner_size", default=inner) != inner:
            raise self._refused(
                "ssm.inner_size", self._get("ssm.inner_size"), f"value heads x head size, {inner}"
            )
        for key, width in (
            ("attention.key_length", config.head_dim),
            ("attention.indexer.key_length", config.indexer.head_dim),
        ):
            if config.rope_dim % 2 or config.rope_dim > width:
                raise self._refused(
                    "rope.dimension_count", config.rope_dim, f"an even number up to {key}, {width}"
                )
        if config.rope_scaling.type is ScalingType.YARN and config.rope_base <= 1:
            raise self._refused(
                "rope.freq_base", config.rope_base, "bases above 1 where positions are scaled"
            )
        for layer, ratio in enumerate(config.compress_ratios):
            if config.is_recurrent[layer]:
                continue
            if ratio < 0 or (ratio and config.indexer.token_budget < ratio):
                raise self._refused(
                    "attention.compress_ratios",
                    list(config.compress_ratios),
                    f"ratios from 0 to the token budget, {config.indexer.token_budget}",
                )
        ngram = config.ngram
        if ngram is None:
            return
        # The hash multiplies in 64 bits; both references rely on products that do not overflow.
        if max(ngram.multipliers) * (config.vocab_size - 1) >= 1 << 63 or min(ngram.multipliers) < 1:
            raise self._refused(
                "ple.layer_multipliers",
                list(ngram.multipliers),
                "positive products with token ids below 2^63",
            )
        if min(ngram.head_vocab_sizes) < 1:
            raise self._refused("ple.head_vocab_sizes", list(ngram.head_vocab_sizes), "sizes of at least 1")
        if min(ngram.head_offsets) < 0:
            raise self._refused("ple.head_offsets", list(ngram.head_offsets), "offsets of at least 0")
        if ngram.eos_token_id >= config.vocab_size:
            raise self._refused("ple.eos_token_id", ngram.eos_token_id, f"ids below {config.vocab_size}")
