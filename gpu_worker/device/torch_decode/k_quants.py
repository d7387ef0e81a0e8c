"""The K formats: blocks of 256 weights in groups with scales of their own. The layouts are told in
`shared.quants.formats`."""

import torch
from torch import Tensor

from gpu_worker.device.torch_decode.fields import bits, half, halves_apart


def _strided_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Bytes [n, parts, bytes] -> [n, parts, count, bytes]: the lowest bits of all bytes of a part, then the
    next ones."""
    return bits(packed, width, count).transpose(-1, -2)


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scales float32, [n, 256] and [n, groups]: each scale goes for as many codes, which it is
    multiplied into."""
    num_blocks, num_groups = scales.shape
    return codes.reshape(num_blocks, num_groups, -1).mul_(scales[:, :, None])


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [n, 12] (`shared.quants.formats.six_bit_scales`) -> scales and minimums, float32 [n, 8]."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return scales.float(), minimums.float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales = half(blocks, 80) * (blocks[:, :16] & 15).float()
    minimums = half(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = _strided_bits(torch.unflatten(blocks[:, 16:80], 1, (2, 32)), 2, 4)
    return _scaled(codes.float(), scales).sub_(minimums[:, :, None])


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = halves_apart(blocks[:, 96:104]), bits(blocks[:, 104:108], 2, 4)
    # Two more bits of scale s are in byte s % 4.
    scales = (low | high.transpose(1, 2).flatten(1) << 4).float() - 32
    codes = _strided_bits(torch.unflatten(blocks[:, 32:96], 1, (2, 32)), 2, 4).flatten(1)
    is_whole = _strided_bits(blocks[:, None, :32], 1, 8).flatten(1)
    return _scaled(codes.float() - 4 * (1 - is_whole.float()), half(blocks, 108) * scales)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _six_bits(blocks[:, 4:16])
    codes = halves_apart(torch.unflatten(blocks[:, 16:], 1, (4, 32)))
    scaled = _scaled(codes.float(), half(blocks, 0) * scales)
    return scaled.sub_((half(blocks, 2) * minimums)[:, :, None])


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _six_bits(blocks[:, 4:16])
    fifths = _strided_bits(blocks[:, None, 16:48], 1, 8).flatten(1)
    codes = halves_apart(torch.unflatten(blocks[:, 48:], 1, (4, 32))).flatten(1) | fifths << 4
    scaled = _scaled(codes.float(), half(blocks, 0) * scales)
    return scaled.sub_((half(blocks, 2) * minimums)[:, :, None])


def _q6_k(blocks: Tensor) -> Tensor:
    low = halves_apart(torch.unflatten(blocks[:, :128], 1, (2, 64))).flatten(1)
    high = _strided_bits(torch.unflatten(blocks[:, 128:192], 1, (2, 32)), 2, 4).flatten(1)
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _scaled((low | high << 4).float() - 32, scales)


DECODERS = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""blocks uint8 [num_blocks, block_bytes] -> float32 of num_blocks * 256 weights, by the format's name."""
