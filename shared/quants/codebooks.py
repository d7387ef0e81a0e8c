"""The value tables of the IQ formats, taken from the `gguf` package and shaped for lookups in kernels.

A grid's row holds the magnitudes (for IQ1, the values) of neighbouring weights; its index is what a block
stores. The tables are small enough (at most 16 KiB) for numba to compile them in as constants.
"""

from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray


def _grid(gguf_class: Any) -> NDArray[np.int8]:
    """[num_entries, 4 or 8]."""
    gguf_class.init_grid()
    return np.ascontiguousarray(gguf_class.grid.reshape(gguf_class.grid_shape), dtype=np.int8)


def _signs(sign_bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[num_entries, 8]: -1 where the bit of the weight is set, 1 elsewhere, lowest bit first."""
    bits = np.unpackbits(sign_bits[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(-1), np.float32(1))


IQ1_GRID = _grid(quants.IQ1_S)
IQ2_XXS_GRID = _grid(quants.IQ2_XXS)
IQ2_XS_GRID = _grid(quants.IQ2_XS)
IQ2_S_GRID = _grid(quants.IQ2_S)
IQ3_XXS_GRID = _grid(quants.IQ3_XXS)
IQ3_S_GRID = _grid(quants.IQ3_S)

IQ4_VALUES = np.array(quants.IQ4_NL.kvalues, dtype=np.float32)
"""[16]"""

SIGNS = _signs(np.arange(256, dtype=np.uint8))
"""[256, 8]: the signs of eight weights by a whole byte."""

EVEN_SIGNS = _signs(np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8))
"""[128, 8]: by seven bits; the eighth sign makes the number of minus signs even."""
