"""A tensor that grows by rows: storage for whatever a sequence keeps per position."""

import torch
from torch import Tensor

_FIRST_ROWS = 256


class GrowingRows:
    """Rows [length, *shape] of float32 on a device; appending copies only when the storage doubles."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._storage = torch.empty((0, *shape), device=device)
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
        if needed > len(self._storage):
            capacity = max(_FIRST_ROWS, 2 * len(self._storage), needed)
            larger = torch.empty((capacity, *self._storage.shape[1:]), device=self._storage.device)
            larger[: self.length] = self.rows
            self._storage = larger
        self._storage[self.length : needed] = rows
        self.length = needed
        return self.rows
