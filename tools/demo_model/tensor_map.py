"""Which tensor of a transformers checkpoint is which tensor of a `qwen4exp` GGUF file, both ways.

The two differ in four things: names; norms (the file stores the factor, the checkpoint the factor minus
one); the order of the delta net's value heads (the checkpoint groups them by key head, the file tiles
them); and a few matrices that are one in the checkpoint and two in the file, or the reverse. `convert` and
`to_transformers` use this table; it computes in numpy and knows nothing of quantised types beyond three
classes of tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from tools.demo_model.config import DemoConfig

Array = NDArray[np.float32]
State = dict[str, Array]


class Storage(Enum):
    """How far a tensor may be compressed."""

    MATRIX = auto()
    """The bulk of the weights: any type the file is made in."""
    MIXER = auto()
    """Hyper-connection mixers: not below 16 bits, as published files have it."""
    EXACT = auto()
    """Norms, convolutions, routers and other small tensors: always F32."""


@dataclass(frozen=True, slots=True)
class Link:
    """One tensor under both names, with the change of values each way."""

    gguf_name: str
    checkpoint_name: str
    storage: Storage = Storage.MATRIX
    encode: Callable[[Array], Array] = np.asarray
    decode: Callable[[Array], Array] = np.asarray


def links(config: DemoConfig, has_prediction: bool) -> list[Link]:
    """Every tensor of the file, in file order. Checkpoint names are those of `split_fused`."""
    trunk_depth = config.num_hidden_layers
    table = [
        Link("token_embd.weight", "model.embed_tokens.weight"),
        Link("output.weight", "lm_head.weight"),
        *_mixer("output_hc_", "model.hyper_connection_mixer.", has_inject=False),
        Link(
            "per_layer_token_embd.weight",
            f"model.layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding.weight",
        ),
    ]
    for layer in range(trunk_depth):
        table += _block(config, f"blk.{layer}.", f"model.layers.{layer}.", config.is_attention(layer))
        if layer == config.ple_layer:
            table += _ngram_layer(f"blk.{layer}.ple_", f"model.layers.{layer}.ple.")
    if has_prediction:
        prefix = f"blk.{trunk_depth}."
        table += _block(config, prefix, "mtp.layers.0.", is_attention=True)
        table += [
            _norm(prefix + "nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
            _norm(prefix + "nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
            Link(prefix + "nextn.eh_proj.weight", "mtp.fc.weight"),
            *_mixer(prefix + "nextn.hc_head_", "mtp.hyper_connection_mixer.", has_inject=False),
        ]
    return table


def _block(config: DemoConfig, gguf: str, checkpoint: str, is_attention: bool) -> list[Link]:
    return [
        *_mixer(gguf + "hc_attn_", checkpoint + "attn_hyper_connection."),
        *_mixer(gguf + "hc_ffn_", checkpoint + "mlp_hyper_connection."),
        *(
            _attention(gguf, checkpoint + "self_attn.")
            if is_attention
            else _delta_net(config, gguf, checkpoint + "linear_attn.")
        ),
        *_experts(gguf + "ffn_", checkpoint + "mlp."),
    ]


def _mixer(gguf: str, checkpoint: str, has_inject: bool = True) -> list[Link]:
    table = [
        _norm(gguf + "norm.weight", checkpoint + "hc_norm.weight"),
        Link(gguf + "down.weight", checkpoint + "input_mix_weight_down.weight", Storage.MIXER),
        Link(gguf + "up.weight", checkpoint + "input_mix_weight_up.weight", Storage.MIXER),
    ]
    if has_inject:
        table.append(Link(gguf + "inject.weight", checkpoint + "block_inject_weight.weight", Storage.EXACT))
    return table


def _attention(gguf: str, checkpoint: str) -> list[Link]:
    return [
        Link(gguf + "attn_q.weight", checkpoint + "q_proj.weight"),
        Link(gguf + "attn_k.weight", checkpoint + "k_proj.weight"),
        Link(gguf + "attn_v.weight", checkpoint + "v_proj.weight"),
        Link(gguf + "attn_output.weight", checkpoint + "o_proj.weight"),
        _norm(gguf + "attn_q_norm.weight", checkpoint + "q_norm.weight"),
        _norm(gguf + "attn_k_norm.weight", checkpoint + "k_norm.weight"),
        Link(gguf + "indexer.q_proj.weight", checkpoint + "indexer.q_proj.weight", Storage.EXACT),
        Link(gguf + "indexer.k_proj.weight", checkpoint + "indexer.k_proj.weight", Storage.EXACT),
        _norm(gguf + "indexer.q_norm.weight", checkpoint + "indexer.q_layernorm.weight"),
        _norm(gguf + "indexer.k_norm.weight", checkpoint + "indexer.k_layernorm.weight"),
    ]


def _delta_net(config: DemoConfig, gguf: str, checkpoint: str) -> list[Link]:
    size = config.linear_value_head_dim
    num_fixed = 2 * config.linear_key_dim

    def reordered(unit: int, axis: int = 0, fixed: int = 0) -> dict[str, Callable[[Array], Array]]:
        """Both directions of the value-head order, for heads of `unit` rows after `fixed` rows of keys."""

        def apply(array: Array, order: NDArray[np.int64]) -> Array:
            index = np.concatenate([np.arange(fixed), fixed + order])
            return np.take(array, index, axis)

        order = _tiled_order(config, unit)
        inverse = np.argsort(order)
        return {
            "encode": lambda array: apply(array, order),
            "decode": lambda array: apply(array, inverse),
        }

    convolution = reordered(1 * size, fixed=num_fixed)
    decay = reordered(1)
    return [
        Link(gguf + "attn_qkv.weight", checkpoint + "in_proj_qkv.weight", **reordered(size, fixed=num_fixed)),
        Link(gguf + "attn_gate.weight", checkpoint + "in_proj_z.weight", **reordered(size)),
        Link(
            gguf + "ssm_conv1d.weight",
            checkpoint + "conv1d.weight",
            Storage.EXACT,
            lambda array: convolution["encode"](array[:, 0]),
            lambda array: convolution["decode"](array)[:, None],
        ),
        Link(gguf + "ssm_dt.bias", checkpoint + "dt_bias", Storage.EXACT, **reordered(1)),
        Link(
            gguf + "ssm_a",
            checkpoint + "A_log",
            Storage.EXACT,
            lambda array: decay["encode"](-np.exp(array)),
            lambda array: decay["decode"](np.log(-array)),
        ),
        Link(gguf + "ssm_beta.weight", checkpoint + "in_proj_b.weight", Storage.EXACT, **reordered(1)),
        Link(gguf + "ssm_alpha.weight", checkpoint + "in_proj_a.weight", Storage.EXACT, **reordered(1)),
        Link(gguf + "ssm_norm.weight", checkpoint + "norm.weight", Storage.EXACT),
        Link(gguf + "ssm_out.weight", checkpoint + "out_proj.weight", **reordered(size, axis=1)),
    ]


def _tiled_order(config: DemoConfig, unit: int) -> NDArray[np.int64]:
    """Source of each row in the file: position `j * num_key_heads + g` holds value head `g * ratio + j`."""
    key_heads = config.linear_num_key_heads
    grouped = np.arange(config.linear_num_value_heads * unit).reshape(key_heads, -1, unit)
    return grouped.transpose(1, 0, 2).reshape(-1)


def _ngram_layer(gguf: str, checkpoint: str) -> list[Link]:
    return [
        Link(gguf + "key.weight", checkpoint + "key_proj.weight"),
        Link(gguf + "value.weight", checkpoint + "value_proj.weight"),
        *(
            _norm(f"{gguf}norm_{part}.weight", f"{checkpoint}norm_{part}.weight")
            for part in ("key", "query", "conv")
        ),
        Link(
            gguf + "conv1d.weight",
            checkpoint + "conv1d.weight",
            Storage.EXACT,
            lambda array: array[:, 0],
            lambda array: array[:, None],
        ),
    ]


def _experts(gguf: str, checkpoint: str) -> list[Link]:
    return [
        Link(gguf + "gate_inp.weight", checkpoint + "gate.weight", Storage.EXACT),
        Link(gguf + "gate_exps.weight", checkpoint + "experts.gate_proj"),
        Link(gguf + "up_exps.weight", checkpoint + "experts.up_proj"),
        Link(gguf + "down_exps.weight", checkpoint + "experts.down_proj"),
        Link(
            gguf + "gate_inp_shexp.weight",
            checkpoint + "shared_expert_gate.weight",
            Storage.EXACT,
            lambda array: array[0],
            lambda array: array[None],
        ),
        *(
            Link(f"{gguf}{part}_shexp.weight", f"{checkpoint}shared_expert.{part}_proj.weight")
            for part in ("gate", "up", "down")
        ),
    ]


def _norm(gguf_name: str, checkpoint_name: str) -> Link:
    """A norm whose checkpoint weight is centred on zero."""
    return Link(
        gguf_name,
        checkpoint_name,
        Storage.EXACT,
        lambda array: array + np.float32(1),
        lambda array: array - np.float32(1),
    )


def split_fused(state: Mapping[str, Array], config: DemoConfig) -> State:
    """The checkpoint with each fused matrix in the pieces that the file holds (and `mtp.fc` in one)."""
    split: State = {}
    num_query_rows = config.indexer_n_heads * config.indexer_head_dim
    for name, array in state.items():
        stem, _, leaf = name.rpartition("mlp.experts.gate_up_proj")
        if stem and not leaf:
            split[stem + "mlp.experts.gate_proj"] = array[:, : config.moe_intermediate_size]
            split[stem + "mlp.experts.up_proj"] = array[:, config.moe_intermediate_size :]
        elif name.endswith("index_qk_proj.weight"):
            indexer = name.removesuffix("index_qk_proj.weight")
            split[indexer + "q_proj.weight"] = array[:num_query_rows]
            split[indexer + "k_proj.weight"] = array[num_query_rows:]
        else:
            split[name] = array
    if "mtp.fc_embedding.weight" in split:
        halves = [split.pop("mtp.fc_embedding.weight"), split.pop("mtp.fc_hidden.weight")]
        split["mtp.fc.weight"] = np.concatenate(halves, axis=1)
    return split


def join_fused(split: Mapping[str, Array]) -> State:
    """The inverse of `split_fused`."""
    state = dict(split)
    for name in split:
        if name.endswith("experts.gate_proj"):
            stem = name.removesuffix("gate_proj")
            halves = [state.pop(name), state.pop(stem + "up_proj")]
            state[stem + "gate_up_proj"] = np.concatenate(halves, axis=1)
        elif name.endswith("indexer.q_proj.weight"):
            stem = name.removesuffix("q_proj.weight")
            halves = [state.pop(name), state.pop(stem + "k_proj.weight")]
            state[stem + "index_qk_proj.weight"] = np.concatenate(halves, axis=0)
    if "mtp.fc.weight" in state:
        embedding, hidden = np.split(state.pop("mtp.fc.weight"), 2, axis=1)
        state["mtp.fc_embedding.weight"], state["mtp.fc_hidden.weight"] = embedding, hidden
    return state
