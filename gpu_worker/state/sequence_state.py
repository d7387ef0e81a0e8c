"""What one sequence keeps between steps, layer by layer.

Steps computed in torch replace tensors here, steps in machine code (`gpu_worker.native`) write into them;
each finds what the other left.

Delta-net layers keep a fixed amount (a matrix per head and the last inputs of the convolution); attention
layers keep keys and values of every position, and the indexer's pooled keys, one per complete block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.state.growing import GrowingRows, capacity_of
from shared.model_config import Qwen4ExpConfig

_FLOAT_BYTES = 4


@dataclass(slots=True)
class DeltaState:
    """A delta-net layer: `matrices` [value heads, key dim, value dim], `conv_inputs` [kernel - 1, channels],
    the projections before the convolution, oldest first."""

    matrices: Tensor
    conv_inputs: Tensor


@dataclass(slots=True)
class AttentionState:
    """An attention layer: `keys` and `values` [positions, kv heads, head dim] after norm and rotation;
    `block_keys` [complete blocks, indexer dim], finished; `open_keys` [0 .. ratio - 1, indexer dim], raw keys
    of the block that is not complete yet."""

    keys: GrowingRows
    values: GrowingRows
    block_keys: GrowingRows
    open_keys: GrowingRows


class SequenceState:
    """All layers of one sequence, and its position: the number of tokens computed so far. `predicted` is the
    same of the prediction block, which has as many positions in its attention layer."""

    def __init__(self, config: Qwen4ExpConfig, device: torch.device) -> None:
        self.position = 0
        self.predicted = 0
        self.delta: dict[int, DeltaState] = {}
        self.attention: dict[int, AttentionState] = {}
        self.ngram_conv_inputs: Tensor | None = None
        head_dim, heads = config.delta_head_dim, config.num_delta_value_heads
        for layer, is_recurrent in enumerate(config.is_recurrent):
            if is_recurrent:
                self.delta[layer] = DeltaState(
                    matrices=torch.zeros(heads, head_dim, head_dim, device=device),
                    conv_inputs=torch.zeros(config.conv_kernel - 1, config.delta_channels, device=device),
                )
            else:
                kv_shape = (config.num_kv_heads, config.head_dim)
                self.attention[layer] = AttentionState(
                    keys=GrowingRows(kv_shape, device),
                    values=GrowingRows(kv_shape, device),
                    block_keys=GrowingRows((config.indexer.head_dim,), device),
                    open_keys=GrowingRows((config.indexer.head_dim,), device, config.compress_ratios[layer]),
                )
        if config.ngram is not None:
            self.ngram_conv_inputs = torch.zeros(
                config.ngram.history_length, config.stream_width, device=device
            )


def storage_bytes(config: Qwen4ExpConfig, num_tokens: int) -> int:
    """What the attention layers of one sequence have grown to when it has so many tokens, in bytes: all of a
    state that depends on its length."""
    num_bytes = 0
    for layer, is_recurrent in enumerate(config.is_recurrent):
        if not is_recurrent and num_tokens:
            key_and_value = 2 * config.num_kv_heads * config.head_dim
            ratio = config.compress_ratios[layer]
            num_blocks = num_tokens // ratio if ratio else 0
            num_bytes += capacity_of(num_tokens) * key_and_value
            num_bytes += capacity_of(num_blocks) * config.indexer.head_dim if num_blocks else 0
    return num_bytes * _FLOAT_BYTES
