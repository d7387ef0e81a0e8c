"""Rotary position embedding of the first dimensions of a head, in the halves layout.

Angles are computed in float32 as the reference implementation does, so that long contexts agree with it.
"""

import torch
from torch import Tensor


class Rotary:
    """The rotation of one model."""

    def __init__(self, dim: int, base: float, device: torch.device) -> None:
        self._dim = dim
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self._inverse_frequencies = (1.0 / base**exponents).to(device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, ..., head_dim] rotated at positions [n]; dimensions beyond the rotary ones pass through."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        angles = angles.view(len(positions), *[1] * (x.dim() - 2), -1)
        cos, sin = angles.cos(), angles.sin()
        half = self._dim // 2
        first, second, rest = torch.split(x, [half, half, x.shape[-1] - self._dim], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
