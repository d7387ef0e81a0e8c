"""Rows of keys and values (`shared.kv_format`) in compiled code: encoded once, decoded whenever used.

Numbers are rounded to the nearest code, ties to even. A group that has NaN or an infinity, or values too
large for a scale (65504 times the largest code), is NaN when it is read. F16 has infinities of its own.

Everything here is callable from compiled code only.
"""

import numpy as np

from gpu_worker.native.regions import region
from shared.kv_format import F16, F32, INT4, INT8
from shared.native.arithmetic import Pointer
from shared.native.memory import bytes_at, floats_at, halves_at, signed_bytes_at
from shared.quants.jit import jitable

DECODED = 2
"""The region that decoded rows are written in, and are to be read in: loads of another one could be moved
before the stores, once the compiler has put both into one function."""
put_decoded = region(DECODED)[1]
get_code = region(3)[0]

_F32, _F16, _INT8 = F32.number, F16.number, INT8.number
_SCALED_8, _SCALED_4 = INT8.scaled, INT4.scaled
_HIGHEST_8, _LOWEST_4, _HIGHEST_4 = np.float32(127), np.float32(-8), np.float32(7)
# Added to a small number this leaves its nearest integer.
_ROUNDING = np.float32(1.5 * 2**23)
_SUBNORMAL_STEP = np.float32(2.0**-24)


@jitable
def half_value(bits: int) -> np.float32:
    """The value of the half-precision number with these 16 bits, exactly; any NaN stays one. Without
    branches, so that loops are vectorised, and without numba's conversion, which needs a CPU with F16C."""
    rest = np.uint32(bits & 0x7FFF)
    # Exponents are biased by 15 there and by 127 here; those of infinities and NaN go to the top.
    bias = np.uint32((224 if rest >= 0x7C00 else 112) << 23)
    normal = np.uint32((rest << np.uint32(13)) + bias).view(np.float32)
    subnormal = np.float32(np.int32(rest)) * _SUBNORMAL_STEP
    magnitude = subnormal if rest < 0x0400 else normal
    sign = np.uint32((bits & 0x8000) << 16)
    return np.uint32(np.float32(magnitude).view(np.uint32) | sign).view(np.float32)


@jitable
def half_bits(x: np.float32) -> int:
    """The nearest half-precision number, ties to even: its 16 bits. From 65520 on it is infinite; NaN stays
    NaN."""
    bits = np.float32(x).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    rest = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if rest > np.uint32(0x7F800000):
        return int(sign | np.uint32(0x7E00))
    if rest >= np.uint32(0x477FF000):
        return int(sign | np.uint32(0x7C00))
    if rest < np.uint32(0x38800000):
        # The steps of float32 from 0.5 on are those of subnormal halves.
        shifted = np.float32(rest.view(np.float32) + np.float32(0.5))
        return int(sign | (shifted.view(np.uint32) - np.uint32(0x3F000000)))
    rounded = rest + np.uint32(0xFFF) + ((rest >> np.uint32(13)) & np.uint32(1))
    return int(sign | ((rounded - np.uint32(112 << 23)) >> np.uint32(13)))


@jitable
def _extreme(x: Pointer, first: int, count: int) -> np.float32:
    """Of a group the value that is farthest from 0, the negative one where two are; NaN where one is not
    finite."""
    lowest, highest, taint = np.float32(0), np.float32(0), np.float32(0)
    for i in range(first, first + count):
        lowest = x[i] if x[i] < lowest else lowest
        highest = x[i] if x[i] > highest else highest
        # 0, or NaN for good.
        taint += x[i] * np.float32(0)
    return (lowest if -lowest >= highest else highest) + taint


@jitable
def _code_of(x: np.float32, scale: np.float32, lowest: np.float32, highest: np.float32) -> int:
    """The nearest code, where the scale is a number other than 0; any otherwise."""
    code = np.divide(x, scale)
    # NaN becomes the highest.
    code = code if code < highest else highest
    code = code if code > lowest else lowest
    return int(np.float32(code + _ROUNDING) - _ROUNDING)


@jitable
def encode_row(x: Pointer, row_format: int, dim: int, row: int) -> None:
    """Writes x [dim] at the address `row`."""
    if row_format == _F32:
        floats = floats_at(row)
        for i in range(dim):
            floats[i] = x[i]
        return
    halves = halves_at(row)
    if row_format == _F16:
        for i in range(dim):
            halves[i] = half_bits(x[i])
        return
    if row_format == _INT8:
        codes = signed_bytes_at(row + 2 * ((dim + _SCALED_8 - 1) // _SCALED_8))
        for first in range(0, dim, _SCALED_8):
            count = min(_SCALED_8, dim - first)
            scale_bits = half_bits(np.divide(np.abs(_extreme(x, first, count)), _HIGHEST_8))
            halves[first // _SCALED_8] = scale_bits
            scale = half_value(scale_bits)
            for i in range(first, first + count):
                codes[i] = _code_of(x[i], scale, -_HIGHEST_8, _HIGHEST_8)
        return
    pairs = bytes_at(row + 2 * ((dim + _SCALED_4 - 1) // _SCALED_4))
    for first in range(0, dim, _SCALED_4):
        count = min(_SCALED_4, dim - first)
        scale_bits = half_bits(np.divide(_extreme(x, first, count), _LOWEST_4))
        halves[first // _SCALED_4] = scale_bits
        scale = half_value(scale_bits)
        half = (count + 1) // 2
        for j in range(half):
            low, high = _code_of(x[first + j], scale, _LOWEST_4, _HIGHEST_4), 0
            if half + j < count:
                high = _code_of(x[first + half + j], scale, _LOWEST_4, _HIGHEST_4)
            pairs[first // 2 + j] = (low + 8) | (high + 8) << 4


@jitable
def _decode_f16(row: int, dim: int, out: Pointer) -> None:
    halves = halves_at(row)
    for i in range(dim):
        put_decoded(out, i, half_value(get_code(halves, i)))


@jitable
def _decode_8(codes: Pointer, first: int, count: int, scale: np.float32, out: Pointer) -> None:
    for i in range(first, first + count):
        put_decoded(out, i, np.float32(get_code(codes, i)) * scale)


@jitable
def _decode_int8(row: int, dim: int, out: Pointer) -> None:
    scales = halves_at(row)
    codes = signed_bytes_at(row + 2 * ((dim + _SCALED_8 - 1) // _SCALED_8))
    whole = dim // _SCALED_8
    # Of whole groups the compiler knows how long they are.
    for group in range(whole):
        _decode_8(codes, group * _SCALED_8, _SCALED_8, half_value(scales[group]), out)
    first = whole * _SCALED_8
    if first < dim:
        _decode_8(codes, first, dim - first, half_value(scales[whole]), out)


@jitable
def _decode_4(pairs: Pointer, first: int, count: int, scale: np.float32, out: Pointer) -> None:
    half = (count + 1) // 2
    for j in range(half):
        pair = np.int32(get_code(pairs, first // 2 + j))
        put_decoded(out, first + j, np.float32((pair & 15) - 8) * scale)
    for j in range(count - half):
        pair = np.int32(get_code(pairs, first // 2 + j))
        put_decoded(out, first + half + j, np.float32((pair >> 4) - 8) * scale)


@jitable
def _decode_int4(row: int, dim: int, out: Pointer) -> None:
    scales = halves_at(row)
    pairs = bytes_at(row + 2 * ((dim + _SCALED_4 - 1) // _SCALED_4))
    whole = dim // _SCALED_4
    for group in range(whole):
        _decode_4(pairs, group * _SCALED_4, _SCALED_4, half_value(scales[group]), out)
    first = whole * _SCALED_4
    if first < dim:
        _decode_4(pairs, first, dim - first, half_value(scales[whole]), out)


@jitable
def decode_rows(rows: Pointer, num_rows: int, row_format: int, dim: int, out: int) -> None:
    """Decodes the rows at these addresses to float32 [num_rows, dim] at `out`, and puts the addresses of
    those in place of them. Rows that are float32 stay where they are."""
    if row_format == _F32:
        return
    for number in range(num_rows):
        row, address = rows[number], out + number * dim * 4
        decoded = floats_at(address)
        if row_format == _F16:
            _decode_f16(row, dim, decoded)
        elif row_format == _INT8:
            _decode_int8(row, dim, decoded)
        else:
            _decode_int4(row, dim, decoded)
        rows[number] = address
