"""RAM as the memory of a device: so much of it as was set aside, and one thread that copies.

What needs a device smaller than the model runs on any machine by this, with copies that are as asynchronous
as those of a graphics card.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.device.memory import Allowance, Bytes, Event, measure_link, places_of, stalled
from shared.native.task import address_of


class _Done:
    """An event that has happened: compute is synchronous."""

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def seconds(self) -> float:
        """Nothing was copied."""
        return 0.0


class _Copy:
    """Some copies that belong together, and the event of their end."""

    def __init__(self, moves: list[tuple[int, int, int]], kept: tuple[Any, ...]) -> None:
        """`moves`: target, source and bytes of each copy; `kept` is what the memory belongs to."""
        self._moves = moves
        self._kept = kept
        self.has_ended = threading.Event()
        self._error: BaseException | None = None
        self._seconds = 0.0

    def run(self) -> None:
        """Copies; on the copying thread."""
        started = time.perf_counter()
        try:
            for target, source, num_bytes in self._moves:
                # A call that does not hold the GIL.
                ctypes.memmove(target, source, num_bytes)
        except BaseException as error:
            self._error = error
        finally:
            self._kept = ()
            self._seconds = time.perf_counter() - started
            self.has_ended.set()

    def is_done(self) -> bool:
        """As `gpu_worker.device.memory.Event` says."""
        if not self.has_ended.is_set():
            return False
        self._raise_error()
        return True

    def wait(self, timeout_s: float | None) -> None:
        """The same; None waits for as long as it takes."""
        if not self.has_ended.wait(timeout_s):
            assert timeout_s is not None
            raise stalled(timeout_s)
        self._raise_error()

    def seconds(self) -> float:
        """As `gpu_worker.device.memory.Event` says."""
        return self._seconds

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class _CopyThread:
    """Runs copies in the order they are given. It is there from the first one on."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Copy | None] = SimpleQueue()
        self._last: _Copy | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, copy: _Copy) -> None:
        if self._is_closed:
            raise RuntimeError("the device's memory is closed: nothing is copied any more")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="device copies", daemon=True)
            self._thread.start()
        self._last = copy
        self._queue.put(copy)

    def drain(self) -> None:
        """Returns when all copies have ended, well or not."""
        if self._last is not None:
            self._last.has_ended.wait()
            self._last = None

    def close(self) -> None:
        """Returns when all copies have been made."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy.run()
            # Not kept until the next one comes: its memory may be given back.
            del copy


class CpuMemory:
    """RAM within a budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.torch_device = torch.device("cpu")
        self._allowance = Allowance(self.torch_device, budget_bytes)
        self._mappings: dict[int, mmap.mmap] = {}
        self._copies = _CopyThread()

    def free_bytes(self) -> int:
        """What is left of the budget."""
        return self._allowance.free_bytes

    def allocate(self, num_bytes: int) -> Tensor:
        """Pages of their own, which RAM is found for as they are first written."""
        self._allowance.check(num_bytes, self.free_bytes())
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            # The system promises no more than it has (vm.overcommit_memory, or a limit of the process).
            raise self._allowance.refusal(num_bytes, 0) from error
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mappings[tensor.data_ptr()] = mapping
        return self._allowance.take(tensor)

    def release(self, tensor: Tensor) -> None:
        """Waits for the copies under way. Then the pages go back to the system, though their addresses stay
        taken as long as there are views."""
        self._allowance.give_back(tensor)
        self._copies.drain()
        self._mappings.pop(tensor.data_ptr()).madvise(mmap.MADV_DONTNEED)

    def copy_in(
        self,
        parts: Sequence[Bytes],
        target: Tensor,
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        address = target.data_ptr()
        places = places_of(parts, target, offsets, are_written=False)
        moves = [
            (address + at, address_of(part), part.nbytes) for part, at in zip(parts, places, strict=True)
        ]
        return self._copy(moves, (target, parts))

    def copy_out(
        self,
        source: Tensor,
        parts: Sequence[Bytes],
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        address = source.data_ptr()
        places = places_of(parts, source, offsets, are_written=True)
        moves = [
            (address_of(part), address + at, part.nbytes) for part, at in zip(parts, places, strict=True)
        ]
        return self._copy(moves, (source, parts))

    def _copy(self, moves: list[tuple[int, int, int]], kept: tuple[Any, ...]) -> Event:
        # There is nothing that a copy would have to wait for: compute has been done by now, and the copies
        # before it are made before it.
        copy = _Copy(moves, kept)
        self._copies.put(copy)
        return copy

    def host_buffer(self, num_bytes: int) -> Bytes:
        """RAM like any other."""
        return np.empty(num_bytes, np.uint8)

    def record(self) -> Event:
        """It has happened: compute is synchronous."""
        return _Done()

    def compute_waits_for(self, event: Event) -> None:
        """Waits, for the same reason."""
        if isinstance(event, _Copy):
            event.wait(None)

    def pin(self, array: Bytes) -> None:
        """Nothing to be done."""

    def unpin(self, array: Bytes) -> None:
        """Nothing to be undone."""

    def link_probe(self, num_bytes: int) -> float:
        """GB/s of one thread that copies in RAM."""
        return measure_link(self, num_bytes)

    def close(self) -> None:
        """Ends the copying thread when its copies are made."""
        self._copies.close()
