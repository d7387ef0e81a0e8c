"""Rotary position embedding of the first dimensions of a head, in the halves layout.

Angles are computed in float32 as the reference implementation does, so that long contexts agree with it.
"""

import torch
from torch import Tensor


class Rotation:
    """The rotations that belong to some tokens, made once for all layers and heads: `cos` and `sin` are
    [tokens, 1, half of the rotary dimensions]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, head_dim], rotated; dimensions beyond the rotary ones pass through."""
        half = self.cos.shape[-1]
        first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin, rest], -1
        )

    def rows(self, rows: slice) -> "Rotation":
        """The rotations of some of the tokens."""
        return Rotation(self.cos[rows], self.sin[rows])


class Rotary:
    """The rotations of one model."""

    def __init__(self, dim: int, base: float, device: torch.device) -> None:
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self._inverse_frequencies = (1.0 / base**exponents).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotations of tokens at `positions` [tokens]."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        return Rotation(angles.cos(), angles.sin())
