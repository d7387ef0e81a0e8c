"""Q2_0: two bits a weight, four levels.

::

    scale f16 | codes u8[16]                         18 bytes, 64 weights

Weight j has bits 2 * (j % 4) and up of codes[j // 4]; value = (code - 1) * scale, so -1, 0, 1 or 2 scales.
The `gguf` package does not decode it; checked against ggml's own decoder (llama.cpp of October 2026).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription
from shared.quants.simd.vector import I8, I16, I64, Value
from shared.quants.simd.ways import QuantisedWays

_VALUES = (np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3).astype(np.float32) - np.float32(1)
"""[256, 4]: the four values in a byte, for a scale of 1."""


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for byte in range(16):
        codes = byte_at(raw, at + 2 + byte)
        for j in range(4):
            put(out, start + 4 * byte + j, _VALUES[codes, j] * scale)


# Of each weight within the eight bytes its group has, from which a byte is cut out.
_FIRST_BITS = [2 * weight % 64 for weight in range(64)]


class _Groups(GroupDescription):
    scale_size = 64
    smallest_code, largest_code = -1, 2

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        if code.instructions.has_multishift:
            word = block.quad_word(2 + 8 * group).broadcast(4).as_type(I8, 32)
            return (code.bytes_from_bits(word, _FIRST_BITS[:32]) & 3) - 1
        # A byte holds four weights. Each half of it moves to the upper byte of a 16-bit number, whose product
        # shifts one of the half's weights to its lower byte and leaves one in the upper.
        eight = block.quad_word(2 + 8 * group).broadcast(4).as_type(I8, 32)
        places = [4 * (byte // 16) + byte % 16 // 4 for byte in range(32)]
        halves = code.bytes_shuffled(eight, places).as_type(I16, 16) & code.constant(
            I16, [0x0F00, 0xF000] * 8
        )
        both = code.upper_products(halves, code.constant(I16, [65 << 8, 65 << 4] * 8))
        return (both & 0x0303).as_type(I8, 32) - 1

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        code, block = first[0].code, first[0]
        words = block.bytes(2, 16).as_type(I64, 2).repeated(4).as_type(I8, 64)
        return (code.bytes_from_bits(words, _FIRST_BITS) & 3) - 1

    def scales(self, block: Block) -> Value:
        return block.half(0)


_TYPE = tensor_type_named("Q2_0")
Q2_0 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
