"""Tensors on their way between the device and host memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.device.host_memory import host_tensor, side_by_side, to_device, to_host

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
