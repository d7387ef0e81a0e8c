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

_VALUES = (np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3).astype(np.float32) - np.float32(1)
"""[256, 4]: the four values in a byte, for a scale of 1."""


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for byte in range(16):
        codes = byte_at(raw, at + 2 + byte)
        for j in range(4):
            put(out, start + 4 * byte + j, _VALUES[codes, j] * scale)


Q2_0 = BlockFormat(tensor_type_named("Q2_0"), decode_block)
