"""Finds the decoder of a format, and checks what it is given."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gpu_worker.device.torch_decode import grids, k_quants, plain
from shared.quants import BlockFormat

_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **plain.DECODERS,
    **k_quants.DECODERS,
    **grids.DECODERS,
}


def decode_blocks(block_format: BlockFormat, blocks: Tensor) -> Tensor:
    """blocks uint8 [num_blocks, block_bytes] -> their weights, float32 [num_blocks, block_size], on the same
    device, where nothing waits for it. Raises ValueError for another shape or type."""
    kind = block_format.type
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] != kind.block_bytes:
        raise ValueError(
            f"{kind.name} blocks must be uint8 [num_blocks, {kind.block_bytes}],"
            f" not {blocks.dtype} {list(blocks.shape)}"
        )
    if len(blocks) == 0:
        return torch.empty((0, kind.block_size), device=blocks.device)
    return _DECODERS[kind.name](blocks).view(len(blocks), kind.block_size)
