"""IQ4_NL: four bits a weight into a table of 16 values, denser around zero.

::

    scale f16 | codes u8[16]                         18 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = scale * table[code].
"""

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ4_CODES, IQ4_VALUES
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, nibbles
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for j in range(16):
        codes = byte_at(raw, at + 2 + j)
        put(out, start + j, scale * IQ4_VALUES[codes & 15])
        put(out, start + 16 + j, scale * IQ4_VALUES[codes >> 4])


class _Groups(GroupDescription):
    smallest_code, largest_code = -127, 113

    pair_order = (0, 2, 1, 3)

    def codes(self, block: Block, group: int) -> Value:
        return block.code.look_up(IQ4_CODES, nibbles(block.bytes(2, 16)))

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        return first[0].code.look_up(IQ4_CODES, nibbles(first[0].bytes(2, 16).joined(second[0].bytes(2, 16))))

    def scales(self, block: Block) -> Value:
        return block.half(0)


_TYPE = tensor_type_named("IQ4_NL")
IQ4_NL = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
