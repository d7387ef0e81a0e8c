"""Chooses the device from the setting and what the machine has."""

import logging
from collections.abc import Iterable

import torch

from gpu_worker.device.cpu import CpuDevice
from gpu_worker.device.interface import Device
from gpu_worker.device.torch_device import TorchDevice
from shared import quants
from shared.config import check_device
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.quants import BlockFormat
from shared.tensor_catalog import ExpectedTensor, TensorClass
from shared.topology import num_threads_on, usable_cpus

_log = logging.getLogger(__name__)


def choose_torch_device(setting: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises ConfigError for any other word, ResourceError where a device was asked for that is not there.
    """
    check_device(setting)
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(
            f"--device is {setting!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} "
            "CUDA devices; use --device cpu, or install a CUDA build of torch and a driver"
        )
    return device


def open_device(torch_device: torch.device, model: GGUFModel, num_threads: int) -> Device:
    """The device with the model's weights on it. `num_threads` 0 is one per usable CPU."""
    num_threads = num_threads or num_threads_on(usable_cpus())
    if torch_device.type == "cpu":
        _log.info("the model runs on the CPU with %d threads", num_threads)
        return CpuDevice(model, num_threads)
    # Products are exact float32 ones; TensorFloat-32 would round their inputs to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    _log.info("the model runs on %s (%s)", torch_device, torch.cuda.get_device_name(torch_device))
    return TorchDevice(model, torch_device)


def formats_of(
    torch_device: torch.device, model: GGUFModel, tensors: Iterable[ExpectedTensor]
) -> tuple[set[BlockFormat], set[BlockFormat], set[BlockFormat]]:
    """The formats of tensors that the device multiplies with as they are stored, of those it decodes, and of
    those it takes single rows of."""
    multiplied, decoded, gathered = set(), set(), set()
    for tensor in tensors:
        block_format = quants.block_format(model.info(tensor.name).type.type_id)
        is_matrix = len(tensor.shape) == 2 and "conv1d" not in tensor.name
        if torch_device.type != "cpu" or not (is_matrix or tensor.tensor_class is TensorClass.SHARED_EXPERT):
            decoded.add(block_format)
            continue
        multiplied.add(block_format)
        if tensor.tensor_class is TensorClass.EMBEDDING:
            gathered.add(block_format)
    return multiplied, decoded, gathered
