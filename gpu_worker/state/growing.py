"""A tensor that grows by rows: storage for whatever a sequence keeps per position."""

import torch
from torch import Tensor

_FIRST_ROWS = 256


class GrowingRows:
    """Rows [length, *shape] of float32 on a device; appending copies only when the storage doubles."""

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
            capacity = max(self._first_rows, 2 * len(self._storage), num_rows)
            larger = torch.empty((capacity, *self._storage.shape[1:]), device=self._storage.device)
            larger[: self.length] = self.rows
            self._storage = larger
        return self._storage.data_ptr()
