"""Which memory of slots is lent for how much, and that it comes back."""

import pytest

from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.experts.slot_memory import SlotMemory
from shared.errors import ResourceError

KIB = 1 << 10
# Segments of 64 KiB, the last one half full.
SIZES = [16 * KIB] * 38
NUM_BYTES = sum(SIZES)


@pytest.fixture
def memory() -> CpuMemory:
    return CpuMemory(NUM_BYTES)


def lend(slots: SlotMemory, wanted: int) -> None:
    to_lend, spare = slots.changes(wanted)
    for segment in to_lend:
        slots.release(segment)
    for segment in spare:
        assert slots.reclaim(segment)


def test_buffers_are_apart(memory: CpuMemory) -> None:
    """Each slot has memory of its own."""
    slots = SlotMemory(memory, SIZES)
    assert memory.free_bytes() == 0
    for slot in range(len(SIZES)):
        slots.buffer(slot).fill_(slot)
    for slot, size in enumerate(SIZES):
        assert slots.buffer(slot).tolist() == [slot] * size


def test_what_is_lent(memory: CpuMemory) -> None:
    """As much as is wanted and no segment more, the coldest ones; by how much is wanted alone, so that
    nothing is lent and taken back at once."""
    slots = SlotMemory(memory, SIZES)
    for wanted in (1, 33 * KIB, 64 * KIB, 65 * KIB, 200 * KIB, 0, NUM_BYTES, 96 * KIB, 2 * NUM_BYTES, 1, 0):
        to_lend, spare = slots.changes(wanted)
        assert not set(map(id, to_lend)) & set(map(id, spare))
        lend(slots, wanted)
        assert slots.changes(wanted) == ([], [])
        assert memory.free_bytes() == slots.lent_bytes
        assert slots.lent_bytes >= min(wanted, NUM_BYTES)
        assert slots.lent_bytes < wanted + 64 * KIB or not wanted
        lent = [slots.is_lent(slot) for slot in range(len(SIZES))]
        assert not wanted or any(lent)
        if 64 * KIB < wanted < NUM_BYTES:
            assert not any(lent[: lent.index(True)])
    assert slots.lent_bytes == 0


def test_memory_that_somebody_else_has(memory: CpuMemory) -> None:
    """A segment whose memory cannot be had stays lent."""
    slots = SlotMemory(memory, SIZES)
    lend(slots, 32 * KIB)
    taken = memory.allocate(KIB)
    _, (segment,) = slots.changes(0)
    assert not slots.reclaim(segment)
    assert slots.lent_bytes == 32 * KIB
    memory.release(taken)
    assert slots.reclaim(segment)
    assert slots.lent_bytes == 0


def test_a_device_that_is_too_small() -> None:
    """Said with the numbers, and nothing is left taken but what goes with the device."""
    with pytest.raises(ResourceError, match="of memory of the device cpu were asked for"):
        SlotMemory(CpuMemory(NUM_BYTES - 1), SIZES)
