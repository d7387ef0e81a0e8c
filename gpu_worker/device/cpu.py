"""The CPU as the device: every matrix is used where the model file maps it, in the format it is stored in."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.device.cpu_slot_experts import CpuSlotExperts
from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.interface import Linear, RowTable
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.device.products import Products
from gpu_worker.model.interface import ProgressReport, Trunk
from gpu_worker.native.trunk import NativeTrunk
from gpu_worker.native.workspace import Matrix
from shared import quants
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig
from shared.native.team import Team
from shared.quants import BlockFormat
from shared.topology import meeting_cpu, usable_cpus, use_one_blas_thread


class CpuDevice:
    """Weights in the mapped file, products by the kernels of `shared.quants` on a team of threads."""

    def __init__(self, model: GGUFModel, num_threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self._model = model
        # Helpers are pinned where the thread that they help is.
        self.team = Team(num_threads, usable_cpus() if meeting_cpu() is not None else None)
        use_one_blas_thread()
        # What is left to torch here is too small to share, and its threads would be in the team's way.
        torch.set_num_threads(1)

    def linear(self, name: str) -> Linear:
        """The matrix of that name; nothing is copied or decoded."""
        products = Products([self._encoded(name)], self.team)
        return lambda x: products(x)[0]

    def linears(self, names: Sequence[str]) -> Callable[[Tensor], list[Tensor]]:
        """Matrices of those names that are applied to the same x: the products of each. Cheaper than one
        `linear` after the other, since x is rounded once and the threads come together once."""
        return Products([self._encoded(name) for name in names], self.team)

    def row_table(self, name: str) -> RowTable:
        """The matrix of that name; rows are decoded as they are gathered."""
        raw, block_format = self._encoded(name)
        return lambda rows: torch.from_numpy(quants.decode_rows(block_format, raw[rows.numpy()]))

    def tensor(self, name: str) -> Tensor:
        """A copy, decoded to float32."""
        return torch.from_numpy(decoded(self._model, name))

    def matrix(self, name: str) -> Matrix:
        """The matrix of that name, or a vector as a matrix of one row, for tasks (`gpu_worker.native`)."""
        raw, block_format = self._encoded(name)
        return Matrix(raw.reshape(-1, raw.shape[-1]), block_format)

    def floats(self, name: str) -> NDArray[np.float32]:
        """A copy, decoded to float32, for tasks (`gpu_worker.native`)."""
        return decoded(self._model, name)

    def trunk(self, config: Qwen4ExpConfig, head_name: str, report: ProgressReport) -> Trunk:
        """The layers as tasks in machine code, run by the team."""
        return NativeTrunk(self, self.team, config, head_name, report)

    def memory(self, budget_bytes: int) -> DeviceMemory:
        """RAM."""
        return CpuMemory(budget_bytes)

    def experts(self, config: Qwen4ExpConfig) -> DeviceExperts:
        """By the same kernels and the same team as everything else."""
        return CpuSlotExperts(self._model, config.num_layers, self.team)

    def close(self) -> None:
        """Ends the threads."""
        self.team.close()

    def _encoded(self, name: str) -> tuple[NDArray[np.uint8], BlockFormat]:
        return self._model.rows(name), quants.block_format(self._model.info(name).type.type_id)


def decoded(model: GGUFModel, name: str) -> NDArray[np.float32]:
    """A tensor of the file, decoded to float32 in its own shape."""
    info = model.info(name)
    raw = model.rows(name).reshape(-1, info.type.row_bytes(info.shape[-1]))
    return quants.decode_rows(quants.block_format(info.type.type_id), raw).reshape(info.shape)
