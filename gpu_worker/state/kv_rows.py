"""Rows of keys and values (`shared.kv_format`) as tensors: how they are kept, and made and read by torch.

The bytes are those that `gpu_worker.native.kv_rows` writes, which says what becomes of NaN and of numbers
that are too large.
"""

import torch
from torch import Tensor
from torch.nn import functional

from shared.kv_format import F16, F32, HALF_BYTES, INT4, INT8, RowFormat

_DTYPES = {F32: torch.float32, F16: torch.float16}
_CODES = {INT8: (-127, 127), INT4: (-8, 7)}


def empty_rows(
    num_rows: int, num_heads: int, dim: int, row_format: RowFormat, device: torch.device
) -> Tensor:
    """Memory for rows of a format, of which nothing is filled in: float32 or float16 [rows, heads, dim], or
    where rows are integers uint8 [rows, heads, row_bytes]."""
    dtype = _DTYPES.get(row_format, torch.uint8)
    width = row_format.row_bytes(dim) // dtype.itemsize
    return torch.empty(num_rows, num_heads, width, dtype=dtype, device=device)


def encoded(x: Tensor, row_format: RowFormat) -> Tensor:
    """x float32 [..., dim] as rows of a format, in the shape that `empty_rows` gives them."""
    if row_format in _DTYPES:
        return x.to(_DTYPES[row_format])
    dim, groups = x.shape[-1], _groups(x, row_format)
    lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    # 0, or NaN for good.
    taint = (groups * 0).sum(-1)
    extremes = torch.where(-lowest >= highest, lowest, highest) + taint
    scales = (extremes.abs() / 127 if row_format is INT8 else extremes / -8).half()
    least, most = _CODES[row_format]
    codes = groups / scales.float()[..., None]
    codes = torch.where(codes < most, codes, most)
    codes = torch.where(codes > least, codes, least).round()
    row_bytes = row_format.row_bytes(dim)
    if row_format is INT8:
        packed = codes.to(torch.int8).view(torch.uint8).flatten(-2)[..., :dim]
    else:
        pairs = (codes + 8).to(torch.uint8)
        packed = torch.cat(
            [_pairs(pairs[..., :-1, :]), _pairs(pairs[..., -1:, : _last_group(dim, row_format)])], -1
        )
    rows = torch.cat([scales.view(torch.uint8), packed], -1)
    return functional.pad(rows, (0, row_bytes - rows.shape[-1]))


def decoded(rows: Tensor, row_format: RowFormat, dim: int) -> Tensor:
    """Rows, as `empty_rows` has them, in float32 [..., dim]."""
    if row_format in _DTYPES:
        return rows.float()
    num_scales = row_format.num_scales(dim)
    begin = HALF_BYTES * num_scales
    scales = rows[..., :begin].view(torch.float16).float()
    if row_format is INT8:
        codes = rows[..., begin : begin + dim].view(torch.int8).float()
    else:
        whole = (num_scales - 1) * row_format.scaled // 2
        pairs = _split(rows[..., begin : begin + whole], row_format.scaled // 2)
        last = rows[..., begin + whole : begin + -(-dim // 2)][..., None, :]
        codes = torch.cat([_halves(pairs), _halves(last)[..., : dim - 2 * whole]], -1).float() - 8
    return codes * scales.repeat_interleave(row_format.scaled, -1)[..., :dim]


def _groups(x: Tensor, row_format: RowFormat) -> Tensor:
    """[..., dim] -> [..., groups, values of a group], zeros after the last value."""
    missing = row_format.num_scales(x.shape[-1]) * row_format.scaled - x.shape[-1]
    return _split(functional.pad(x, (0, missing)), row_format.scaled)


def _split(x: Tensor, size: int) -> Tensor:
    """[..., n * size] -> [..., n, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _last_group(dim: int, row_format: RowFormat) -> int:
    """Codes of the last group, an even number, so that they are pairs."""
    count = dim - (row_format.num_scales(dim) - 1) * row_format.scaled
    return count + count % 2


def _pairs(codes: Tensor) -> Tensor:
    """uint8 [..., groups, n] -> [..., groups * n / 2]."""
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 [..., groups, n] -> [..., groups * 2 n]."""
    return torch.cat([pairs & 15, pairs >> 4], -1).flatten(-2)
