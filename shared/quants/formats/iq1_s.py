"""IQ1_S: groups of eight weights from a codebook of -1, 0 and 1, shifted by an eighth.

::

    scale f16 | low_bits u8[32] | groups u16[8]      50 bytes, 256 weights

Eight weights have entry low_bits[i] + 256 * (three bits of groups[i // 4], from bit 3 * (i % 4)).
Bits 12-14 of groups[g] scale its 32 weights: by 2 * bits + 1; bit 15 is the sign of the shift.
value = scale * (2 * bits + 1) * (entry +- 1/8).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ1_GRID
from shared.quants.jit import jitable

_LOW_BITS, _GROUPS = 2, 34


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for i in range(32):
        group = uint16_at(raw, at + _GROUPS + i // 4 * 2)
        entry = byte_at(raw, at + _LOW_BITS + i) | (group >> (i % 4 * 3) & 7) << 8
        group_scale = scale * np.float32(2 * (group >> 12 & 7) + 1)
        shift = np.float32(-0.125) if group >> 15 else np.float32(0.125)
        for j in range(8):
            put(out, start + 8 * i + j, group_scale * (np.float32(IQ1_GRID[entry, j]) + shift))


IQ1_S = BlockFormat(tensor_type_named("IQ1_S"), decode_block)
