"""Quantised weights: the block formats of GGUF files, decoded and multiplied on any CPU.

- `block_format(type_id)` finds a tensor's `BlockFormat`; `SUPPORTED` names them all.
- `decode_rows` and `matmul` compute with rows of its bytes.
- `warm` compiles ahead of the first use; compiled kernels are kept on disk (`compile_cache`).

Weights are read where they lie, in a read-only mapping of the file.
"""

from shared.quants.block_format import BlockFormat
from shared.quants.decoding import decode_rows
from shared.quants.products import matmul
from shared.quants.registry import SUPPORTED, UnsupportedTensorType, block_format
from shared.quants.warming import warm

__all__ = [
    "SUPPORTED",
    "BlockFormat",
    "UnsupportedTensorType",
    "block_format",
    "decode_rows",
    "matmul",
    "warm",
]
