"""BF16: the upper half of a float32.

::

    value bf16                                       2 bytes, 1 weight
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    put(out, start, np.uint32(uint16_at(raw, at) << 16).view(np.float32))


BF16 = BlockFormat(tensor_type_named("BF16"), decode_block)
