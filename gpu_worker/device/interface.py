"""What the model asks of the device it runs on: places for weights, products with them, and its layers.

The forward pass is defined in torch operations on float32 tensors of `torch_device` (`gpu_worker.model`).
Where a weight matrix lives and how it is multiplied differs between devices: that is a `Linear`. A device
that has a better way to compute whole layers offers a `Trunk` of its own.
"""

from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.model.interface import ProgressReport, Trunk
from shared.model_config import Qwen4ExpConfig


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

    def trunk(self, config: Qwen4ExpConfig, head_name: str, report: ProgressReport) -> Trunk:
        """The model's layers on this device; `head_name` names the output matrix."""

    def memory(self, budget_bytes: int) -> DeviceMemory:
        """Memory of the device, so much of it at most. Whoever asks for it closes it."""

    def experts(self, config: Qwen4ExpConfig) -> DeviceExperts:
        """The routed experts of the model's layers, from slots of such memory."""

    def close(self) -> None:
        """Ends threads and gives memory back."""
