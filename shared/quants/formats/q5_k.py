"""Q5_K: five bits a weight, groups of 32 with a scale and a minimum of six bits each.

::

    scale f16 | minimum f16 | scales u8[12] | fifth_bits u8[32] | codes u8[128]      176 bytes, 256 weights

Groups 2p and 2p + 1 share 32 bytes of codes: the low halves are the first group, the high halves the second.
Bit g of fifth_bits[l] belongs to weight l of group g.
value = code * (scale * group scale) - minimum * group minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.formats.six_bit_scales import scale_and_minimum, six_bit_minimums, six_bit_scales
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, bits_for_pair, to_floats
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays

_SCALES, _FIFTH_BITS, _CODES = 4, 16, 48


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at), half_at(raw, at + 2)
    for group in range(8):
        group_scale, group_minimum = scale_and_minimum(raw, at + _SCALES, group)
        group_scale, group_minimum = scale * group_scale, minimum * group_minimum
        codes, shift = at + _CODES + group // 2 * 32, group % 2 * 4
        for j in range(32):
            low = byte_at(raw, codes + j) >> shift & 15
            fifth = byte_at(raw, at + _FIFTH_BITS + j) >> group & 1
            put(out, start + 32 * group + j, group_scale * np.float32(low | fifth << 4) - group_minimum)


class _Groups(GroupDescription):
    smallest_code, largest_code = 0, 31
    has_minimums = True
    block_pairs = ((0, 2), (1, 3), (4, 6), (5, 7))

    def codes(self, block: Block, group: int) -> Value:
        packed = block.bytes(_CODES + 32 * (group // 2), 32)
        low = packed >> 4 if group % 2 else packed & 15
        return low | ((block.bytes(_FIFTH_BITS, 32) >> group) & 1) << 4

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        block, group = first
        packed = block.bytes(_CODES + 32 * (group // 2), 64)
        low = packed >> 4 if group % 2 else packed & 15
        return low | ((bits_for_pair(block.bytes(_FIFTH_BITS, 32), group, group + 2)) & 1) << 4

    def scales(self, block: Block) -> Value:
        return to_floats(six_bit_scales(block, _SCALES)) * block.half(0).broadcast(8)

    def minimums(self, block: Block) -> Value:
        return to_floats(six_bit_minimums(block, _SCALES)) * block.half(2).broadcast(8)


_TYPE = tensor_type_named("Q5_K")
Q5_K = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
