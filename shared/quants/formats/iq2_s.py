"""IQ2_S: groups of eight weights from a codebook of 1024 magnitudes, with signs.

::

    scale f16 | low_bits u8[32] | signs u8[32] | high_bits u8[8] | scales u8[8]      82 bytes, 256 weights

Eight weights have entry low_bits[i] + 256 * (two bits of high_bits[i // 4], from bit 2 * (i % 4)) and a whole
byte of signs. Sub-block s (16 weights) has a half of scales[s // 2], the low one first;
value = scale * (0.5 + bits) / 4 * magnitude * sign.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ2_S_GRID, SIGNS
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    NumberedScales,
    fields,
    interleaved_nibbles,
    looked_up,
    negated_where,
    spread_bits,
)
from shared.quants.simd.vector import I16, I64, Value
from shared.quants.simd.ways import QuantisedWays

_LOW_BITS, _SIGNS, _HIGH_BITS, _SCALES = 2, 34, 66, 74


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for i in range(32):
        sub_scale_bits = byte_at(raw, at + _SCALES + i // 4) >> (i // 2 % 2 * 4) & 15
        sub_scale = scale * (np.float32(0.5) + np.float32(sub_scale_bits)) * np.float32(0.25)
        high_bits = byte_at(raw, at + _HIGH_BITS + i // 4) >> (i % 4 * 2) & 3
        entry = byte_at(raw, at + _LOW_BITS + i) | high_bits << 8
        signs = byte_at(raw, at + _SIGNS + i)
        for j in range(8):
            put(out, start + 8 * i + j, sub_scale * np.float32(IQ2_S_GRID[entry, j]) * SIGNS[signs, j])


class _Groups(NumberedScales):
    smallest_code, largest_code = -43, 43

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        low = fields(block.double_word(_LOW_BITS + 4 * group).zero_extended(I64), 8, 4)
        high = fields(block.byte(_HIGH_BITS + group), 2, 4)
        entries = [a | b << 8 for a, b in zip(low, high, strict=True)]
        magnitudes = looked_up(code, code.table("iq2_s", IQ2_S_GRID), 8, entries)
        signs = spread_bits(code, block.double_word(_SIGNS + 4 * group))
        return negated_where(code, signs, magnitudes)

    def scale_numbers(self, block: Block) -> Value:
        bits = interleaved_nibbles(block.bytes(_SCALES, 8)).zero_extended(I16)
        return (bits << 1) + 1

    def unit(self, block: Block) -> Value:
        return block.half(0) * 0.125


_TYPE = tensor_type_named("IQ2_S")
IQ2_S = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
