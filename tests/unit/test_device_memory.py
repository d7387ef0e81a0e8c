"""Memory of a device: its limit, copies and their order, and that all of it is given back."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.device import cpu_memory
from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.device.cuda_memory import CudaMemory
from gpu_worker.device.memory import DeviceMemory
from shared.errors import ResourceError, StepStalledError

BUDGET = 64 * 2**20
TIMEOUT_S = 30.0

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def memory(request: pytest.FixtureRequest) -> Iterator[DeviceMemory]:
    """A little memory of each kind of device."""
    made: DeviceMemory = CpuMemory(BUDGET)
    if request.param == "cuda":
        made = CudaMemory(torch.device("cuda"), BUDGET)
    yield made
    made.close()


def numbers(num_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def test_budget(memory: DeviceMemory) -> None:
    """What is taken is not free; what is released is; the refusal has the numbers and the remedy."""
    assert memory.free_bytes() == BUDGET
    first = memory.allocate(40 * 2**20)
    assert (first.dtype, first.nbytes, first.device.type) == (
        torch.uint8,
        40 * 2**20,
        memory.torch_device.type,
    )
    assert memory.free_bytes() == 24 * 2**20
    with pytest.raises(
        ResourceError, match=r"25\.0 MiB .* 24\.0 MiB are free \(of 64\.0 MiB .*--vram-budget"
    ):
        memory.allocate(25 * 2**20)
    second = memory.allocate(24 * 2**20)
    assert memory.free_bytes() == 0
    memory.release(first)
    memory.release(second)
    assert memory.free_bytes() == BUDGET


def test_only_what_was_allocated_is_released(memory: DeviceMemory) -> None:
    """A view, something else's memory, or the same twice would put the budget out."""
    tensor = memory.allocate(4096)
    for other in (tensor[:256], tensor[256:], torch.zeros(4096, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="not allocated here"):
            memory.release(other)
    memory.release(tensor)
    with pytest.raises(ValueError, match="not allocated here"):
        memory.release(tensor)
    with pytest.raises(ValueError, match="0 bytes"):
        memory.allocate(0)


def test_copies_side_by_side_and_to_offsets(memory: DeviceMemory) -> None:
    """Parts of a blob land where the layout of a slot wants them, and nothing else is touched."""
    target = memory.allocate(8192)
    memory.copy_in([np.zeros(8192, np.uint8)], target)
    parts = [numbers(100), numbers(33, 1), numbers(4000, 2)]
    memory.copy_in(parts, target[1000:]).wait(TIMEOUT_S)
    expected = np.zeros(8192, np.uint8)
    expected[1000:5133] = np.concatenate(parts)
    np.testing.assert_array_equal(target.cpu().numpy(), expected)
    event = memory.copy_in(parts, target, offsets=[4096, 0, 4192])
    event.wait(TIMEOUT_S)
    assert event.is_done()
    expected[4096:4196], expected[:33], expected[4192:] = parts[0], parts[1], parts[2]
    np.testing.assert_array_equal(target.cpu().numpy(), expected)
    memory.release(target)


def test_copies_out(memory: DeviceMemory) -> None:
    """What has been copied in comes out again, in any parts, once the event has happened."""
    held = memory.allocate(5000)
    source = numbers(5000)
    copied = memory.copy_in([source], held)
    parts = [np.empty(3000, np.uint8), np.empty(2000, np.uint8)]
    memory.copy_out(held, parts, after=copied).wait(TIMEOUT_S)
    np.testing.assert_array_equal(np.concatenate(parts), source)
    middle = np.empty(10, np.uint8)
    memory.copy_out(held, [middle], offsets=[2990]).wait(TIMEOUT_S)
    np.testing.assert_array_equal(middle, source[2990:3000])
    memory.release(held)


def test_what_does_not_fit_is_refused(memory: DeviceMemory) -> None:
    """Copies run by addresses, so nothing may go beyond a slot."""
    target = memory.allocate(100)
    for parts, offsets in (
        ([numbers(101)], None),
        ([numbers(60), numbers(41)], None),
        ([numbers(60)], [41]),
        ([numbers(60)], [-1]),
    ):
        with pytest.raises(ValueError, match="not within the 100"):
            memory.copy_in(parts, target, offsets)
    with pytest.raises(ValueError, match="contiguous"):
        memory.copy_in([numbers(60)[::2]], target)
    with pytest.raises(ValueError, match="uint8"):
        memory.copy_out(target.view(torch.float32), [numbers(4)])
    with pytest.raises(ValueError, match="longer"):
        memory.copy_in([numbers(10)], target, [0, 10])
    read_only = numbers(10)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="cannot be written"):
        memory.copy_out(target, [read_only])
    memory.release(target)


def test_read_only_sources(memory: DeviceMemory) -> None:
    """Mapped files and staging segments of others can only be read."""
    target, source = memory.allocate(1000), numbers(1000)
    source.flags.writeable = False
    memory.copy_in([source], target).wait(TIMEOUT_S)
    np.testing.assert_array_equal(target.cpu().numpy(), source)
    memory.release(target)


def test_compute_and_copies_in_order(memory: DeviceMemory) -> None:
    """A slot that is read, refilled and read again, many times without a wait of the host."""
    slot = memory.allocate(2**20)
    sources = [np.full(2**20, number, np.uint8) for number in range(20)]
    for source in sources:
        memory.pin(source)
    sums = torch.zeros(20, dtype=torch.int64, device=memory.torch_device)
    read = memory.record()
    for number, source in enumerate(sources):
        memory.compute_waits_for(memory.copy_in([source], slot, after=read))
        sums[number] = slot.sum(dtype=torch.int64)
        read = memory.record()
    read.wait(TIMEOUT_S)
    assert sums.tolist() == [number * 2**20 for number in range(20)]
    for source in sources:
        memory.unpin(source)
    memory.release(slot)


def test_rate_of_the_link(memory: DeviceMemory) -> None:
    """A number that can be one, and no memory kept."""
    assert 0.01 < memory.link_probe(8 * 2**20) < 10_000
    assert memory.free_bytes() == BUDGET
    with pytest.raises(ResourceError, match="asked for"):
        memory.link_probe(2 * BUDGET)


def test_pinning(memory: DeviceMemory) -> None:
    """It changes no values, is undone by `close` at the latest, and may be refused."""
    array = numbers(2**20)
    memory.pin(array)
    memory.unpin(array)
    memory.unpin(array)
    memory.pin(array)
    memory.close()
    np.testing.assert_array_equal(array, numbers(2**20))


class _SlowCopies:
    """Copies that are made when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_run = threading.Event()
        self._memmove = cpu_memory.ctypes.memmove
        monkeypatch.setattr(cpu_memory.ctypes, "memmove", self)

    def __call__(self, target: int, source: int, num_bytes: int) -> None:
        assert self.may_run.wait(TIMEOUT_S)
        self._memmove(target, source, num_bytes)


def test_copies_are_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on while a copy is under way, and can see that it is; a wait has its limit."""
    slow, memory = _SlowCopies(monkeypatch), CpuMemory(BUDGET)
    target, source = memory.allocate(4096), numbers(4096)
    event = memory.copy_in([source], target)
    assert not event.is_done()
    with pytest.raises(StepStalledError, match=r"within 0\.01 s \(--watchdog-s\)"):
        event.wait(0.01)
    assert not target.any()
    threading.Timer(0.05, slow.may_run.set).start()
    memory.compute_waits_for(event)
    np.testing.assert_array_equal(target.numpy(), source)
    memory.close()


def test_closing_and_releasing_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them may write to memory that belongs to somebody else by then."""
    slow, memory = _SlowCopies(monkeypatch), CpuMemory(BUDGET)
    first, second = memory.allocate(4096), memory.allocate(4096)
    saved = np.empty(4096, np.uint8)
    memory.copy_in([numbers(4096)], first)
    memory.copy_out(first, [saved])
    threading.Timer(0.05, slow.may_run.set).start()
    memory.release(first)
    np.testing.assert_array_equal(saved, numbers(4096))
    slow.may_run.clear()
    event = memory.copy_in([numbers(4096, 1)], second)
    threading.Timer(0.05, slow.may_run.set).start()
    memory.close()
    assert event.is_done()
    np.testing.assert_array_equal(second.numpy(), numbers(4096, 1))
    with pytest.raises(RuntimeError, match="closed"):
        memory.copy_in([numbers(4096)], second)
    memory.close()


def test_a_copy_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes out wherever its event is asked, and the copies behind it are made."""
    memory = CpuMemory(BUDGET)
    target, source = memory.allocate(4096), numbers(4096)
    real = cpu_memory.ctypes.memmove

    def fail(target: int, source: int, num_bytes: int) -> None:
        monkeypatch.setattr(cpu_memory.ctypes, "memmove", real)
        raise OSError("no such memory")

    monkeypatch.setattr(cpu_memory.ctypes, "memmove", fail)
    failed, made = memory.copy_in([source], target), memory.copy_in([source], target)
    made.wait(TIMEOUT_S)
    for look in (lambda: failed.wait(TIMEOUT_S), failed.is_done, lambda: memory.compute_waits_for(failed)):
        with pytest.raises(OSError, match="no such memory"):
            look()
    np.testing.assert_array_equal(target.numpy(), source)
    memory.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_go_back_to_the_system() -> None:
    """At once, even where somebody still has a view of them; and no thread without a copy."""
    threads = threading.active_count()
    memory = CpuMemory(BUDGET)
    tensor = memory.allocate(BUDGET)
    assert tensor.data_ptr() % 4096 == 0
    tensor.fill_(1)
    view = tensor[4096:8192]
    filled = resident_bytes()
    memory.release(tensor)
    assert resident_bytes() < filled - BUDGET * 3 // 4
    del tensor, view
    gc.collect()
    memory.allocate(BUDGET)
    assert threading.active_count() == threads
    memory.close()


def test_an_address_space_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses what the budget allows: an error with a remedy, and nothing is booked."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    memory = CpuMemory(BUDGET)
    monkeypatch.setattr(cpu_memory.mmap, "mmap", refuse)
    with pytest.raises(ResourceError, match=r"0\.0 MiB are free"):
        memory.allocate(4096)
    assert memory.free_bytes() == BUDGET
