"""IQ2_XXS: groups of eight weights from a codebook of 256 magnitudes, with signs.

::

    scale f16 | groups [8] of: entries u8[4] | signs_and_scale u32        66 bytes, 256 weights

A group is 32 weights. Bits 7i to 7i + 6 of its u32 are the signs of the weights with entries[i] (even parity
gives the eighth sign), bits 28-31 its scale; value = scale * (0.5 + bits) / 4 * magnitude * sign.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint32_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import EVEN_SIGNS, IQ2_XXS_GRID
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    GroupDescription,
    looked_up,
    negated_where,
    packed_signs,
)
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays

_GROUPS = 2


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for group in range(8):
        entries = at + _GROUPS + 8 * group
        signs_and_scale = uint32_at(raw, entries + 4)
        group_scale = scale * (np.float32(0.5) + np.float32(signs_and_scale >> 28)) * np.float32(0.25)
        for i in range(4):
            entry, signs = byte_at(raw, entries + i), signs_and_scale >> (7 * i) & 127
            for j in range(8):
                magnitude = np.float32(IQ2_XXS_GRID[entry, j])
                put(out, start + 32 * group + 8 * i + j, group_scale * magnitude * EVEN_SIGNS[signs, j])


class _Groups(GroupDescription):
    smallest_code, largest_code = -43, 43

    def codes(self, block: Block, group: int) -> Value:
        code, at = block.code, _GROUPS + 8 * group
        entries = [block.byte(at + i) for i in range(4)]
        magnitudes = looked_up(code, code.table("iq2_xxs", IQ2_XXS_GRID), 8, entries)
        return negated_where(code, packed_signs(code, block.double_word(at + 4)), magnitudes)

    def scales(self, block: Block) -> Value:
        words = block.strided_double_words(_GROUPS + 4, 8, stride=8)
        return ((words >> 28).to_float() + 0.5) * (block.half(0) * 0.25).broadcast(8)


_TYPE = tensor_type_named("IQ2_XXS")
IQ2_XXS = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
