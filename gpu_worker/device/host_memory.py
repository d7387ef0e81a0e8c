"""Memory of the host as CUDA devices copy from and to it: fast, and asynchronously, where its pages are
locked."""

import ctypes
import logging
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.native.task import address_of

# Not all of it has types.
_cuda: Any = torch.cuda
_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_PORTABLE = 1
"""cudaHostRegisterPortable: the pages count as locked for every context of the process."""
_SUCCESS = 0


def host_tensor(array: Bytes) -> Tensor:
    """The array's memory as a tensor uint8 [num_bytes], whether or not it may be written to. It does not keep
    the memory where it may not."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch knows no tensors that are read only, and warns of arrays that are.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address_of(array))
    return torch.frombuffer(memory, dtype=torch.uint8)


def lock_pages(array: Bytes, torch_device: torch.device) -> bool:
    """Registers the array's pages with the driver; whether it has taken them, which is logged otherwise."""
    with torch.cuda.device(torch_device):
        error = _cuda.cudart().cudaHostRegister(address_of(array), array.nbytes, _PORTABLE)
        if int(error) == _SUCCESS:
            return True
        # The driver keeps the error for the next kernel's check to find, which is taken here.
        with suppress(RuntimeError):
            torch.zeros(1, device=torch_device)
    _log.warning(
        "%.1f MiB of RAM could not be registered with the CUDA driver (error %d), copies from and to it "
        "are slower; the limit of locked memory may be too low (ulimit -l)",
        array.nbytes / 2**20,
        int(error),
    )
    return False


def unlock_pages(array: Bytes, torch_device: torch.device) -> None:
    """Undoes `lock_pages`."""
    with torch.cuda.device(torch_device):
        _cuda.cudart().cudaHostUnregister(address_of(array))
