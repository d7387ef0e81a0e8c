"""Memory of the host as CUDA devices copy from and to it: fast, and asynchronously, where its pages are
locked."""

import ctypes
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
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
_BORDER = 64
"""Tensors that share a piece of memory begin on a cache line each."""


def host_tensor(array: Bytes) -> Tensor:
    """The array's memory as a tensor uint8 [num_bytes], whether or not it may be written to. It does not keep
    the memory where it may not."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch knows no tensors that are read only, and warns of arrays that are.
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address_of(array))
    return torch.frombuffer(memory, dtype=torch.uint8)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values of tensors in host memory, those that are not there already: by copies into one piece of
    locked memory, and one wait for all of them, which includes the compute issued before."""
    remote = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not remote:
        return list(tensors)
    (torch_device,) = {tensor.device for tensor in remote}
    is_cuda = torch_device.type == "cuda"
    arrived = iter(side_by_side(remote, is_locked=is_cuda))
    if is_cuda:
        end = _cuda.Event()
        end.record(torch.cuda.current_stream(torch_device))
        end.synchronize()
    return [next(arrived) if tensor.device.type != "cpu" else tensor for tensor in tensors]


def side_by_side(tensors: Sequence[Tensor], *, is_locked: bool) -> list[Tensor]:
    """Issues copies of tensors into one piece of host memory; where that is locked, the values are there only
    once the device has come so far."""
    stops = list(accumulate(-(-tensor.nbytes // _BORDER) * _BORDER for tensor in tensors))
    memory = torch.empty(stops[-1], dtype=torch.uint8, pin_memory=is_locked)
    copies = []
    for tensor, start in zip(tensors, [0, *stops], strict=False):
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor, non_blocking=True))
    return copies


def to_device(host: Tensor, torch_device: torch.device) -> Tensor:
    """A copy on the device of a tensor in host memory that may be changed after the call. The host waits for
    nothing; where the device is the CPU, it is the tensor itself."""
    if torch_device.type == "cpu":
        return host
    if torch_device.type == "cuda":
        # The locked memory is torch's, which does not hand it out again before the copy has been made.
        host = torch.empty_like(host, pin_memory=True).copy_(host)
    return host.to(torch_device, non_blocking=True)


def lock_pages(array: Bytes, torch_device: torch.device) -> bool:
    """Registers the array's pages with the driver; whether it has taken them, which is logged otherwise."""
    with torch.cuda.device(torch_device):
        cudart = _cuda.cudart()
        error = cudart.cudaHostRegister(address_of(array), array.nbytes, _PORTABLE)
        if error == cudart.cudaError.success:
            return True
        # The driver keeps the error for the next kernel's check to find, which is taken here.
        with suppress(RuntimeError):
            torch.zeros(1, device=torch_device)
    _log.warning(
        "%.1f MiB of RAM could not be registered with the CUDA driver (%s), copies from and to it are "
        "slower; the limit of locked memory may be too low (ulimit -l)",
        array.nbytes / 2**20,
        cudart.cudaGetErrorString(error),
    )
    return False


def unlock_pages(array: Bytes, torch_device: torch.device) -> None:
    """Undoes `lock_pages`."""
    with torch.cuda.device(torch_device):
        _cuda.cudart().cudaHostUnregister(address_of(array))
