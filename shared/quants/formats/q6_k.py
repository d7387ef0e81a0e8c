"""Q6_K: six bits a weight, sub-blocks of 16 with a signed byte as scale.

::

    low_bits u8[128] | high_bits u8[64] | scales i8[16] | scale f16       210 bytes, 256 weights

Each half of the block (128 weights) has 64 bytes of low bits and 32 bytes of high bits. Its weight 32k + l
has the low (k < 2) or high half of low byte 32 * (k % 2) + l, and bits 2k and 2k + 1 of high byte l above;
value = (code - 32) * (scale * scales[weight // 16]).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, NumberedScales, bits_for_pair
from shared.quants.simd.vector import I16, Value
from shared.quants.simd.ways import QuantisedWays

_HIGH_BITS, _SCALES, _SCALE = 128, 192, 208


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at + _SCALE)
    for sub in range(16):
        sub_scale = scale * np.float32(np.int8(byte_at(raw, at + _SCALES + sub)))
        half, k, side = sub // 8, sub // 2 % 4, sub % 2
        low_bits = at + 64 * half + 32 * (k % 2) + 16 * side
        high_bits = at + _HIGH_BITS + 32 * half + 16 * side
        for j in range(16):
            low = byte_at(raw, low_bits + j) >> (k // 2 * 4) & 15
            high = byte_at(raw, high_bits + j) >> (2 * k) & 3
            put(out, start + 16 * sub + j, sub_scale * (np.float32(low | high << 4) - np.float32(32)))


class _Groups(NumberedScales):
    smallest_code, largest_code = -32, 31

    def codes(self, block: Block, group: int) -> Value:
        half, k = group // 4, group % 4
        packed = block.bytes(64 * half + 32 * (k % 2), 32)
        low = packed >> 4 if k >= 2 else packed & 15
        high = (block.bytes(_HIGH_BITS + 32 * half, 32) >> (2 * k)) & 3
        return (low | high << 4) - 32

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        block, group = first
        half, k = group // 4, group % 4
        packed = block.bytes(64 * half, 64)
        low = packed >> 4 if k >= 2 else packed & 15
        high = bits_for_pair(block.bytes(_HIGH_BITS + 32 * half, 32), 2 * k, 2 * k + 2) & 3
        return (low | high << 4) - 32

    def scale_numbers(self, block: Block) -> Value:
        return block.bytes(_SCALES, 16).sign_extended(I16)

    def unit(self, block: Block) -> Value:
        return block.half(_SCALE)


_TYPE = tensor_type_named("Q6_K")
Q6_K = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
