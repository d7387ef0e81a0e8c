"""F32: the bytes are the values.

::

    value f32                                        4 bytes, 1 weight
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, put, uint32_at
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.vector import FLOAT, Code, Value
from shared.quants.simd.ways import FloatWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    put(out, start, np.uint32(uint32_at(raw, at)).view(np.float32))


def _read(code: Code, address: Value, lanes: int) -> Value:
    return code.load(FLOAT, lanes, address, constant=True)


F32 = BlockFormat(tensor_type_named("F32"), decode_block, FloatWays(4, _read))
