"""Which device runs the model, from the setting and from what the machine has."""

import pytest
import torch

from gpu_worker.device.choose import choose_torch_device
from shared.errors import ConfigError, ResourceError


def with_cuda_devices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)


@pytest.mark.parametrize(
    ("setting", "num_cuda", "chosen"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("cpu", 1, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_chosen(monkeypatch: pytest.MonkeyPatch, setting: str, num_cuda: int, chosen: str) -> None:
    """A graphics card is used where there is one, unless the setting says otherwise."""
    with_cuda_devices(monkeypatch, num_cuda)
    assert choose_torch_device(setting) == torch.device(chosen)


@pytest.mark.parametrize(("setting", "num_cuda"), [("cuda", 0), ("cuda:1", 1)])
def test_not_there(monkeypatch: pytest.MonkeyPatch, setting: str, num_cuda: int) -> None:
    """Asked for by name, it must not silently be another."""
    with_cuda_devices(monkeypatch, num_cuda)
    with pytest.raises(ResourceError, match=f"sees {num_cuda} CUDA devices"):
        choose_torch_device(setting)


@pytest.mark.parametrize("setting", ["gpu", "meta", "mps", "", "cuda:x", "cpu:1"])
def test_no_such_setting(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """The words that are understood are named."""
    with_cuda_devices(monkeypatch, 1)
    with pytest.raises(ConfigError, match="auto, cpu, cuda or cuda:N"):
        choose_torch_device(setting)
