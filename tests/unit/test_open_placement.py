"""Room for experts on a device that RAM plays: as many slots as were asked for, or a word about why not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.device.cpu import CpuDevice
from gpu_worker.experts import placement
from gpu_worker.experts.placement import ExpertPlacement, open_placement
from gpu_worker.experts.profile_store import ProfileStore
from shared.config import GpuWorkerConfig
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.memory_budget import Memory
from shared.model_config import read_model_config
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFModel]:
    with GGUFModel(tiny_model().write(tmp_path_factory.mktemp("placement") / "tiny.gguf")) as opened:
        yield opened


@pytest.fixture
def device(file: GGUFModel) -> Iterator[CpuDevice]:
    opened = CpuDevice(file, 1)
    yield opened
    opened.close()


def opened_with(file: GGUFModel, device: CpuDevice, expert_cache: str) -> ExpertPlacement | None:
    config, nowhere = read_model_config(file), Path("/no-such-profile")
    settings = GpuWorkerConfig(device="cpu", expert_cache=expert_cache, expert_profile=nowhere)
    store = ProfileStore(nowhere, file, config)
    return open_placement(settings, file, config, device, store, lambda activity, progress: None)


@pytest.mark.parametrize("expert_cache", ["0", "auto"])
def test_none(file: GGUFModel, device: CpuDevice, expert_cache: str) -> None:
    """Where none are asked for; a device that is played is not left to be filled."""
    assert opened_with(file, device, expert_cache) is None


def test_more_slots_than_experts(
    file: GGUFModel, device: CpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """One for each is enough, and whoever asked for more is told."""
    opened = opened_with(file, device, "999999999")
    assert opened is not None
    assert opened.cache.table.num_slots == NUM_LAYERS * NUM_EXPERTS
    assert opened.cache.table.slots_of_layer(0).size == NUM_EXPERTS
    assert f"--expert-cache is 999999999, but the model has {NUM_LAYERS * NUM_EXPERTS} experts" in caplog.text
    opened.close()


def test_more_slots_than_ram(file: GGUFModel, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what they take, what there is, and what to do; before any of it is taken."""
    monkeypatch.setattr(placement, "read_memory", lambda: Memory(total=4 << 30, available=256 << 20))
    with pytest.raises(
        ResourceError, match=r"--expert-cache is 100: its slots take 1 MiB of RAM, which has 0 MiB"
    ) as told:
        opened_with(file, device, "100")
    assert "lower it, or take --expert-cache 0" in str(told.value)
