"""Formats whose weights are looked up in codebooks, two, four or eight at a time. The layouts are told in
`shared.quants.formats`."""

import torch
from torch import Tensor

from gpu_worker.device.torch_decode.fields import bits, half, words16, words32
from gpu_worker.device.torch_decode.tables import (
    NUM_EVEN_SIGNS,
    NUM_SHIFTS,
    NUM_SIGNS,
    NUM_SIGNS_OF_FOUR,
    table,
)


def _scaled(scales: Tensor, name: str, rows: Tensor) -> Tensor:
    """Rows of a table, int32 [n, count], times scales float32 [n, groups], each for as many values."""
    num_blocks, num_groups = scales.shape
    values = table(name, rows.device).index_select(0, rows.reshape(-1))
    return values.view(num_blocks, num_groups, -1).mul_(scales[:, :, None])


def _iq1_s(blocks: Tensor) -> Tensor:
    groups = words16(blocks, 34, 8)
    entries = blocks[:, 2:34].int() | bits(groups, 3, 4).flatten(1) << 8
    is_down = (groups >> 15).repeat_interleave(4, dim=1)
    scales = half(blocks, 0) * (2 * (groups >> 12 & 7) + 1).float()
    return _scaled(scales, "IQ1", entries * NUM_SHIFTS + is_down)


def _iq1_m(blocks: Tensor) -> Tensor:
    words = words16(blocks, 48, 4)
    tops = words >> 12
    scale_bits = tops[:, 0] | tops[:, 1] << 4 | tops[:, 2] << 8 | tops[:, 3] << 12
    scale = scale_bits.to(torch.int16).view(torch.float16).float()[:, None]
    high = bits(blocks[:, 32:48], 4, 2).flatten(1).int()
    entries = blocks[:, :32].int() | (high & 7) << 8
    scales = scale * (2 * bits(words, 3, 4).flatten(1) + 1).float()
    return _scaled(scales, "IQ1", entries * NUM_SHIFTS + (high >> 3))


def _quarter_scales(blocks: Tensor, packed: Tensor) -> Tensor:
    """Of the halves of bytes [n, count]: float32 [n, 2 count]."""
    return half(blocks, 0) * (0.5 + bits(packed, 4, 2).flatten(1).float()) * 0.25


def _iq2_xxs(blocks: Tensor) -> Tensor:
    groups = words32(blocks, 2, 16).view(-1, 8, 2)
    signs_and_scales = groups[:, :, 1]
    entries, signs = bits(groups[:, :, 0], 8, 4).flatten(1), bits(signs_and_scales, 7, 4).flatten(1)
    scales = half(blocks, 0) * (0.5 + (signs_and_scales >> 28 & 15).float()) * 0.25
    return _scaled(scales, "IQ2_XXS", entries * NUM_EVEN_SIGNS + signs)


def _iq2_xs(blocks: Tensor) -> Tensor:
    codes = words16(blocks, 2, 32)
    scales = _quarter_scales(blocks, blocks[:, 66:])
    return _scaled(scales, "IQ2_XS", (codes & 511) * NUM_EVEN_SIGNS + (codes >> 9))


def _iq2_s(blocks: Tensor) -> Tensor:
    entries = blocks[:, 2:34].int() | bits(blocks[:, 66:74], 2, 4).flatten(1).int() << 8
    scales = _quarter_scales(blocks, blocks[:, 74:])
    return _scaled(scales, "IQ2_S", entries * NUM_SIGNS + blocks[:, 34:66].int())


def _iq3_xxs(blocks: Tensor) -> Tensor:
    signs_and_scales = words32(blocks, 66, 8)
    seven_bits = bits(signs_and_scales, 7, 4).flatten()
    signs = table("even signs", blocks.device).index_select(0, seven_bits).view(-1, 32)
    scales = half(blocks, 0) * (0.5 + (signs_and_scales >> 28 & 15).float()) * 0.5
    entries = blocks[:, 2:66].int()
    return _scaled(scales, "IQ3_XXS", entries * NUM_SIGNS_OF_FOUR + bits(signs, 4, 2).flatten(1))


def _iq3_s(blocks: Tensor) -> Tensor:
    entries = blocks[:, 2:66].int() | bits(blocks[:, 66:74], 1, 8).flatten(1).int() << 8
    signs = bits(blocks[:, 74:106], 4, 2).flatten(1).int()
    scales = half(blocks, 0) * (1 + 2 * bits(blocks[:, 106:], 4, 2).flatten(1).int()).float()
    return _scaled(scales, "IQ3_S", entries * NUM_SIGNS_OF_FOUR + signs)


def _pairs(scales: Tensor, codes: Tensor) -> Tensor:
    """Scales float32 [n, groups] and bytes [n, groups * 16] -> [n, groups, 2, 16]: of each group the low
    halves come first."""
    num_blocks, num_groups = scales.shape
    values = table("IQ4", codes.device).index_select(0, codes.int().view(-1))
    values = values.view(num_blocks, num_groups, 16, 2).transpose(2, 3)
    # Into memory of its own, so that the halves are parted in the same go.
    scaled = values.new_empty((num_blocks, num_groups, 2, 16))
    return torch.mul(values, scales[:, :, None, None], out=scaled)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _pairs(half(blocks, 0), blocks[:, 2:])


def _iq4_xs(blocks: Tensor) -> Tensor:
    low, high = bits(blocks[:, 4:8], 4, 2).flatten(1), bits(words16(blocks, 2, 1), 2, 8).flatten(1)
    return _pairs(half(blocks, 0) * ((low | high << 4).float() - 32), blocks[:, 8:])


DECODERS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""blocks uint8 [num_blocks, block_bytes] -> float32 of all their weights, by the format's name."""
