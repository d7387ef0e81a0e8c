"""IQ4_XS: IQ4_NL's table, groups of 32 with a signed scale of six bits each.

::

    scale f16 | high_scales u16 | low_scales u8[4] | codes u8[128]        136 bytes, 256 weights

Group g has a half of low_scales[g // 2] (the low one first) and two bits of high_scales from bit 2g above,
less 32. Of its 16 bytes of codes, weight j has the low half of byte j, weight 16 + j the high half;
value = scale * group scale * table[code].
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ4_CODES, IQ4_VALUES
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, interleaved_nibbles, nibbles
from shared.quants.simd.vector import I32, Value
from shared.quants.simd.ways import QuantisedWays

_HIGH_SCALES, _LOW_SCALES, _CODES = 2, 4, 8


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, high_scales = half_at(raw, at), uint16_at(raw, at + _HIGH_SCALES)
    for group in range(8):
        low = byte_at(raw, at + _LOW_SCALES + group // 2) >> (group % 2 * 4) & 15
        high = high_scales >> (2 * group) & 3
        group_scale = scale * (np.float32(low | high << 4) - np.float32(32))
        for j in range(16):
            codes = byte_at(raw, at + _CODES + 16 * group + j)
            put(out, start + 32 * group + j, group_scale * IQ4_VALUES[codes & 15])
            put(out, start + 32 * group + 16 + j, group_scale * IQ4_VALUES[codes >> 4])


class _Groups(GroupDescription):
    smallest_code, largest_code = -127, 113

    pair_order = (0, 2, 1, 3)

    def codes(self, block: Block, group: int) -> Value:
        return block.code.look_up(IQ4_CODES, nibbles(block.bytes(_CODES + 16 * group, 16)))

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        block, group = first
        return block.code.look_up(IQ4_CODES, nibbles(block.bytes(_CODES + 16 * group, 32)))

    def scales(self, block: Block) -> Value:
        code = block.code
        low = interleaved_nibbles(block.bytes(_LOW_SCALES, 4)).zero_extended(I32)
        high = block.word(_HIGH_SCALES).truncated(I32).broadcast(8)
        high = (high >> code.constant(I32, range(0, 16, 2))) & 3
        return ((low | high << 4) - 32).to_float() * block.half(0).broadcast(8)


_TYPE = tensor_type_named("IQ4_XS")
IQ4_XS = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
