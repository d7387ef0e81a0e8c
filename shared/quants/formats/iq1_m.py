"""IQ1_M: as IQ1_S, with a scale for each 16 weights and a shift for each eight.

::

    low_bits u8[32] | high_bits u8[16] | scales u16[4]             56 bytes, 256 weights

The scale (f16) is scattered over the top halves of scales[0..3], lowest first. Eight weights have half a byte
of high_bits: three bits above low_bits[i] make their codebook entry, the fourth is the sign of the shift.
Sub-block s (16 weights) has three bits of scales[s // 4], from bit 3 * (s % 4).
value = scale * (2 * bits + 1) * (entry +- 1/8).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_from_bits, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ1_GRID
from shared.quants.jit import jitable

_HIGH_BITS, _SCALES = 32, 48


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale_bits = 0
    for k in range(4):
        scale_bits |= uint16_at(raw, at + _SCALES + 2 * k) >> 12 << (4 * k)
    scale = half_from_bits(scale_bits)
    for i in range(32):
        high_bits = byte_at(raw, at + _HIGH_BITS + i // 2) >> (i % 2 * 4) & 15
        entry = byte_at(raw, at + i) | (high_bits & 7) << 8
        sub_scale_bits = uint16_at(raw, at + _SCALES + i // 8 * 2) >> (i // 2 % 4 * 3) & 7
        sub_scale = scale * np.float32(2 * sub_scale_bits + 1)
        shift = np.float32(-0.125) if high_bits & 8 else np.float32(0.125)
        for j in range(8):
            put(out, start + 8 * i + j, sub_scale * (np.float32(IQ1_GRID[entry, j]) + shift))


IQ1_M = BlockFormat(tensor_type_named("IQ1_M"), decode_block)
