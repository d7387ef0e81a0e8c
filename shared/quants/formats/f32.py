"""F32: the bytes are the values.

::

    value f32                                        4 bytes, 1 weight
"""

from shared.gguf.types import tensor_type_named
from shared.quants.block_format import BlockFormat

F32 = BlockFormat(tensor_type_named("F32"), decode_block=None)
