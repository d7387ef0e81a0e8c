"""Q4_1: four bits a weight above a minimum.

::

    scale f16 | minimum f16 | codes u8[16]           20 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = code * scale + minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, nibbles
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at), half_at(raw, at + 2)
    for j in range(16):
        codes = byte_at(raw, at + 4 + j)
        put(out, start + j, np.float32(codes & 15) * scale + minimum)
        put(out, start + 16 + j, np.float32(codes >> 4) * scale + minimum)


class _Groups(GroupDescription):
    smallest_code, largest_code = 0, 15
    has_minimums = True

    pair_order = (0, 2, 1, 3)

    def codes(self, block: Block, group: int) -> Value:
        return nibbles(block.bytes(4, 16))

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        return nibbles(first[0].bytes(4, 16).joined(second[0].bytes(4, 16)))

    def scales(self, block: Block) -> Value:
        return block.half(0)

    def minimums(self, block: Block) -> Value:
        return -block.half(2)


_TYPE = tensor_type_named("Q4_1")
Q4_1 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
