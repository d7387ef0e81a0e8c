"""Q5_1: five bits a weight above a minimum.

::

    scale f16 | minimum f16 | fifth_bits u32 | codes u8[16]        24 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half, and weight i bit i of fifth_bits above
them; value = code * scale + minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import FIFTH_BITS
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, nibbles, spread_bits
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays

_FIFTH_BITS, _CODES = 4, 8


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at), half_at(raw, at + 2)
    for side in range(2):
        low_fifths = byte_at(raw, at + _FIFTH_BITS + side)
        high_fifths = byte_at(raw, at + _FIFTH_BITS + 2 + side)
        for j in range(8):
            codes = byte_at(raw, at + _CODES + 8 * side + j)
            low = np.float32(codes & 15) + FIFTH_BITS[low_fifths, j]
            high = np.float32(codes >> 4) + FIFTH_BITS[high_fifths, j]
            put(out, start + 8 * side + j, low * scale + minimum)
            put(out, start + 16 + 8 * side + j, high * scale + minimum)


class _Groups(GroupDescription):
    smallest_code, largest_code = 0, 31
    has_minimums = True

    def codes(self, block: Block, group: int) -> Value:
        fifths = spread_bits(block.code, block.double_word(_FIFTH_BITS))
        low = nibbles(block.bytes(_CODES, 16))
        return block.code.choose(fifths, low | 16, low)

    def scales(self, block: Block) -> Value:
        return block.half(0)

    def minimums(self, block: Block) -> Value:
        return -block.half(2)


_TYPE = tensor_type_named("Q5_1")
Q5_1 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
