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
from shared.quants.simd.description import Block, GroupDescription, looked_up, to_floats
from shared.quants.simd.vector import I8, I16, Value
from shared.quants.simd.ways import QuantisedWays

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


def _entries(block: Block) -> list[Value]:
    """All 32."""
    low = block.bytes(_LOW_BITS, 32).zero_extended(I16)
    high = (block.words(_GROUPS, 8) & 0xFFF).repeated(4)
    # Multiplied, since a shift by another number in each lane is not what every CPU has; the last three bits
    # would have to move down by one, and are taken by themselves.
    high = (high * block.code.constant(I16, [256, 32, 4, 0] * 8) & 0x700) | (
        (high >> 1) & block.code.constant(I16, [0, 0, 0, 0x700] * 8)
    )
    return block.code.unpacked(low | high)


class _Groups(GroupDescription):
    # In eighths, so that the shift is a whole number.
    smallest_code, largest_code = -9, 9

    def codes(self, block: Block, group: int) -> Value:
        code = block.code
        entries = block.once("entries", _entries)[4 * group : 4 * group + 4]
        word = block.word(_GROUPS + 2 * group)
        values = looked_up(code, code.table("iq1", IQ1_GRID), 8, entries)
        shift = (1 - ((word >> 14) & 2)).truncated(I8)
        return (values << 3) + shift.broadcast(32)

    def scales(self, block: Block) -> Value:
        bits = (block.words(_GROUPS, 8) >> 12) & 7
        return (to_floats(bits) * 2.0 + 1.0) * (block.half(0) * 0.125).broadcast(8)


_TYPE = tensor_type_named("IQ1_S")
IQ1_S = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
