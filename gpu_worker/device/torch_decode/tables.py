"""The codebooks of `shared.quants.codebooks` on a device, brought there once.

Decoding on a device takes as long as its reads and writes. So signs and shifts, which a block stores beside
the number of an entry, are looked up together with it, in tables that have every entry with each of them
(8 MiB at most, for IQ2_S). The values are the same bits: a sign is exact, whenever it is multiplied in, and
so are all shifted values.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.quants.codebooks import (
    EVEN_SIGNS,
    IQ1_GRID,
    IQ2_S_GRID,
    IQ2_XS_GRID,
    IQ2_XXS_GRID,
    IQ3_S_GRID,
    IQ3_XXS_GRID,
    IQ4_VALUES,
    SIGNS,
)

Floats = NDArray[np.float32]

NUM_SHIFTS = 2
"""In the table IQ1."""
NUM_EVEN_SIGNS, NUM_SIGNS, NUM_SIGNS_OF_FOUR = 128, 256, 16
"""In the tables IQ2_XXS and IQ2_XS, in IQ2_S, in IQ3_XXS and IQ3_S."""


def _signed(grid: NDArray[np.int8], signs: Floats) -> Floats:
    """[entries, width] and [sign sets, width] -> [entries * sign sets, width]."""
    return (grid.astype(np.float32)[:, None, :] * signs).reshape(-1, grid.shape[1])


def _shifted(grid: NDArray[np.int8]) -> Floats:
    """[entries, width] -> [entries * 2, width]: an eighth more, then an eighth less."""
    shifts = np.array([0.125, -0.125], np.float32)[:, None]
    return (grid.astype(np.float32)[:, None, :] + shifts).reshape(-1, grid.shape[1])


def _pairs(values: Floats) -> Floats:
    """[16] -> [256, 2]: of each byte the value of its low half, then that of the high one."""
    byte = np.arange(256)
    return np.stack((values[byte & 15], values[byte >> 4]), axis=1)


_SIGNS_OF_FOUR = SIGNS[:NUM_SIGNS_OF_FOUR, :4]
_MADE: dict[str, Callable[[], NDArray[np.generic]]] = {
    "IQ1": lambda: _shifted(IQ1_GRID),
    "IQ2_XXS": lambda: _signed(IQ2_XXS_GRID, EVEN_SIGNS),
    "IQ2_XS": lambda: _signed(IQ2_XS_GRID, EVEN_SIGNS),
    "IQ2_S": lambda: _signed(IQ2_S_GRID, SIGNS),
    "IQ3_XXS": lambda: _signed(IQ3_XXS_GRID, _SIGNS_OF_FOUR),
    "IQ3_S": lambda: _signed(IQ3_S_GRID, _SIGNS_OF_FOUR),
    "IQ4": lambda: _pairs(IQ4_VALUES),
    # Of seven bits of signs all eight, as bits: the number of those set is even.
    "even signs": lambda: np.packbits(EVEN_SIGNS < 0, axis=1, bitorder="little")[:, 0].astype(np.int32),
}


@functools.cache
def table(name: str, device: torch.device) -> Tensor:
    """The table of that name: rows of float32 values; `even signs` int32 [128]."""
    with torch.inference_mode(False):
        return torch.from_numpy(_MADE[name]().copy()).to(device)
