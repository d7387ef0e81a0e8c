"""Q1_0: one bit a weight, the sign.

::

    scale f16 | signs u8[16]                         18 bytes, 128 weights

Weight j has bit j % 8 of signs[j // 8]; value = scale where it is set, -scale elsewhere. The `gguf` package
names the type but does not decode it; checked against ggml's own decoder (llama.cpp of October 2026).
"""

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import SIGNS
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription, spread_bits
from shared.quants.simd.vector import I8, Value
from shared.quants.simd.ways import QuantisedWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    negative_scale = -half_at(raw, at)
    for byte in range(16):
        signs = byte_at(raw, at + 2 + byte)
        for j in range(8):
            put(out, start + 8 * byte + j, negative_scale * SIGNS[signs, j])


class _Groups(GroupDescription):
    scale_size = 128
    smallest_code, largest_code = -1, 1

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        bits = spread_bits(code, block.double_word(2 + 4 * group))
        return code.choose(bits, code.splat(I8, 32, 1), code.splat(I8, 32, -1))

    def scales(self, block: Block) -> Value:
        return block.half(0)


_TYPE = tensor_type_named("Q1_0")
Q1_0 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
