"""Q4_0: four bits a weight around zero.

::

    scale f16 | codes u8[16]                         18 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = (code - 8) * scale.
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
    scale = half_at(raw, at)
    for j in range(16):
        codes = byte_at(raw, at + 2 + j)
        put(out, start + j, (np.float32(codes & 15) - np.float32(8)) * scale)
        put(out, start + 16 + j, (np.float32(codes >> 4) - np.float32(8)) * scale)


class _Groups(GroupDescription):
    smallest_code, largest_code = -8, 7

    pair_order = (0, 2, 1, 3)

    def codes(self, block: Block, group: int) -> Value:
        return nibbles(block.bytes(2, 16)) - 8

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        return nibbles(first[0].bytes(2, 16).joined(second[0].bytes(2, 16))) - 8

    def scales(self, block: Block) -> Value:
        return block.half(0)


_TYPE = tensor_type_named("Q4_0")
Q4_0 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
