"""Where the model will run, and where its slots of experts will be, as far as can be told without torch."""

from pathlib import Path

from shared.config import expert_cache_slots
from shared.errors import ConfigError

_SIGNS_OF_CUDA = ("dev/nvidia0", "proc/driver/nvidia")


def runs_on_cuda(device: str, root: Path = Path("/")) -> bool:
    """Whether `--device` means a CUDA device: one is named, or it is auto and this machine has a driver for
    one. That torch can use it is known to the gpu_worker alone."""
    if device == "auto":
        return any((root / sign).exists() for sign in _SIGNS_OF_CUDA)
    return device.startswith("cuda")


def check_deterministic(is_on_cuda: bool, has_slots: bool) -> None:
    """Raises ConfigError where `--deterministic` cannot be kept: sums of torch operations on a device depend
    on what is computed with them, and which experts have slots on what was computed before."""
    if is_on_cuda:
        raise ConfigError(
            "--deterministic is not possible on a CUDA device, whose sums depend on what else is computed; "
            "take --device cpu, or leave it out"
        )
    if has_slots:
        raise ConfigError(
            "--deterministic is not possible with slots of experts, which change with what was computed "
            "before; take --expert-cache 0, or leave it out"
        )


def slots_in_ram(device: str, expert_cache: str, root: Path = Path("/")) -> int:
    """Slots of experts for which RAM plays the memory of a device, by `--device` and `--expert-cache`. Raises
    ConfigError."""
    slots = expert_cache_slots(expert_cache)
    return 0 if runs_on_cuda(device, root) else slots or 0


def may_have_slots(device: str, expert_cache: str, root: Path = Path("/")) -> bool:
    """Whether there will be slots; on a CUDA device that they are left to, its free memory decides. Raises
    ConfigError."""
    slots = expert_cache_slots(expert_cache)
    return runs_on_cuda(device, root) if slots is None else slots > 0
