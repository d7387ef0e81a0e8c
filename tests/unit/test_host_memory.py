"""Tensors on their way between the device and host memory."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.device.host_memory import (
    host_tensor,
    lock_pages,
    side_by_side,
    to_device,
    to_host,
    unlock_pages,
)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def of_a_layer(device: str = "cpu") -> list[Tensor]:
    """Activations, experts and weights of three tokens, as they cross between processes."""
    torch.manual_seed(0)
    x, ids, weights = torch.randn(3, 20), torch.randint(0, 9, (3, 5)).int(), torch.rand(3, 5)
    return [tensor.to(device) for tensor in (x, ids, weights)]


def test_side_by_side() -> None:
    """Each has its own values, type and shape, none the memory of another, all of them one piece."""
    tensors = [*of_a_layer(), torch.tensor(True), torch.empty(0, 4)]
    copies = side_by_side(tensors, is_locked=False)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    copies[1].zero_()
    assert torch.equal(copies[0], tensors[0])
    assert torch.equal(copies[2], tensors[2])


def test_on_the_cpu_nothing_is_copied() -> None:
    """What is in host memory is handed on."""
    tensors = of_a_layer()
    assert [id(tensor) for tensor in to_host(tensors)] == [id(tensor) for tensor in tensors]
    assert to_device(tensors[0], torch.device("cpu")) is tensors[0]


@pytest.mark.cuda
@CUDA
def test_there_and_back() -> None:
    """Only what is on the device is copied; what was handed over may be changed at once."""
    on_device, in_host = of_a_layer("cuda"), of_a_layer()
    arrived = to_host([on_device[0], in_host[1], on_device[2]])
    assert arrived[1] is in_host[1]
    for tensor, expected in zip(arrived, in_host, strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected)
    large = torch.randn(2000, 2000)
    kept = large.clone()
    moved = to_device(large, torch.device("cuda"))
    large.zero_()
    assert torch.equal(moved.cpu(), kept)


def test_memory_that_is_read_only() -> None:
    """The same memory as a tensor, without the warning that torch has for such arrays."""
    array = np.arange(100, dtype=np.uint8)
    array.flags.writeable = False
    tensor = host_tensor(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == list(range(100))


class _Cudart:
    """The driver's answers to what is registered."""

    class cudaError:
        success = 0

    def __init__(self, error: int) -> None:
        self._error = error
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered.append((address, num_bytes))
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.registered = [entry for entry in self.registered if entry[0] != address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.mark.parametrize("error", [0, 2])
def test_locking_pages(error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver is told where the array lies; where it refuses, that is said, with the remedy, and the error
    that it keeps is cleared by a kernel."""
    cudart, array, kernels = _Cudart(error), np.zeros(3 * 2**20, np.uint8), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda torch_device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: kernels.append(kwargs["device"]))
    device = torch.device("cuda")
    assert lock_pages(array, device) == (error == 0)
    assert cudart.registered == [(array.ctypes.data, array.nbytes)]
    assert len(kernels) == (error != 0)
    assert ("3.0 MiB of RAM could not be registered with the CUDA driver (error 2)" in caplog.text) == (
        error != 0
    )
    unlock_pages(array, device)
    assert not cudart.registered
