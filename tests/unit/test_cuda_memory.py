"""What memory of a CUDA device asks of torch, on machines without one: torch's streams and events are stood
in for by ones that write down what they were told. What the device makes of it `test_device_memory` says."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from gpu_worker.device.cuda_memory import CudaMemory
from shared.errors import ResourceError, StepStalledError

MIB = 2**20


class _Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_event(self, event: "_Event") -> None:
        self._told.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: "_Stream") -> None:
        self._told.append(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        self._told.append(f"host waits for {self.name}")


class _Event:
    is_done = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.name = "nothing"
        self._is_timed = enable_timing

    def record(self, stream: _Stream) -> None:
        self.name = f"the end of {stream.name}"

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: "_Event") -> float:
        assert self._is_timed
        assert end._is_timed
        return 250.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams were told; the device has 100 MiB free, and 20 MiB held by torch for nothing."""
    told: list[str] = []
    compute = _Stream("compute", told)
    stand_ins = {
        "Stream": lambda device: _Stream("copies", told),
        "Event": _Event,
        "current_stream": lambda device: compute,
        "stream": lambda stream: nullcontext(),
        "mem_get_info": lambda device: (100 * MIB, 1000 * MIB),
        "memory_reserved": lambda device: 30 * MIB,
        "memory_allocated": lambda device: 10 * MIB,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: told.append(f"{tensor.nbytes} bytes are used by {stream.name}"),
    )
    return told


def test_order_of_copies_and_compute(told: list[str]) -> None:
    """A copy waits for the reader before it, the next reader for the copy, and a first copy for what compute
    may still do to memory that torch hands out again; the host waits for nothing."""
    memory = CudaMemory(torch.device("cpu"), MIB)
    slot = memory.allocate(4096)
    assert told == ["copies waits for compute"]
    told.clear()
    sources = [np.full(1000, 1, np.uint8), np.full(1000, 2, np.uint8)]
    sources[1].flags.writeable = False
    read = memory.record()
    memory.compute_waits_for(memory.copy_in(sources, slot, [0, 3000], after=read))
    assert told == ["copies waits for the end of compute", "compute waits for the end of copies"]
    assert [slot[at].item() for at in (0, 999, 3000, 3999)] == [1, 1, 2, 2]
    told.clear()
    saved = np.empty(10, np.uint8)
    assert memory.record().seconds() == 0
    copied = memory.copy_out(slot, [saved], [995], after=memory.record())
    copied.wait(1)
    assert copied.seconds() == 0.25
    assert saved[:5].tolist() == [1] * 5
    assert told == ["copies waits for the end of compute"]
    told.clear()
    memory.release(slot)
    memory.close()
    assert told == ["4096 bytes are used by copies", "host waits for copies"]


def test_what_is_free(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the budget and what the device and torch's allocator have; a device that refuses what it
    should have is said as what it is."""
    assert CudaMemory(torch.device("cpu"), 50 * MIB).free_bytes() == 50 * MIB
    memory = CudaMemory(torch.device("cpu"), 1000 * MIB)
    assert memory.free_bytes() == 120 * MIB
    with pytest.raises(ResourceError, match=r"121\.0 MiB .*120\.0 MiB are free \(of 1000\.0 MiB"):
        memory.allocate(121 * MIB)

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.cuda.OutOfMemoryError("in pieces")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ResourceError, match=r"119\.0 MiB .*120\.0 MiB are free"):
        memory.allocate(119 * MIB)


def test_waiting_has_its_limit(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own wait would have none."""
    memory = CudaMemory(torch.device("cpu"), MIB)
    monkeypatch.setattr(_Event, "is_done", False)
    event = memory.record()
    assert not event.is_done()
    with pytest.raises(StepStalledError, match=r"within 0\.01 s"):
        event.wait(0.01)
