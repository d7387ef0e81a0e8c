"""Q5_1: five bits a weight above a minimum.

::

    scale f16 | minimum f16 | fifth_bits u32 | codes u8[16]        24 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half, and weight i bit i of fifth_bits above
them; value = code * scale + minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put, uint32_at
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at), half_at(raw, at + 2)
    fifth_bits = uint32_at(raw, at + 4)
    for j in range(16):
        codes = byte_at(raw, at + 8 + j)
        low = (codes & 15) | ((fifth_bits >> j & 1) << 4)
        high = (codes >> 4) | ((fifth_bits >> (16 + j) & 1) << 4)
        put(out, start + j, np.float32(low) * scale + minimum)
        put(out, start + 16 + j, np.float32(high) * scale + minimum)


Q5_1 = BlockFormat(tensor_type_named("Q5_1"), decode_block)
