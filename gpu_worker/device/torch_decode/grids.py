"""Formats whose weights are looked up in codebooks, four or eight at a time. The layouts are told in
`shared.quants.formats`."""

import torch
from torch import Tensor

from gpu_worker.device.torch_decode.fields import bits, half, words16, words32
from gpu_worker.device.torch_decode.tables import table


def _looked_up(name: str, entries: Tensor) -> Tensor:
    """Numbers of entries, int32 [n, count] -> float32 [n, count * width], a row of the table each."""
    rows = table(name, entries.device).index_select(0, entries.reshape(-1))
    return rows.view(len(entries), -1)


def _scaled(scales: Tensor, magnitudes: Tensor, signs: Tensor) -> Tensor:
    """Float32 [n, groups], [n, 256] and [n, 256]."""
    num_blocks, num_groups = scales.shape
    scaled = magnitudes.view(num_blocks, num_groups, -1) * scales[:, :, None]
    return scaled.mul_(signs.view_as(scaled))


def _packed_signs(groups: Tensor) -> Tensor:
    """int32 [n, 8]: of each the signs of 32 weights in its bits 0 to 27 -> float32 [n, 256]."""
    return _looked_up("EVEN_SIGNS", bits(groups, 7, 4).flatten(1))


def _iq1_s(blocks: Tensor) -> Tensor:
    groups = words16(blocks, 34, 8)
    entries = blocks[:, 2:34].int() | bits(groups, 3, 4).flatten(1) << 8
    scales = half(blocks, 0) * (2 * (groups >> 12 & 7) + 1).float()
    shifts = torch.where(groups >> 15 == 1, -0.125, 0.125)
    values = _looked_up("IQ1_GRID", entries).view(len(blocks), 8, 32)
    return (values + shifts[:, :, None]).mul_(scales[:, :, None])


def _iq1_m(blocks: Tensor) -> Tensor:
    words = words16(blocks, 48, 4)
    tops = words >> 12
    scale_bits = tops[:, 0] | tops[:, 1] << 4 | tops[:, 2] << 8 | tops[:, 3] << 12
    scale = scale_bits.to(torch.int16).view(torch.float16).float()[:, None]
    high = bits(blocks[:, 32:48], 4, 2).flatten(1).int()
    entries = blocks[:, :32].int() | (high & 7) << 8
    scales = scale * (2 * bits(words, 3, 4).flatten(1) + 1).float()
    shifts = torch.where(high & 8 == 8, -0.125, 0.125)
    values = _looked_up("IQ1_GRID", entries).view(len(blocks), 32, 8)
    shifted = (values + shifts[:, :, None]).view(len(blocks), 16, 16)
    return shifted.mul_(scales[:, :, None])


def _iq2_xxs(blocks: Tensor) -> Tensor:
    groups = words32(blocks, 2, 16).view(-1, 8, 2)
    signs_and_scales = groups[:, :, 1]
    entries = bits(groups[:, :, 0], 8, 4).flatten(1)
    scales = half(blocks, 0) * (0.5 + (signs_and_scales >> 28 & 15).float()) * 0.25
    return _scaled(scales, _looked_up("IQ2_XXS_GRID", entries), _packed_signs(signs_and_scales))


def _iq2_xs(blocks: Tensor) -> Tensor:
    codes = words16(blocks, 2, 32)
    scales = half(blocks, 0) * (0.5 + bits(blocks[:, 66:], 4, 2).flatten(1).float()) * 0.25
    return _scaled(scales, _looked_up("IQ2_XS_GRID", codes & 511), _looked_up("EVEN_SIGNS", codes >> 9))


def _iq2_s(blocks: Tensor) -> Tensor:
    entries = blocks[:, 2:34].int() | bits(blocks[:, 66:74], 2, 4).flatten(1).int() << 8
    scales = half(blocks, 0) * (0.5 + bits(blocks[:, 74:], 4, 2).flatten(1).float()) * 0.25
    return _scaled(scales, _looked_up("IQ2_S_GRID", entries), _looked_up("SIGNS", blocks[:, 34:66].int()))


def _iq3_xxs(blocks: Tensor) -> Tensor:
    signs_and_scales = words32(blocks, 66, 8)
    scales = half(blocks, 0) * (0.5 + (signs_and_scales >> 28 & 15).float()) * 0.5
    magnitudes = _looked_up("IQ3_XXS_GRID", blocks[:, 2:66].int())
    return _scaled(scales, magnitudes, _packed_signs(signs_and_scales))


def _iq3_s(blocks: Tensor) -> Tensor:
    entries = blocks[:, 2:66].int() | bits(blocks[:, 66:74], 1, 8).flatten(1).int() << 8
    scales = half(blocks, 0) * (1 + 2 * bits(blocks[:, 106:], 4, 2).flatten(1).int()).float()
    return _scaled(scales, _looked_up("IQ3_S_GRID", entries), _looked_up("SIGNS", blocks[:, 74:106].int()))


DECODERS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""blocks uint8 [num_blocks, block_bytes] -> float32 of num_blocks * 256 weights, by the format's name."""
