"""A ring of work slots in shared memory: one process submits, one completes, no message passes.

::

    segment:  | submitted u64 | completed u64 | in use u64 | slot 0 | slot 1 | ...   slot: the caller's arrays

    client                                     server
    ------                                     ------
    fill slot (n mod num_slots)
    submitted = n + 1, wake        ------->    sees submitted > completed
                                               works in the slot
    sees completed > n             <-------    completed = n + 1, wake
    reads the results of the slot

The two counters only grow, and each has a single writer. A slot belongs to the client until `submitted`
passes it and again once `completed` has; in between it is the server's. Slots complete in order.

`in use` is set by the client while more submissions are to be expected: a server that is asked to leave waits
for it to be 0.

The counters are plain aligned 64-bit stores and loads through a memoryview. That is enough on x86-64, where
stores become visible in program order; the package refuses to start elsewhere (see `shared.process`).

Waiting: spin for `spin_s` looking at the counter, which answers within 2 us, then sleep in the kernel until
woken. Spinning only pays where the other side has a core of its own, so it is chosen from the CPU count.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shared import futex
from shared.arena import Segment, SegmentDescriptor, SegmentLayout
from shared.errors import GenerationError, StepStalledError

_log = logging.getLogger(__name__)

# A sleeper looks up at least this often, in case the peer died between two looks.
_MAX_SLEEP_S = 0.05
_SUBMITTED, _COMPLETED, _IN_USE = "submitted", "completed", "in_use"
_ERROR_BYTES = 512

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RingShape:
    """The arrays of one slot and the number of slots; both sides must build the same one."""

    num_slots: int
    arrays: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]

    def layout(self) -> SegmentLayout:
        """The layout of the whole segment. Each counter has a cache line of its own."""
        fields: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            _SUBMITTED: (np.uint64, (8,)),
            _COMPLETED: (np.uint64, (8,)),
            _IN_USE: (np.uint64, (8,)),
        }
        for slot in range(self.num_slots):
            for name, (dtype, shape) in self.arrays.items():
                fields[f"{slot}.{name}"] = (dtype, shape)
            fields[f"{slot}.error"] = (np.uint8, (_ERROR_BYTES,))
        return SegmentLayout(fields)


class _Counter:
    """One of the two counters: read, write and wake, wait."""

    def __init__(self, segment: Segment, name: str) -> None:
        # An element of a memoryview reads faster than one of a numpy array: 0.8 against 1.3 us a round trip.
        self._cell = segment.arrays[name].data.cast("B").cast("Q")
        self._address = segment.address(name)

    @property
    def value(self) -> int:
        return self._cell[0]

    def publish(self, value: int) -> None:
        self._cell[0] = value
        futex.wake(self._address)

    def sleep_while(self, value: int) -> None:
        futex.wait(self._address, value & 0xFFFFFFFF, _MAX_SLEEP_S)

    def wake(self) -> None:
        futex.wake(self._address)


class _RingSide:
    def __init__(self, shape: RingShape, segment: Segment, spin_s: float) -> None:
        self._num_slots = shape.num_slots
        self._spin_s = spin_s
        self._segment = segment
        self._submitted = _Counter(segment, _SUBMITTED)
        self._completed = _Counter(segment, _COMPLETED)
        self._slots: list[Arrays] = [
            {name: segment.arrays[f"{slot}.{name}"] for name in [*shape.arrays, "error"]}
            for slot in range(shape.num_slots)
        ]

    def _spin(self, is_done: Callable[[], bool]) -> bool:
        if self._spin_s <= 0:
            return is_done()
        limit = time.perf_counter() + self._spin_s
        while not is_done():
            if time.perf_counter() > limit:
                return False
        return True


class RingClient(_RingSide):
    """The submitting side: makes the segment, fills slots, waits for results."""

    def __init__(self, shape: RingShape, purpose: str, owner_incarnation: str, *, spin_s: float) -> None:
        """Raises ResourceError where shared memory does not suffice."""
        super().__init__(shape, Segment.create(purpose, owner_incarnation, shape.layout()), spin_s)
        self._failure: GenerationError | None = None

    @property
    def descriptor(self) -> SegmentDescriptor:
        """What the server needs to attach."""
        return self._segment.descriptor

    def next_slot(self, timeout_s: float, peer: str) -> Arrays:
        """The slot that the next `submit` hands over, to be filled now.

        Normally free at once. After a step that failed half-way the server may still be busy with it; raises
        as `wait` does where it does not become free.
        """
        number = self._submitted.value
        if number >= self._num_slots:
            self._wait_for(number - self._num_slots, timeout_s, peer)
        return self._slots[number % self._num_slots]

    def submit(self) -> int:
        """Hands the filled slot over; returns the ticket to wait for."""
        ticket = self._submitted.value
        self._submitted.publish(ticket + 1)
        return ticket

    def wait(self, ticket: int, timeout_s: float, peer: str) -> Arrays:
        """Waits until the submission is done and returns its slot, valid until the slot is next filled.

        Raises the error given to `fail` once it was called, StepStalledError after `timeout_s`, and
        SlotError where the server reported a failure for this slot.
        """
        self._wait_for(ticket, timeout_s, peer)
        slot = self._slots[ticket % self._num_slots]
        if slot["error"][0]:
            raise SlotError(bytes(slot["error"]).split(b"\0", 1)[0].decode("utf-8", "replace"))
        return slot

    def _wait_for(self, ticket: int, timeout_s: float, peer: str) -> None:
        if self._spin(lambda: self._completed.value > ticket):
            return
        deadline = time.monotonic() + timeout_s
        while (completed := self._completed.value) <= ticket:
            if self._failure is not None:
                # A fresh one each time: its traceback has the frames of the whole step, and the ring shall
                # not keep those, and their memory, alive.
                raise copy.copy(self._failure)
            if time.monotonic() > deadline:
                raise StepStalledError(
                    f"the {peer} has not answered for {timeout_s:g} s; "
                    "raise --watchdog-s if the machine is that slow"
                )
            # The value just looked at: an answer that came since then would otherwise be slept through.
            self._completed.sleep_while(completed)

    def set_in_use(self, is_in_use: bool) -> None:
        """Tells the server whether more submissions are to be expected soon."""
        self._segment.arrays[_IN_USE][0] = is_in_use

    def fail(self, failure: GenerationError) -> None:
        """Makes every wait, the running one too, end with `failure`. Called from any thread."""
        self._failure = failure
        self._completed.wake()

    def close(self) -> None:
        """Removes the segment."""
        self._segment.close()


class RingServer(_RingSide):
    """The completing side: attaches to a client's ring and serves its slots in order."""

    def __init__(self, shape: RingShape, descriptor: SegmentDescriptor, *, spin_s: float) -> None:
        """Raises ProtocolError where the segment is gone or laid out in another way."""
        super().__init__(shape, Segment.attach(descriptor, shape.layout()), spin_s)
        self._stopped = threading.Event()

    def serve(self, work: Callable[[Arrays], None]) -> None:
        """Calls `work` on every submitted slot until `stop`. An exception of `work` fails its slot only."""
        while not self._stopped.is_set():
            number = self._completed.value

            def is_submitted(number: int = number) -> bool:
                return self._submitted.value > number

            if not self._spin(is_submitted):
                self._submitted.sleep_while(number)
                continue
            slot = self._slots[number % self._num_slots]
            failure = b""
            try:
                work(slot)
            except Exception as error:
                _log.exception("the work of one slot failed")
                # "replace", because file names in errors need not be valid text.
                failure = f"{type(error).__name__}: {error}".encode(errors="replace")[: _ERROR_BYTES - 1]
            slot["error"][: len(failure)] = np.frombuffer(failure, np.uint8)
            slot["error"][len(failure) :] = 0
            self._completed.publish(number + 1)

    @property
    def is_in_use(self) -> bool:
        """Whether the client expects more of this ring, or waits for it."""
        is_open = self._submitted.value > self._completed.value
        return is_open or bool(self._segment.arrays[_IN_USE][0])

    def stop(self) -> None:
        """Makes `serve` return soon. Called from any thread."""
        self._stopped.set()
        self._submitted.wake()

    def close(self) -> None:
        """Lets go of the client's segment."""
        self._segment.close()


class SlotError(GenerationError):
    """The server could not do the work of one slot; the text says why."""

    default_code = "worker_error"
