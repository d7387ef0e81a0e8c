"""Every tensor a `qwen4exp` file holds: name, shape, and the class that `strata inspect` groups it under.

One list serves the check at start, so that a file with a missing or misshapen tensor is refused by name
before anything is loaded, and the summary of a file. Shapes are in numpy order, rows first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from shared.errors import UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig


class TensorClass(StrEnum):
    """What a tensor is for."""

    EMBEDDING = "token embedding"
    HEAD = "output head"
    NGRAM_TABLE = "n-gram table"
    NGRAM = "n-gram projections"
    EXPERTS_GATE_UP = "experts, gate and up"
    EXPERTS_DOWN = "experts, down"
    SHARED_EXPERT = "shared expert"
    ROUTER = "router"
    HYPER_CONNECTION = "hyper-connections"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DELTA_NET = "delta net"
    NORM = "norms"
    PREDICTION = "prediction block"


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor that has to be there, unless it is optional."""

    name: str
    shape: tuple[int, ...]
    tensor_class: TensorClass
    is_optional: bool = False


NGRAM_TABLE = "per_layer_token_embd.weight"
# Those of `shared.quants`, named here too because importing it costs half a second; a test compares them.
# fmt: off
COMPUTABLE_TYPES = (
    "F32", "F16", "BF16", "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
)
# fmt: on
MAX_WIDTH = 16384
"""Of a matrix that is multiplied with: the kernels' limit, `shared.quants.matrix`."""


def block_prefix(block: int) -> str:
    """The prefix of one block's tensor names."""
    return f"blk.{block}."


def block_of(name: str) -> int:
    """The block of a tensor whose name has the prefix of one."""
    return int(name.split(".")[1])


def expected_tensors(config: Qwen4ExpConfig, model: GGUFModel) -> Iterator[ExpectedTensor]:
    """All tensors of the trunk, and of the prediction block where the model has one. Shapes that metadata
    does not fix (expert widths, table rows) come from the tensors themselves and are checked against each
    other."""
    hidden, width = config.hidden, config.stream_width
    yield ExpectedTensor("token_embd.weight", (config.vocab_size, hidden), TensorClass.EMBEDDING)
    yield ExpectedTensor("output.weight", (config.vocab_size, hidden), TensorClass.HEAD, is_optional=True)
    yield from _mixer("output_hc_", config, has_inject=False)
    if config.ngram is not None:
        table_rows = model.info(NGRAM_TABLE).shape[0] if NGRAM_TABLE in model else 0
        needed = max(
            offset + size
            for offset, size in zip(config.ngram.head_offsets, config.ngram.head_vocab_sizes, strict=True)
        )
        yield ExpectedTensor(
            NGRAM_TABLE, (max(table_rows, needed), config.ngram.row_width), TensorClass.NGRAM_TABLE
        )
        ple = f"{block_prefix(config.ngram.layer)}ple_"
        yield ExpectedTensor(f"{ple}key.weight", (width, config.ngram.feature_width), TensorClass.NGRAM)
        yield ExpectedTensor(f"{ple}value.weight", (hidden, config.ngram.feature_width), TensorClass.NGRAM)
        yield ExpectedTensor(f"{ple}conv1d.weight", (width, config.ngram.conv_kernel), TensorClass.NGRAM)
        for norm in ("key", "query", "conv"):
            yield ExpectedTensor(f"{ple}norm_{norm}.weight", (width,), TensorClass.NORM)
    for layer in range(config.num_expert_layers):
        prefix = block_prefix(layer)
        yield from _mixer(f"{prefix}hc_attn_", config)
        yield from _mixer(f"{prefix}hc_ffn_", config)
        yield from (_delta_net if config.is_recurrent[layer] else _attention)(prefix, config)
        yield from _mixture(prefix, config, model)
        if layer >= config.num_layers:
            yield from _prediction(f"{prefix}nextn.", config)


def check_tensors(model: GGUFModel, config: Qwen4ExpConfig) -> None:
    """Raises UnsupportedModelError for the first tensor that is missing, has another shape, or a type that
    Strata cannot compute with."""
    for expected in expected_tensors(config, model):
        if expected.name not in model:
            if expected.is_optional:
                continue
            raise UnsupportedModelError(f"{model.path}: the tensor {expected.name} is missing")
        info = model.info(expected.name)
        shape = info.shape
        # Some converters store a vector (a norm of all streams) as a matrix; the bytes are the same.
        is_reshaped_vector = len(expected.shape) == 1 and prod(shape) == prod(expected.shape)
        if shape != expected.shape and not is_reshaped_vector:
            raise UnsupportedModelError(
                f"{model.home(expected.name).path}: tensor {expected.name} has shape {shape}, "
                f"the metadata asks for {expected.shape} (rows first)"
            )
        if info.type.name not in COMPUTABLE_TYPES:
            raise UnsupportedModelError(
                f"{model.home(expected.name).path}: tensor {expected.name} has type {info.type.name}, which "
                f"this version cannot compute with; it can with {', '.join(COMPUTABLE_TYPES)}"
            )
        if len(shape) > 1 and shape[-1] > MAX_WIDTH:
            raise UnsupportedModelError(
                f"{model.home(expected.name).path}: the rows of tensor {expected.name} have {shape[-1]} "
                f"weights, this version multiplies rows of at most {MAX_WIDTH}"
            )


def classify(name: str, config: Qwen4ExpConfig) -> TensorClass:
    """The class of any tensor name, also of those that nobody uses. All of the prediction block is one."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= config.num_layers:
        return TensorClass.PREDICTION
    leaf = ".".join(parts[2:]) if parts[0] == "blk" else name
    for fragments, tensor_class in _BY_FRAGMENT:
        if any(fragment in leaf for fragment in fragments):
            return tensor_class
    return TensorClass.NORM


_BY_FRAGMENT: tuple[tuple[tuple[str, ...], TensorClass], ...] = (
    (("per_layer_token_embd",), TensorClass.NGRAM_TABLE),
    (("token_embd",), TensorClass.EMBEDDING),
    (("norm",), TensorClass.NORM),
    (("hc_",), TensorClass.HYPER_CONNECTION),
    (("ffn_gate_inp_shexp", "_shexp"), TensorClass.SHARED_EXPERT),
    (("ffn_gate_inp",), TensorClass.ROUTER),
    (("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"), TensorClass.EXPERTS_GATE_UP),
    (("ffn_down_exps",), TensorClass.EXPERTS_DOWN),
    (("ple_",), TensorClass.NGRAM),
    (("indexer",), TensorClass.INDEXER),
    (("ssm_", "attn_qkv", "attn_gate"), TensorClass.DELTA_NET),
    (("attn_",), TensorClass.ATTENTION),
    (("output.weight",), TensorClass.HEAD),
)


def _mixer(prefix: str, config: Qwen4ExpConfig, *, has_inject: bool = True) -> Iterator[ExpectedTensor]:
    width, rank = config.stream_width, config.stream_rank
    yield ExpectedTensor(f"{prefix}norm.weight", (width,), TensorClass.NORM)
    yield ExpectedTensor(f"{prefix}down.weight", (rank, width), TensorClass.HYPER_CONNECTION)
    yield ExpectedTensor(f"{prefix}up.weight", (width, rank), TensorClass.HYPER_CONNECTION)
    if has_inject:
        yield ExpectedTensor(
            f"{prefix}inject.weight", (config.num_streams, width), TensorClass.HYPER_CONNECTION
        )


def _attention(prefix: str, config: Qwen4ExpConfig) -> Iterator[ExpectedTensor]:
    hidden, head_dim, indexer = config.hidden, config.head_dim, config.indexer
    query, key_value = config.num_query_heads * head_dim, config.num_kv_heads * head_dim
    for name, shape in (
        ("attn_q", (2 * query, hidden)),
        ("attn_k", (key_value, hidden)),
        ("attn_v", (key_value, hidden)),
        ("attn_output", (hidden, query)),
    ):
        yield ExpectedTensor(f"{prefix}{name}.weight", shape, TensorClass.ATTENTION)
    yield ExpectedTensor(f"{prefix}attn_q_norm.weight", (head_dim,), TensorClass.NORM)
    yield ExpectedTensor(f"{prefix}attn_k_norm.weight", (head_dim,), TensorClass.NORM)
    yield ExpectedTensor(
        f"{prefix}indexer.q_proj.weight", (indexer.num_heads * indexer.head_dim, hidden), TensorClass.INDEXER
    )
    yield ExpectedTensor(f"{prefix}indexer.k_proj.weight", (indexer.head_dim, hidden), TensorClass.INDEXER)
    yield ExpectedTensor(f"{prefix}indexer.q_norm.weight", (indexer.head_dim,), TensorClass.NORM)
    yield ExpectedTensor(f"{prefix}indexer.k_norm.weight", (indexer.head_dim,), TensorClass.NORM)


def _prediction(prefix: str, config: Qwen4ExpConfig) -> Iterator[ExpectedTensor]:
    """What only the prediction block has. An embedding or a head of its own would not be used."""
    hidden = config.hidden
    yield ExpectedTensor(f"{prefix}enorm.weight", (hidden,), TensorClass.NORM)
    yield ExpectedTensor(f"{prefix}hnorm.weight", (config.stream_width,), TensorClass.NORM)
    yield ExpectedTensor(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), TensorClass.PREDICTION)
    yield from _mixer(f"{prefix}hc_head_", config, has_inject=False)


def _delta_net(prefix: str, config: Qwen4ExpConfig) -> Iterator[ExpectedTensor]:
    hidden, heads = config.hidden, config.num_delta_value_heads
    inner = heads * config.delta_head_dim
    for name, shape in (
        ("attn_qkv.weight", (config.delta_channels, hidden)),
        ("attn_gate.weight", (inner, hidden)),
        ("ssm_conv1d.weight", (config.delta_channels, config.conv_kernel)),
        ("ssm_dt.bias", (heads,)),
        ("ssm_a", (heads,)),
        ("ssm_alpha.weight", (heads, hidden)),
        ("ssm_beta.weight", (heads, hidden)),
        ("ssm_out.weight", (hidden, inner)),
    ):
        yield ExpectedTensor(prefix + name, shape, TensorClass.DELTA_NET)
    yield ExpectedTensor(f"{prefix}ssm_norm.weight", (config.delta_head_dim,), TensorClass.NORM)


def _mixture(prefix: str, config: Qwen4ExpConfig, model: GGUFModel) -> Iterator[ExpectedTensor]:
    hidden, experts = config.hidden, config.num_experts
    yield ExpectedTensor(f"{prefix}ffn_gate_inp.weight", (experts, hidden), TensorClass.ROUTER)
    down = f"{prefix}ffn_down_exps.weight"
    ff = model.info(down).shape[-1] if down in model else 0
    yield ExpectedTensor(down, (experts, hidden, ff), TensorClass.EXPERTS_DOWN)
    for name in ("gate", "up"):
        yield ExpectedTensor(
            f"{prefix}ffn_{name}_exps.weight", (experts, ff, hidden), TensorClass.EXPERTS_GATE_UP
        )
    shared_down = f"{prefix}ffn_down_shexp.weight"
    shared_ff = model.info(shared_down).shape[-1] if shared_down in model else 0
    yield ExpectedTensor(f"{prefix}ffn_gate_inp_shexp.weight", (hidden,), TensorClass.SHARED_EXPERT)
    yield ExpectedTensor(shared_down, (hidden, shared_ff), TensorClass.SHARED_EXPERT)
    for name in ("gate", "up"):
        yield ExpectedTensor(
            f"{prefix}ffn_{name}_shexp.weight", (shared_ff, hidden), TensorClass.SHARED_EXPERT
        )
