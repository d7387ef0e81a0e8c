"""Q2_0: two bits a weight, four levels.

::

    scale f16 | codes u8[16]                         18 bytes, 64 weights

Weight j has bits 2 * (j % 4) and up of codes[j // 4]; value = (code - 1) * scale, so -1, 0, 1 or 2 scales.
The `gguf` package does not decode it; checked against ggml's own decoder (llama.cpp of October 2026).
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for j in range(64):
        code = (byte_at(raw, at + 2 + j // 4) >> (j % 4 * 2)) & 3
        put(out, start + j, (np.float32(code) - np.float32(1)) * scale)


Q2_0 = BlockFormat(tensor_type_named("Q2_0"), decode_block)
