"""The CPU as the device: every matrix is used where the model file maps it, in the format it is stored in."""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Linear, RowTable
from shared import quants
from shared.gguf.model import GGUFModel
from shared.quants import BlockFormat
from shared.task_pool import TaskPool
from shared.topology import use_one_blas_thread

# Multiply-adds that keep a thread busy for about a millisecond. Less is not worth waking another one for,
# which takes 50 us at best and a time slice where the CPUs are busy.
_MIN_WORK_TO_SHARE = 4_000_000
# Steps of fewer tokens run torch's own operations on one thread: they are too small to share.
_MIN_TOKENS_TO_SHARE = 32


class CpuDevice:
    """Weights in the mapped file, products by the kernels of `shared.quants` on a few threads."""

    def __init__(self, model: GGUFModel, num_threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self._model = model
        self._num_threads = num_threads
        self._pool = TaskPool(num_threads)
        use_one_blas_thread()

    def linear(self, name: str) -> Linear:
        """The matrix of that name; nothing is copied or decoded."""
        raw, block_format = self._encoded(name)
        if block_format.decode_block is None and raw.size < 4 * _MIN_WORK_TO_SHARE:
            # Small matrices are often plain float32, and torch is quickest at them: a third of the time.
            weight = _mapped_floats(raw)
            return lambda x: functional.linear(x, weight)
        return _MappedLinear(raw, block_format, self._pool)

    def row_table(self, name: str) -> RowTable:
        """The matrix of that name; rows are decoded as they are gathered."""
        raw, block_format = self._encoded(name)
        return lambda rows: torch.from_numpy(quants.decode_rows(block_format, raw[rows.numpy()]))

    def tensor(self, name: str) -> Tensor:
        """A copy, decoded to float32."""
        return torch.from_numpy(decoded(self._model, name))

    def begin_step(self, num_tokens: int) -> None:
        """Sets the number of threads of torch's operations to what pays for the step."""
        torch.set_num_threads(self._num_threads if num_tokens >= _MIN_TOKENS_TO_SHARE else 1)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()

    def _encoded(self, name: str) -> tuple[NDArray[np.uint8], BlockFormat]:
        return self._model.rows(name), quants.block_format(self._model.info(name).type.type_id)


class _MappedLinear:
    def __init__(self, raw: NDArray[np.uint8], block_format: BlockFormat, pool: TaskPool) -> None:
        self._raw = raw
        self._format = block_format
        self._pool = pool

    def __call__(self, x: Tensor) -> Tensor:
        inputs = x.contiguous().numpy()
        num_rows = len(self._raw)
        out = np.empty((len(inputs), num_rows), np.float32)
        if inputs.size * num_rows < _MIN_WORK_TO_SHARE:
            quants.matmul(self._format, self._raw, inputs, out)
        else:
            self._pool.run(self._parts(inputs, out, num_rows))
        return torch.from_numpy(out)

    def _parts(
        self, inputs: NDArray[np.float32], out: NDArray[np.float32], num_rows: int
    ) -> list[Callable[[], None]]:
        step = -(-num_rows // self._pool.num_threads)
        return [
            partial(quants.matmul, self._format, self._raw, inputs, out, start, min(start + step, num_rows))
            for start in range(0, num_rows, step)
        ]


def _mapped_floats(raw: NDArray[np.uint8]) -> Tensor:
    """Rows of float32 as a tensor on the mapping, which nobody may write to."""
    with warnings.catch_warnings():
        # torch has no read-only tensors, and warns of arrays that are.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(raw.view(np.float32))


def decoded(model: GGUFModel, name: str) -> NDArray[np.float32]:
    """A tensor of the file, decoded to float32 in its own shape."""
    info = model.info(name)
    raw = model.rows(name).reshape(-1, info.type.row_bytes(info.shape[-1]))
    return quants.decode_rows(quants.block_format(info.type.type_id), raw).reshape(info.shape)
