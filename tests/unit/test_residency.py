"""Where experts are kept, for any setting and any memory; and what is said where that cannot be."""

import logging
from dataclasses import replace

import pytest

from cpu_worker.residency import Experts, Residency, decide
from shared.errors import ResourceError
from shared.expert_blobs import ExpertMode
from shared.memory_budget import Memory, Needs

GIB = 1 << 30
MIB = 1 << 20

# 512 experts in 40 layers, 2 MiB each.
EXPERTS = Experts(num_bytes=40 * GIB, place_bytes=40 * 2 * MIB, num_per_layer=512, num_used=10)
NEEDS = Needs(dense=2 * GIB, context=GIB // 2, rows=GIB // 4, processes=GIB // 4)
ROOMY = Memory(total=64 * GIB, available=60 * GIB)
SMALL = Memory(total=32 * GIB, available=28 * GIB)
NONE = Memory(total=8 * GIB, available=4 * GIB)


def decided(
    setting: str = "auto", budget: float = 0, memory: Memory = SMALL, free_shared: int = 100 * GIB
) -> Residency:
    return decide(setting, budget, EXPERTS, memory, NEEDS, free_shared)


def test_mapped_asks_for_nothing() -> None:
    """However little there is."""
    assert decided("mapped", memory=NONE) == Residency(ExpertMode.MAPPED)


@pytest.mark.parametrize("setting", ["auto", "resident"])
def test_all_that_fit_are_resident(setting: str) -> None:
    """By what is free, and by a budget."""
    assert decided(setting, memory=ROOMY) == Residency(ExpertMode.RESIDENT)
    assert decided(setting, budget=40, memory=ROOMY) == Residency(ExpertMode.RESIDENT)
    assert decided(setting, budget=50, memory=ROOMY) == Residency(ExpertMode.RESIDENT)


def test_resident_is_refused_where_they_do_not_fit() -> None:
    """With what is needed, what there is, what stays free, and what to do."""
    message = (
        r"^--experts resident: all experts are 40\.00 GiB, and 23\.00 GiB can be had for them "
        r"\(available 28\.00 GiB, of which 2\.00 GiB stay free; dense weights 2\.00 GiB, context 512 MiB, "
        r"n-gram rows 256 MiB, processes 256 MiB\); free memory, or take"
    )
    with pytest.raises(ResourceError, match=message):
        decided("resident")
    with pytest.raises(ResourceError, match=r"20\.00 GiB can be had for them \(--ram-budget 20\)"):
        decided("resident", budget=20)


def test_auto_makes_a_pool_of_what_is_free() -> None:
    """The same number of places for each layer: 23 GiB of 80 MiB."""
    assert decided() == Residency(ExpertMode.POOL, 23 * 1024 // 80)
    assert decided(budget=20) == Residency(ExpertMode.POOL, 20 * 1024 // 80)


def test_a_budget_does_not_go_below_the_floor() -> None:
    """It overrules what is kept for other needs, not the floor; nor is more asked for than there are
    experts."""
    assert decided(budget=26).mode is ExpertMode.POOL
    message = (
        r"--ram-budget is 27 GiB, but 28\.00 GiB of memory are available, of which 2\.00 GiB stay free; "
        r"lower it to 26\.00"
    )
    with pytest.raises(ResourceError, match=message):
        decided(budget=27)
    assert decided(budget=200, memory=ROOMY).mode is ExpertMode.RESIDENT


def test_a_pool_has_a_smallest_size(caplog: pytest.LogCaptureFixture) -> None:
    """Twenty places for ten experts used: a budget below that is refused; where that is all there is, experts
    are left to the page cache, which is said."""
    smallest = 20 * 80 / 1024
    assert decided(budget=smallest).places_per_layer == 20
    message = (
        r"a pool of experts needs 1\.57 GiB of memory, and 1\.50 GiB can be had \(--ram-budget 1\.5\); "
        r"raise --ram-budget"
    )
    with pytest.raises(ResourceError, match=message):
        decided(budget=1.5)
    assert decided(memory=NONE) == Residency(ExpertMode.MAPPED)
    assert "left to the page cache" in caplog.text


def test_shared_memory_bounds_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """With a word on how to have more of it."""
    assert decided(free_shared=8 * GIB) == Residency(ExpertMode.POOL, 8 * 1024 // 80)
    assert "takes 7.97 GiB, which is what /dev/shm has left; 23.00 GiB of memory could be had" in caplog.text
    assert "docker: shm_size" in caplog.text
    with pytest.raises(ResourceError, match=r"of shared memory \(/dev/shm\).*enlarge /dev/shm"):
        decided(budget=20, free_shared=GIB)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_slots_in_ram_are_left_room(caplog: pytest.LogCaptureFixture) -> None:
    """Where RAM plays the memory of a device, its slots are not given to experts a second time."""
    needs = replace(NEEDS, slots=3 * GIB)
    found = decide("auto", 0, EXPERTS, SMALL, needs, 100 * GIB)
    assert found == Residency(ExpertMode.POOL, 20 * 1024 // 80)
    assert decide("auto", 0, EXPERTS, NONE, needs, 100 * GIB).mode is ExpertMode.MAPPED
    assert "processes 256 MiB, slots of experts 3.00 GiB)" in caplog.text


def test_small_pools_are_told_in_mib(caplog: pytest.LogCaptureFixture) -> None:
    """Rather than as 0.00 GiB: what is needed rounded up, what can be had rounded down."""
    small = Experts(num_bytes=64 * MIB, place_bytes=MIB, num_per_layer=64, num_used=8)
    memory = Memory(total=GIB, available=128 * MIB + 10 * MIB + 1023)
    assert decide("auto", 0, small, memory, Needs(0, 0, 0, 0), GIB).mode is ExpertMode.MAPPED
    assert "a pool of experts needs 16 MiB of memory, and 10 MiB can be had" in caplog.text


def test_few_experts() -> None:
    """A pool never has more places than there are experts, nor needs more."""
    few = Experts(num_bytes=8 * MIB, place_bytes=MIB, num_per_layer=8, num_used=8)
    assert few.smallest_pool == 8
    tight = Memory(total=GIB, available=128 * MIB + 8 * MIB - 1)
    nothing_else = Needs(0, 0, 0, 0)
    assert decide("auto", 0, few, tight, nothing_else, GIB).mode is ExpertMode.MAPPED
    roomy = Memory(total=GIB, available=GIB)
    assert decide("auto", 8.5 / 1024, few, roomy, nothing_else, GIB).mode is ExpertMode.RESIDENT
