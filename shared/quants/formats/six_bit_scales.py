"""The eight scales and eight minimums of Q4_K and Q5_K, six bits each, in twelve bytes.

::

    byte 0-3    low six bits: scale 0-3       top two bits: of scale 4-7
    byte 4-7    low six bits: minimum 0-3     top two bits: of minimum 4-7
    byte 8-11   low half: rest of scale 4-7   high half: rest of minimum 4-7
"""

import numpy as np

from shared.quants.block_bytes import Bytes, byte_at
from shared.quants.jit import jitable
from shared.quants.simd.description import Block
from shared.quants.simd.vector import Value


@jitable
def scale_and_minimum(raw: Bytes, at: int, group: int) -> tuple[np.float32, np.float32]:
    """Of group 0-7; the twelve bytes begin at `at`."""
    scales, minimums = byte_at(raw, at + group % 4), byte_at(raw, at + 4 + group % 4)
    if group < 4:
        return np.float32(scales & 63), np.float32(minimums & 63)
    rest = byte_at(raw, at + 4 + group)
    return np.float32((rest & 15) | (scales >> 6 << 4)), np.float32((rest >> 4) | (minimums >> 6 << 4))


def six_bit_scales(block: Block, offset: int) -> Value:
    """All eight scales, as bytes."""
    scales, rest = block.bytes(offset, 4), block.bytes(offset + 8, 4)
    return (scales & 63).joined((rest & 15) | (scales >> 6 << 4))


def six_bit_minimums(block: Block, offset: int) -> Value:
    """All eight minimums, as bytes."""
    minimums, rest = block.bytes(offset + 4, 4), block.bytes(offset + 8, 4)
    return (minimums & 63).joined((rest >> 4) | (minimums >> 6 << 4))
