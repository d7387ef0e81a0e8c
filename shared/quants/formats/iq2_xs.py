"""IQ2_XS: groups of eight weights from a codebook of 512 magnitudes, with signs.

::

    scale f16 | codes u16[32] | scales u8[8]         74 bytes, 256 weights

Eight weights have a code: bits 0-8 are the codebook entry, bits 9-15 the signs (even parity gives the
eighth). Sub-block s (16 weights) has a half of scales[s // 2], the low one first;
value = scale * (0.5 + bits) / 4 * magnitude * sign.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import EVEN_SIGNS, IQ2_XS_GRID
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    NumberedScales,
    bits_of_bytes,
    even_parity,
    interleaved_nibbles,
    looked_up,
    negated_where,
)
from shared.quants.simd.vector import I8, I16, Value
from shared.quants.simd.ways import QuantisedWays

_CODES, _SCALES = 2, 66


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for i in range(32):
        sub_scale_bits = byte_at(raw, at + _SCALES + i // 4) >> (i // 2 % 2 * 4) & 15
        sub_scale = scale * (np.float32(0.5) + np.float32(sub_scale_bits)) * np.float32(0.25)
        code = uint16_at(raw, at + _CODES + 2 * i)
        entry, signs = code & 511, code >> 9
        for j in range(8):
            magnitude = np.float32(IQ2_XS_GRID[entry, j])
            put(out, start + 8 * i + j, sub_scale * magnitude * EVEN_SIGNS[signs, j])


class _Groups(NumberedScales):
    smallest_code, largest_code = -43, 43

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        entries = [block.word(_CODES + 8 * group + 2 * i) & 511 for i in range(4)]
        magnitudes = looked_up(code, code.table("iq2_xs", IQ2_XS_GRID), 8, entries)
        # Of half the block at once, since one register holds its codes.
        first = group // 4 * 4
        signs = even_parity(code, (block.words(_CODES + 8 * first, 16) >> 9).truncated(I8))
        return negated_where(code, bits_of_bytes(code, signs, 4 * (group - first)), magnitudes)

    def scale_numbers(self, block: Block) -> Value:
        bits = interleaved_nibbles(block.bytes(_SCALES, 8)).zero_extended(I16)
        return (bits << 1) + 1

    def unit(self, block: Block) -> Value:
        return block.half(0) * 0.125


_TYPE = tensor_type_named("IQ2_XS")
IQ2_XS = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
