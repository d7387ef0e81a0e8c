"""Any torch device, CUDA above all: dense weights are decoded once and live in the device's memory.

Matrices stored as F32, F16 or BF16 keep that type, bit for bit. Quantised ones are kept as float16, which
rounds their decoded values by at most 2^-11 of themselves, or 2^-25 where they are smaller than 2^-14.
Products are taken in float32: a matrix is widened for the product it is used in, the largest ones some rows
at a time. Until there are kernels that read quantised blocks on the device, this trades memory and time for
exactness.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.cpu import decoded
from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.device.cuda_memory import CudaMemory
from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.interface import Linear, RowTable
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.device.torch_slot_experts import TorchSlotExperts
from gpu_worker.model.interface import ProgressReport, Trunk
from gpu_worker.model.trunk import TorchTrunk
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig

WIDENED_BYTES = 256 * 2**20
"""Of a matrix that is widened at a time. The real model's are all smaller, but for the output matrix, which
would take 2.4 GiB."""
_STORED_AS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TorchDevice:
    """Weights decoded into the memory of a torch device."""

    def __init__(self, model: GGUFModel, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._model = model
        # The embedding serves as the output matrix too in some files: one copy on the device is enough.
        self._uploaded: dict[str, Tensor] = {}

    def linear(self, name: str) -> Linear:
        """The matrix, uploaded."""
        weight = self._upload(name)
        return lambda x: _product(x, weight)

    def row_table(self, name: str) -> RowTable:
        """The matrix, uploaded."""
        weight = self._upload(name)
        return lambda rows: weight.index_select(0, rows).float()

    def tensor(self, name: str) -> Tensor:
        """The tensor as float32 on the device."""
        return torch.from_numpy(decoded(self._model, name)).to(self.torch_device)

    def trunk(self, config: Qwen4ExpConfig, head_name: str, report: ProgressReport) -> Trunk:
        """The layers in torch operations."""
        return TorchTrunk(self, config, head_name, report)

    def memory(self, budget_bytes: int) -> DeviceMemory:
        """The device's own; RAM where the device is torch's CPU."""
        if self.torch_device.type == "cpu":
            return CpuMemory(budget_bytes)
        return CudaMemory(self.torch_device, budget_bytes)

    def experts(self, config: Qwen4ExpConfig) -> DeviceExperts:
        """In torch operations."""
        return TorchSlotExperts(self._model, config.num_layers, self.torch_device)

    def close(self) -> None:
        """Nothing runs on its own here."""

    def _upload(self, name: str) -> Tensor:
        if name not in self._uploaded:
            stored_as = _STORED_AS.get(self._model.info(name).type.name, torch.float16)
            decoded_weights = torch.from_numpy(decoded(self._model, name))
            self._uploaded[name] = decoded_weights.to(self.torch_device, stored_as)
        return self._uploaded[name]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [num_tokens, width] float32, weight [num_rows, width] of any float type -> [num_tokens, num_rows]."""
    num_rows, width = weight.shape
    most_rows = max(1, WIDENED_BYTES // (width * torch.float32.itemsize))
    if weight.dtype == torch.float32 or num_rows <= most_rows:
        return functional.linear(x, weight.float())
    out = x.new_empty((len(x), num_rows))
    for rows, products in zip(torch.split(weight, most_rows), torch.split(out, most_rows, 1), strict=True):
        products.copy_(functional.linear(x, rows.float()))
    return out
