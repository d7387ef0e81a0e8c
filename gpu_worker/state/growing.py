"""A tensor that grows by rows: storage for whatever a sequence keeps per position.

It doubles while it is small. From `STEP_ROWS` on it grows by that many at a time, so that it never takes more
than one step beyond what a context needs; what that costs in copies is less than what a step computes.
"""

import torch
from torch import Tensor

from shared.placement.memory_plan import KV_GROW_STEP

_FIRST_ROWS = 256
STEP_ROWS = KV_GROW_STEP


class GrowingRows:
    """Rows [length, *shape] of float32 on a device; appending copies only when the storage grows."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, first_rows: int = _FIRST_ROWS) -> None:
        """`first_rows` is what the storage has room for at first."""
        self._storage = torch.empty((0, *shape), device=device)
        self._first_rows = first_rows
        self.length = 0

    @property
    def rows(self) -> Tensor:
        """A view of what was appended so far: [length, *shape]."""
        return self._storage[: self.length]

    @property
    def num_bytes(self) -> int:
        """Memory the storage takes."""
        return self._storage.numel() * self._storage.element_size()

    def append(self, rows: Tensor) -> Tensor:
        """Adds rows [n, *shape]; returns the view of all of them."""
        needed = self.length + len(rows)
        self.reserve(needed)
        self._storage[self.length : needed] = rows
        self.length = needed
        return self.rows

    def reserve(self, num_rows: int) -> int:
        """Makes room for so many rows in all; returns the address of the first. Whoever writes rows there
        then raises `length`."""
        if num_rows > len(self._storage):
            capacity = capacity_of(num_rows, self._first_rows)
            larger = torch.empty((capacity, *self._storage.shape[1:]), device=self._storage.device)
            larger[: self.length] = self.rows
            self._storage = larger
        return self._storage.data_ptr()


def capacity_of(num_rows: int, first_rows: int = _FIRST_ROWS) -> int:
    """The rows of a storage that has grown to hold so many."""
    if num_rows > STEP_ROWS:
        return -(-num_rows // STEP_ROWS) * STEP_ROWS
    capacity = first_rows
    while capacity < num_rows:
        capacity *= 2
    return min(capacity, max(STEP_ROWS, first_rows))
