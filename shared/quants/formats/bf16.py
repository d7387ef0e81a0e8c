"""BF16: the upper half of a float32.

::

    value bf16                                       2 bytes, 1 weight
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, put, uint16_at
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.vector import FLOAT, I16, I32, Code, Value
from shared.quants.simd.ways import FloatWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    put(out, start, np.uint32(uint16_at(raw, at) << 16).view(np.float32))


def _read(code: Code, address: Value, lanes: int) -> Value:
    bits = code.load(I16, lanes, address, constant=True).zero_extended(I32) << 16
    return bits.as_type(FLOAT, lanes)


BF16 = BlockFormat(tensor_type_named("BF16"), decode_block, FloatWays(2, _read))
