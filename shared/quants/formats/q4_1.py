"""Q4_1: four bits a weight above a minimum.

::

    scale f16 | minimum f16 | codes u8[16]           20 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = code * scale + minimum.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale, minimum = half_at(raw, at), half_at(raw, at + 2)
    for j in range(16):
        codes = byte_at(raw, at + 4 + j)
        put(out, start + j, np.float32(codes & 15) * scale + minimum)
        put(out, start + 16 + j, np.float32(codes >> 4) * scale + minimum)


Q4_1 = BlockFormat(tensor_type_named("Q4_1"), decode_block)
