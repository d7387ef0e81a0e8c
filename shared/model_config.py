"""The shape of a `qwen4exp` model, read from GGUF metadata and checked against the tensors.

Read by every process: the gateway needs the context length, the stager the n-gram hash, the cpu_worker the
expert tensors, the gpu_worker all of it. Whatever this version does not run is refused here, at start, with
the file, the key and the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from shared.errors import UnsupportedModelError
from shared.gguf.file import MetadataValue, StringArray
from shared.gguf.model import GGUFModel

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
    context_length: int
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

    def without_prediction(self) -> "Qwen4ExpConfig":
        """The same model as if it had no prediction block."""
        return replace(
            self,
            num_prediction_layers=0,
            compress_ratios=self.compress_ratios[: self.num_layers],
            is_recurrent=self.is_recurrent[: self.num_layers],
        )


def read_model_config(model: GGUFModel, *, with_prediction: bool = True) -> Qwen4ExpConfig:
    """Reads and checks the metadata. Without prediction the model is taken as one that has no prediction
    block. Raises UnsupportedModelError naming file, key and value."""
    config = _Reader(model).config()
    return config if with_prediction else config.without_prediction()


class _Reader:
    """Typed look-ups of `qwen4exp.*` keys, each failure with the file, the key and the value."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._metadata: Mapping[str, MetadataValue] = model.metadata

    def config(self) -> Qwen4ExpConfig:
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
        self._check_rope()
        self._check_router()
        hidden = self.integer("embedding_length")
        config = Qwen4ExpConfig(
            num_layers=num_layers,
            num_prediction_layers=num_prediction_layers,
            context_length=self.integer("context_length"),
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

    def positive(self, key: str) -> float:
        value = self.number(key)
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

    def _check_rope(self) -> None:
        kind = self._metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
        if not isinstance(kind, str) or kind != "none":
            raise self._refused("rope.scaling.type", kind, "'none' (no scaling of positions)")

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
