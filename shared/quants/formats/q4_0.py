"""Q4_0: four bits a weight around zero.

::

    scale f16 | codes u8[16]                         18 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = (code - 8) * scale.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for j in range(16):
        codes = byte_at(raw, at + 2 + j)
        put(out, start + j, (np.float32(codes & 15) - np.float32(8)) * scale)
        put(out, start + 16 + j, (np.float32(codes >> 4) - np.float32(8)) * scale)


Q4_0 = BlockFormat(tensor_type_named("Q4_0"), decode_block)
