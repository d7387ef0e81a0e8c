"""F16: IEEE half precision.

::

    value f16                                        2 bytes, 1 weight
"""

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.vector import HALF, Code, Value
from shared.quants.simd.ways import FloatWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    put(out, start, half_at(raw, at))


def _read(code: Code, address: Value, lanes: int) -> Value:
    return code.load(HALF, lanes, address, constant=True).to_float()


F16 = BlockFormat(tensor_type_named("F16"), decode_block, FloatWays(2, _read))
