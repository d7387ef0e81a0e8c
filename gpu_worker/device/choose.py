"""Chooses the device from the setting and what the machine has."""

import logging

import torch

from gpu_worker.device.cpu import CpuDevice
from gpu_worker.device.interface import Device
from gpu_worker.device.torch_device import TorchDevice
from shared.config import check_device
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.topology import usable_cpus

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
    num_threads = num_threads or len(usable_cpus())
    if torch_device.type == "cpu":
        _log.info("the model runs on the CPU with %d threads", num_threads)
        return CpuDevice(model, num_threads)
    # Products are exact float32 ones; TensorFloat-32 would round their inputs to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    _log.info("the model runs on %s (%s)", torch_device, torch.cuda.get_device_name(torch_device))
    return TorchDevice(model, torch_device)
