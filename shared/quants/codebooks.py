"""Tables that several formats look values up in; those of the IQ formats come from the `gguf` package.

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


def _by_bit(bit_sets: NDArray[np.uint8], clear: float, set_: float) -> NDArray[np.float32]:
    """[num_entries, 8]: one of two values by each bit of each entry, lowest bit first."""
    bits = np.unpackbits(bit_sets[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(set_), np.float32(clear))


_EVERY_BYTE = np.arange(256, dtype=np.uint8)

IQ1_GRID = _grid(quants.IQ1_S)
IQ2_XXS_GRID = _grid(quants.IQ2_XXS)
IQ2_XS_GRID = _grid(quants.IQ2_XS)
IQ2_S_GRID = _grid(quants.IQ2_S)
IQ3_XXS_GRID = _grid(quants.IQ3_XXS)
IQ3_S_GRID = _grid(quants.IQ3_S)

IQ4_VALUES = np.array(quants.IQ4_NL.kvalues, dtype=np.float32)
"""[16]"""

IQ4_CODES = [int(value) for value in quants.IQ4_NL.kvalues]
"""The same as whole numbers."""

SIGNS = _by_bit(_EVERY_BYTE, clear=1, set_=-1)
"""[256, 8]: the signs of eight weights by a whole byte."""

EVEN_SIGNS = _by_bit(np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8), clear=1, set_=-1)
"""[128, 8]: by seven bits; the eighth sign makes the number of minus signs even."""

FIFTH_BITS = _by_bit(_EVERY_BYTE, clear=0, set_=16)
"""[256, 8]: what the fifth bits of eight weights add to their codes."""
