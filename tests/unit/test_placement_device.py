"""Where the model will run, told from settings and what the machine has."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.placement.device import may_have_slots, runs_on_cuda, slots_in_ram


@pytest.fixture(params=["dev/nvidia0", "proc/driver/nvidia"])
def with_driver(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The root of a machine with a CUDA device."""
    (tmp_path / request.param).mkdir(parents=True)
    return tmp_path


def test_device(with_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A name decides; auto goes by the driver."""
    without = tmp_path_factory.mktemp("without")
    for root in (with_driver, without):
        assert runs_on_cuda("cuda", root)
        assert runs_on_cuda("cuda:1", root)
        assert not runs_on_cuda("cpu", root)
    assert runs_on_cuda("auto", with_driver)
    assert not runs_on_cuda("auto", without)


def test_slots(with_driver: Path) -> None:
    """In RAM only on the CPU, and only if asked for; on a CUDA device also by itself."""
    assert slots_in_ram("cpu", "100", with_driver) == 100
    assert slots_in_ram("cpu", "auto", with_driver) == 0
    assert slots_in_ram("auto", "100", with_driver) == 0
    assert may_have_slots("auto", "auto", with_driver)
    assert may_have_slots("cpu", "1", with_driver)
    assert not may_have_slots("cpu", "auto", with_driver)
    assert not may_have_slots("cuda", "0", with_driver)
    with pytest.raises(ConfigError, match="--expert-cache is 'x'"):
        may_have_slots("cpu", "x", with_driver)
