"""IQ3_S: groups of four weights from a codebook of 512 magnitudes, with signs.

::

    scale f16 | low_bits u8[64] | high_bits u8[8] | signs u8[32] | scales u8[4]      110 bytes, 256 weights

Four weights have entry low_bits[i] + 256 * (bit i % 8 of high_bits[i // 8]); eight weights have a byte of
signs. Group g (32 weights) has a half of scales[g // 2], the low one first;
value = scale * (1 + 2 * bits) * magnitude * sign.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ3_S_GRID, SIGNS
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    GroupDescription,
    bits_of_bytes,
    interleaved_nibbles,
    looked_up,
    negated_where,
    spread_bits,
    to_floats,
)
from shared.quants.simd.vector import I16, Value
from shared.quants.simd.ways import QuantisedWays

_LOW_BITS, _HIGH_BITS, _SIGNS, _SCALES = 2, 66, 74, 106


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for i in range(64):
        group_scale_bits = byte_at(raw, at + _SCALES + i // 16) >> (i // 8 % 2 * 4) & 15
        group_scale = scale * np.float32(1 + 2 * group_scale_bits)
        entry = (
            byte_at(raw, at + _LOW_BITS + i) | (byte_at(raw, at + _HIGH_BITS + i // 8) >> (i % 8) & 1) << 8
        )
        signs, first_sign = byte_at(raw, at + _SIGNS + i // 2), i % 2 * 4
        for j in range(4):
            magnitude = np.float32(IQ3_S_GRID[entry, j])
            put(out, start + 4 * i + j, group_scale * magnitude * SIGNS[signs, first_sign + j])


def _entries(block: Block) -> list[Value]:
    """All 64."""
    code = block.code
    low = block.bytes(_LOW_BITS, 64).zero_extended(I16)
    high = bits_of_bytes(code, block.bytes(_HIGH_BITS, 8), 0, 8)
    return code.unpacked(code.choose(high, low | 256, low))


class _Groups(GroupDescription):
    is_tile_scheduled = True
    smallest_code, largest_code = -15, 15

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        entries = block.once("entries", _entries)[8 * group : 8 * group + 8]
        magnitudes = looked_up(code, code.table("iq3_s", IQ3_S_GRID), 4, entries)
        signs = spread_bits(code, block.double_word(_SIGNS + 4 * group))
        return negated_where(code, signs, magnitudes)

    def scales(self, block: Block) -> Value:
        bits = to_floats(interleaved_nibbles(block.bytes(_SCALES, 4)))
        return (bits * 2.0 + 1.0) * block.half(0).broadcast(8)


_TYPE = tensor_type_named("IQ3_S")
IQ3_S = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
