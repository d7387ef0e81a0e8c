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


IQ2_XS = BlockFormat(tensor_type_named("IQ2_XS"), decode_block)
