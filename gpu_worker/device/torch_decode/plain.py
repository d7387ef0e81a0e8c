"""Float types, and formats with one scale for all weights of a block. The layouts are told in
`shared.quants.formats`."""

import torch
from torch import Tensor

from gpu_worker.device.torch_decode.fields import bits, half, halves_apart, words16


def _f32(blocks: Tensor) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return half(blocks, 0)


def _bf16(blocks: Tensor) -> Tensor:
    return (words16(blocks, 0, 1) << 16).view(torch.float32)


def _q1_0(blocks: Tensor) -> Tensor:
    signs = bits(blocks[:, 2:], 1, 8).flatten(1)
    return -half(blocks, 0) * (1 - 2 * signs.float())


def _q2_0(blocks: Tensor) -> Tensor:
    codes = bits(blocks[:, 2:], 2, 4).flatten(1)
    return (codes.float() - 1) * half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return (halves_apart(blocks[:, 2:]).float() - 8) * half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return halves_apart(blocks[:, 4:]).float() * half(blocks, 0) + half(blocks, 2)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """Codes of `fifth_bits u32 | codes u8[16]` from that byte on."""
    fifths = bits(blocks[:, at : at + 4], 1, 8).flatten(1)
    return halves_apart(blocks[:, at + 4 :]) | fifths << 4


def _q5_0(blocks: Tensor) -> Tensor:
    return (_five_bits(blocks, 2).float() - 16) * half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return _five_bits(blocks, 4).float() * half(blocks, 0) + half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


DECODERS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
"""blocks uint8 [num_blocks, block_bytes] -> float32 [num_blocks, block_size], by the format's name."""
