"""Q2_K: two bits a weight, sub-blocks of 16 with a scale and a minimum of four bits each.

::

    scales u8[16] | codes u8[64] | scale f16 | minimum f16         84 bytes, 256 weights

Each half of the block (128 weights) has 32 bytes of codes: bits 2k and 2k + 1 of byte l are weight 32k + l.
Sub-block s has scales[s]: low half times scale, high half times minimum; value = code * scale - minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, NumberedScales, bits_for_pair, to_floats
from shared.quants.simd.vector import I16, Value
from shared.quants.simd.ways import QuantisedWays

_CODES, _SCALE, _MINIMUM = 16, 80, 82


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at + _SCALE), half_at(raw, at + _MINIMUM)
    for sub in range(16):
        half, shift, side = sub // 8, sub // 2 % 4 * 2, sub % 2
        packed = byte_at(raw, at + sub)
        sub_scale, sub_minimum = scale * np.float32(packed & 15), minimum * np.float32(packed >> 4)
        codes = at + _CODES + 32 * half + 16 * side
        for j in range(16):
            code = (byte_at(raw, codes + j) >> shift) & 3
            put(out, start + 16 * sub + j, sub_scale * np.float32(code) - sub_minimum)


class _Groups(NumberedScales):
    smallest_code, largest_code = 0, 3
    has_minimums = True

    def codes(self, block: Block, group: int) -> Value:
        return (block.bytes(_CODES + 32 * (group // 4), 32) >> (group % 4 * 2)) & 3

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        block, group = first
        shift = group % 4 * 2
        return bits_for_pair(block.bytes(_CODES + 32 * (group // 4), 32), shift, shift + 2) & 3

    def scale_numbers(self, block: Block) -> Value:
        return (block.bytes(0, 16) & 15).zero_extended(I16)

    def unit(self, block: Block) -> Value:
        return block.half(_SCALE)

    def minimums(self, block: Block) -> Value:
        return to_floats(block.bytes(0, 16) >> 4) * block.half(_MINIMUM).broadcast(16)


_TYPE = tensor_type_named("Q2_K")
Q2_K = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
