"""A device whose weights are given as tensors, for tests of single layers."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Linear, RowTable


class TensorDevice:
    """Weights by name, in float32."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.torch_device = torch.device("cpu")
        self._tensors = tensors

    def linear(self, name: str) -> Linear:
        """The matrix of that name."""
        return lambda x: functional.linear(x, self._tensors[name])

    def row_table(self, name: str) -> RowTable:
        """The matrix of that name."""
        return lambda rows: self._tensors[name][rows]

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name]

    def begin_step(self, num_tokens: int) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to end."""
