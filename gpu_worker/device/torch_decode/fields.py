"""Parts of blocks as numbers: half precision, words, and the few bits that codes and scales are packed into.

Blocks are uint8 [num_blocks, block_bytes]. Numbers that are computed with in float32 are exact here: no step
rounds, or contracts two, where `shared.quants.formats` does not.
"""

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The f16 at that byte, as float32 [num_blocks, 1]."""
    return _words(blocks, at, 1, torch.float16).float()


def words16(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` u16 from that byte on, as int32 [num_blocks, count]."""
    return _words(blocks, at, count, torch.int16).int() & 0xFFFF


def words32(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` u32 from that byte on, as int32 [num_blocks, count]: the top bit is the sign. A shift to the
    right brings copies of it down, which are to be masked."""
    return _words(blocks, at, count, torch.int32)


def bits(packed: Tensor, width: int, count: int) -> Tensor:
    """uint8 or int32 [..., n] -> [..., n, count]: of each number `count` times `width` bits, lowest first."""
    shifts = torch.arange(0, width * count, width, dtype=packed.dtype, device=packed.device)
    return (packed[..., None] >> shifts) & ((1 << width) - 1)


def halves_apart(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> [..., 2 n]: the low halves of all, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _words(blocks: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    # A copy, since a word may lie anywhere in a block, and devices read words from their own borders only.
    chosen = blocks[:, at : at + count * dtype.itemsize]
    return chosen.clone(memory_format=torch.contiguous_format).view(dtype)
