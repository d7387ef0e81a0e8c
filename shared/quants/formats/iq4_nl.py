"""IQ4_NL: four bits a weight into a table of 16 values, denser around zero.

::

    scale f16 | codes u8[16]                         18 bytes, 32 weights

Weight j has the low half of codes[j], weight 16 + j the high half; value = scale * table[code].
"""

from shared.gguf.types import tensor_type_named
from shared.quants.block_bytes import Bytes, Floats, byte_at, half_at, put
from shared.quants.block_format import BlockFormat
from shared.quants.codebooks import IQ4_VALUES
from shared.quants.jit import jitable


@jitable
def decode_block(raw: Bytes, at: int, out: Floats, start: int) -> None:
    scale = half_at(raw, at)
    for j in range(16):
        codes = byte_at(raw, at + 2 + j)
        put(out, start + j, scale * IQ4_VALUES[codes & 15])
        put(out, start + 16 + j, scale * IQ4_VALUES[codes >> 4])


IQ4_NL = BlockFormat(tensor_type_named("IQ4_NL"), decode_block)
