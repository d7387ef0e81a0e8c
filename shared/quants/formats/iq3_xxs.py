"""IQ3_XXS: groups of four weights from a codebook of 256 magnitudes, with signs.

::

    scale f16 | entries u8[64] | signs_and_scales u32[8]           98 bytes, 256 weights

A group is 32 weights: eight entries, and a u32 with bits 7i to 7i + 6 as the signs of its weights 8i to
8i + 7 (even parity gives the eighth), bits 28-31 as its scale; value = scale * (0.5 + bits) / 2 * magnitude
* sign.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint32_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import EVEN_SIGNS, IQ3_XXS_GRID
from shared.quants.jit import jitable
from shared.quants.simd.description import (
    Block,
    GroupDescription,
    looked_up,
    negated_where,
    packed_signs,
)
from shared.quants.simd.vector import I32, Value
from shared.quants.simd.ways import QuantisedWays

_ENTRIES, _SIGNS_AND_SCALES = 2, 66


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for i in range(64):
        signs_and_scale = uint32_at(raw, at + _SIGNS_AND_SCALES + i // 8 * 4)
        group_scale = scale * (np.float32(0.5) + np.float32(signs_and_scale >> 28)) * np.float32(0.5)
        signs, first_sign = signs_and_scale >> (i // 2 % 4 * 7) & 127, i % 2 * 4
        entry = byte_at(raw, at + _ENTRIES + i)
        for j in range(4):
            magnitude = np.float32(IQ3_XXS_GRID[entry, j])
            put(out, start + 4 * i + j, group_scale * magnitude * EVEN_SIGNS[signs, first_sign + j])


class _Groups(GroupDescription):
    is_tile_scheduled = True
    smallest_code, largest_code = -62, 62

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        entries = [block.byte(_ENTRIES + 8 * group + i) for i in range(8)]
        magnitudes = looked_up(code, code.table("iq3_xxs", IQ3_XXS_GRID), 4, entries)
        signs = packed_signs(code, block.double_word(_SIGNS_AND_SCALES + 4 * group))
        return negated_where(code, signs, magnitudes)

    def scales(self, block: Block) -> Value:
        words = block.bytes(_SIGNS_AND_SCALES, 32).as_type(I32, 8)
        return ((words >> 28).to_float() + 0.5) * (block.half(0) * 0.5).broadcast(8)


_TYPE = tensor_type_named("IQ3_XXS")
IQ3_XXS = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
