"""What the model asks of the device it runs on: places for weights, and products with them.

The forward pass is written once, in torch operations on float32 tensors of `torch_device`. What differs
between devices is where a weight matrix lives and how it is multiplied: that is a `Linear`.
"""

from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """A weight matrix [out_features, in_features] that can be applied."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] float32 -> [num_tokens, out_features] float32."""


class RowTable(Protocol):
    """A matrix of which rows are gathered: the token embedding."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_tokens] int64 -> [num_tokens, width] float32."""


class Device(Protocol):
    """One device, and the weights of one model on it."""

    torch_device: torch.device

    def linear(self, name: str) -> Linear:
        """The matrix of that name, ready to be applied."""

    def row_table(self, name: str) -> RowTable:
        """The matrix of that name, ready to be gathered from."""

    def tensor(self, name: str) -> Tensor:
        """A small tensor (norms, convolutions, vectors), decoded to float32 on the device."""

    def begin_step(self, num_tokens: int) -> None:
        """A step of so many tokens is about to be computed."""

    def close(self) -> None:
        """Ends threads and gives memory back."""
