"""Q8_0: signed bytes.

::

    scale f16 | codes i8[32]                         34 bytes, 32 weights

value = code * scale.
"""

import numpy as np

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.jit import jitable
from shared.quants.simd.description import Block, GroupDescription
from shared.quants.simd.vector import Value
from shared.quants.simd.ways import QuantisedWays


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for j in range(32):
        put(out, start + j, np.float32(np.int8(byte_at(raw, at + 2 + j))) * scale)


class _Groups(GroupDescription):
    def codes(self, block: Block, group: int) -> Value:
        return block.bytes(2, 32)

    def scales(self, block: Block) -> Value:
        return block.half(0)


_TYPE = tensor_type_named("Q8_0")
Q8_0 = BlockFormat(_TYPE, decode_block, QuantisedWays(_TYPE, _Groups()))
