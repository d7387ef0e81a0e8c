"""What becomes of experts whose slots are lent while they are exchanged: a real cache, filled by a real
stager."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.device.cpu_slot_experts import CpuSlotExperts
from gpu_worker.experts.expert_cache import ExpertCache
from shared.expert_blobs import ExpertMode
from shared.gguf.model import GGUFModel
from shared.native.team import Team
from shared.placement.swaps import Swap
from shared.placement.table import ResidencyTable
from stager.blob_sources import BlobSources
from tests.support.staging import staged
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

TIMEOUT_S = 10.0
LAYER = 2
# Of 24 KiB each, so that three make a segment.
OWNERS = [0, 1, 2, 3, 4, 5]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ExpertCache]:
    """Six slots of one layer, in two segments of three, filled."""
    file = GGUFModel(tiny_model().write(tmp_path / "tiny.gguf"))
    with ExitStack() as stack:
        team = Team(1)
        stack.callback(team.close)
        experts = CpuSlotExperts(file, NUM_LAYERS, team)
        memory = CpuMemory(len(OWNERS) * experts.slot_bytes(LAYER))
        stack.callback(memory.close)
        layers = np.full(len(OWNERS), LAYER, np.int32)
        table = ResidencyTable(layers, NUM_LAYERS, NUM_EXPERTS)
        cache = ExpertCache(memory, experts, table, layers, np.array(OWNERS, np.int32), TIMEOUT_S)
        cache.keeps_lent = True
        staging = stack.enter_context(staged(file, BlobSources(ExpertMode.MAPPED), 4))
        cache.attach(staging.staging)
        settle(cache)
        assert residents(cache) == OWNERS
        yield cache


def settle(cache: ExpertCache) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while cache.is_busy:
        assert time.monotonic() < deadline
        cache.pump()


def residents(cache: ExpertCache) -> list[int]:
    return cache.table.expert_of.tolist()


def exchange(cache: ExpertCache, slot: int, expert: int) -> None:
    cache.swap([Swap(LAYER, slot, residents(cache)[slot], expert, 1.0)])


def test_an_exchange_that_lending_ends(cache: ExpertCache) -> None:
    """Who was to leave is kept in RAM, and comes back from there: nothing is kept for nobody."""
    exchange(cache, 5, 7)
    cache.pump()
    assert cache.claim("work space", 1) > 0
    assert cache.num_kept == 3
    assert residents(cache) == [0, 1, 2, -1, -1, -1]
    cache.claim("work space", 0)
    cache.load_kept()
    assert residents(cache) == OWNERS
    settle(cache)
    assert cache.num_kept == 0
    assert cache.counts.num_swaps == 0


def test_an_expert_that_comes_back_elsewhere(cache: ExpertCache) -> None:
    """While its slot is lent; from RAM. Who gave way has the slot when it comes back."""
    cache.claim("work space", 1)
    exchange(cache, 0, 4)
    settle(cache)
    assert residents(cache) == [4, 1, 2, -1, -1, -1]
    assert cache.num_kept == 2
    cache.claim("work space", 0)
    settle(cache)
    assert residents(cache) == [4, 1, 2, 3, 0, 5]
    assert cache.num_kept == 0


def test_nobody_comes_or_goes_while_it_is_held(cache: ExpertCache) -> None:
    """And staging places are for others; what was asked for before is asked for again."""
    exchange(cache, 0, 6)
    cache.pump()
    cache.begin_step(is_held=True)
    for _ in range(100):
        cache.pump()
        time.sleep(0.0005)
    assert residents(cache) == OWNERS
    assert cache.is_busy
    cache.end_step()
    settle(cache)
    assert residents(cache) == [6, 1, 2, 3, 4, 5]


class Late:
    """Compute that has ended when somebody looks for the third time."""

    def __init__(self) -> None:
        self.num_looks = 0

    def is_done(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 2

    def wait(self, timeout_s: float) -> None:
        self.num_looks = 3

    def seconds(self) -> float:
        return 0.0


def test_work_that_ends_late(cache: ExpertCache) -> None:
    """An expert that was kept comes into the slot of one that is still read: once that has ended, and no
    later."""
    cache.claim("work space", 1)
    ticket = cache.begin_step(is_held=False)
    cache.table.note_reads([0], ticket)
    record = cache._memory.record
    cache._memory.record = Late  # type: ignore[method-assign]
    cache.end_step()
    cache._memory.record = record  # type: ignore[method-assign]
    exchange(cache, 0, 4)
    cache.load_kept()
    assert residents(cache)[0] == 4


def test_ram_has_no_room(cache: ExpertCache, caplog: pytest.LogCaptureFixture) -> None:
    """Then experts of lent slots are not kept, which is said once."""
    cache._has_ram = lambda num_bytes: False
    for _ in range(2):
        cache.claim("work space", 1)
        assert cache.num_kept == 0
        cache.claim("work space", 0)
        settle(cache)
        assert residents(cache) == OWNERS
    assert caplog.text.count("RAM has no room for experts whose slots are lent") == 1
