"""IQ1_M: as IQ1_S, with a scale for each 16 weights and a shift for each eight.

::

    low_bits u8[32] | high_bits u8[16] | scales u16[4]             56 bytes, 256 weights

The scale (f16) is scattered over the top halves of scales[0..3], lowest first. Eight weights have half a byte
of high_bits: three bits above low_bits[i] make their codebook entry, the fourth is the sign of the shift.
Sub-block s (16 weights) has three bits of scales[s // 4], from bit 3 * (s % 4).
value = scale * (2 * bits + 1) * (entry +- 1/8).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_from_bits, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ1_GRID
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    NumberedScales,
    all_or_nothing,
    fields,
    looked_up,
    spread_bits,
)
from shared.quants.simd.vector import HALF, I8, I16, I64, Value
from shared.quants.simd.ways import QuantisedWays

_HIGH_BITS, _SCALES = 32, 48


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale_bits = 0
    for k in range(4):
        scale_bits |= uint16_at(raw, at + _SCALES + 2 * k) >> 12 << (4 * k)
    scale = half_from_bits(scale_bits)
    for i in range(32):
        high_bits = byte_at(raw, at + _HIGH_BITS + i // 2) >> (i % 2 * 4) & 15
        entry = byte_at(raw, at + i) | (high_bits & 7) << 8
        sub_scale_bits = uint16_at(raw, at + _SCALES + i // 8 * 2) >> (i // 2 % 4 * 3) & 7
        sub_scale = scale * np.float32(2 * sub_scale_bits + 1)
        shift = np.float32(-0.125) if high_bits & 8 else np.float32(0.125)
        for j in range(8):
            put(out, start + 8 * i + j, sub_scale * (np.float32(IQ1_GRID[entry, j]) + shift))


class _Groups(NumberedScales):
    # In eighths, so that the shift is a whole number.
    smallest_code, largest_code = -9, 9

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        low = fields(block.double_word(4 * group).zero_extended(I64), 8, 4)
        high = fields(block.word(_HIGH_BITS + 2 * group), 4, 4)
        entries = [a | (b & 7) << 8 for a, b in zip(low, high, strict=True)]
        values = looked_up(code, code.table("iq1", IQ1_GRID), 8, entries)
        is_down = spread_bits(code, all_or_nothing([b >> 3 for b in high]))
        return (values << 3) + code.choose(is_down, code.splat(I8, 32, -1), code.splat(I8, 32, 1))

    def scale_numbers(self, block: Block) -> Value:
        words = block.words(_SCALES, 4)
        bits = (words.repeated(4) >> block.code.constant(I16, [0, 3, 6, 9] * 4)) & 7
        return (bits << 1) + 1

    def unit(self, block: Block) -> Value:
        words = block.quad_word(_SCALES) >> 12
        half = fields(words, 4, 4, stride=16)
        bits = (half[0] | half[1] << 4 | half[2] << 8 | half[3] << 12).truncated(I16)
        return bits.as_type(HALF, 0).to_float() * 0.125


_TYPE = tensor_type_named("IQ1_M")
IQ1_M = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
