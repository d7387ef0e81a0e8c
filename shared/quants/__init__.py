"""Quantised weights: the block formats of GGUF files, decoded and multiplied on any CPU.

- `block_format(type_id)` finds a tensor's `BlockFormat`; `SUPPORTED` names them all.
- `decode_rows` and `matmul` compute with rows of its bytes; `multiply_task`, `quantise_task` and
  `gather_task` are what a team of threads runs (`shared.native`).
- `choose_kernels` says which instructions to use; without it, the best there are.
- `warm` compiles ahead of the first use; compiled kernels are kept on disk (`compile_cache`).

Weights are read where they lie, in a read-only mapping of the file.
"""

from shared.quants.block_format import BlockFormat
from shared.quants.choice import ACTIVATIONS, CHOICES, PORTABLE, choose_kernels, kernel_target
from shared.quants.decoding import decode_rows
from shared.quants.products import (
    ActivationPlane,
    gather_task,
    gathered_record,
    matmul,
    multiply_task,
    uses_codes,
)
from shared.quants.quantising import quantise_task
from shared.quants.registry import SUPPORTED, UnsupportedTensorType, block_format
from shared.quants.warming import warm

__all__ = [
    "ACTIVATIONS",
    "CHOICES",
    "PORTABLE",
    "SUPPORTED",
    "ActivationPlane",
    "BlockFormat",
    "UnsupportedTensorType",
    "block_format",
    "choose_kernels",
    "decode_rows",
    "gather_task",
    "gathered_record",
    "kernel_target",
    "matmul",
    "multiply_task",
    "quantise_task",
    "uses_codes",
    "warm",
]
