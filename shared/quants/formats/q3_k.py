"""Q3_K: three bits a weight, sub-blocks of 16 with a signed scale of six bits each.

::

    high_bits u8[32] | codes u8[64] | scales u8[12] | scale f16    110 bytes, 256 weights

Each half h of the block (128 weights) has 32 bytes of codes: bits 2k and 2k + 1 of byte l are weight
32k + l, and bit 4h + k of high_bits[l] is its third bit, stored so that a clear bit takes 4 away.
Sub-block s has four low bits in scales[s % 8] (low half for s < 8, else high half) and two more in
scales[8 + s % 4] at bit 2 * (s // 4), less 32; value = (code - 4 or 0) * scale.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, NumberedScales, bits_for_pair, nibbles
from shared.quants.simd.vector import I16, Value
from shared.quants.simd.ways import QuantisedWays

_CODES, _SCALES, _SCALE = 32, 96, 108


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at + _SCALE)
    for sub in range(16):
        low = byte_at(raw, at + _SCALES + sub % 8) >> (sub // 8 * 4) & 15
        high = byte_at(raw, at + _SCALES + 8 + sub % 4) >> (sub // 4 * 2) & 3
        sub_scale = scale * (np.float32(low | high << 4) - np.float32(32))
        half, group, side = sub // 8, sub // 2, sub % 2
        codes, high_bits = at + _CODES + 32 * half + 16 * side, at + 16 * side
        for j in range(16):
            low_bits = np.float32(byte_at(raw, codes + j) >> (group % 4 * 2) & 3)
            offset = np.float32(0) if byte_at(raw, high_bits + j) >> group & 1 else np.float32(4)
            put(out, start + 16 * sub + j, sub_scale * (low_bits - offset))


class _Groups(NumberedScales):
    smallest_code, largest_code = -4, 3

    def codes(self, block: Block, group: int) -> Value:
        low = (block.bytes(_CODES + 32 * (group // 4), 32) >> (group % 4 * 2)) & 3
        high = (block.bytes(0, 32) >> group) & 1
        return (low | high << 2) - 4

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        block, group = first
        shift = group % 4 * 2
        low = bits_for_pair(block.bytes(_CODES + 32 * (group // 4), 32), shift, shift + 2) & 3
        high = bits_for_pair(block.bytes(0, 32), group, group + 1) & 1
        return (low | high << 2) - 4

    def scale_numbers(self, block: Block) -> Value:
        low = nibbles(block.bytes(_SCALES, 8))
        packed = block.bytes(_SCALES + 8, 4)
        high = (packed.joined(packed >> 2)).joined((packed >> 4).joined(packed >> 6)) & 3
        return ((low | high << 4) - 32).sign_extended(I16)

    def unit(self, block: Block) -> Value:
        return block.half(_SCALE)


_TYPE = tensor_type_named("Q3_K")
Q3_K = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
