"""A ring of work slots in shared memory: one process submits, one completes, no message passes.

::

    segment:  | submitted | completed | server sleeps | client sleeps | in use | status | slot 0 | ... |
    common | slot:     | the caller's arrays | error |                                      the words are u64

    client                                     server
    ------                                     ------
    fill slot (n mod num_slots)
    submitted = n + 1, wake        ------->    sees submitted > completed
                                               works in the slot
    sees completed > n             <-------    completed = n + 1, wake
    reads the results of the slot

The two counters only grow, and each has a single writer. A slot belongs to the client until `submitted`
passes it and again once `completed` has; in between it is the server's. Slots complete in order.

Each side says in a word of its own when it sleeps in the kernel, so that the other one need not wake it
otherwise (`shared.native.ring`, which is also how machine code serves and submits; both ways may take turns,
on either side).

While the server works on a slot it notes in `status` how it gets on (`shared.native.ring.RingStatus`): a
client gives a wait up only after a time in which nothing was noted.

`in use` is set by the client while more submissions are to be expected: a server that is asked to leave waits
for it to be 0.

In Python the counters are plain aligned 64-bit stores and loads through a memoryview. That is enough on
x86-64, where stores become visible in program order; the package refuses to start elsewhere (see
`shared.process`).

Waiting: spin for `spin_s` looking at the counter, which answers within 2 us, then sleep in the kernel until
woken. Spinning only pays where the other side has a core of its own, so it is chosen from the CPU count.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shared import futex
from shared.arena import Segment, SegmentDescriptor, SegmentLayout
from shared.errors import GenerationError, StepStalledError
from shared.native.records import Record, record
from shared.native.ring import INTERRUPT, RING, RingStatus, serve_kernel
from shared.native.task import address_of

_log = logging.getLogger(__name__)

# A sleeper looks up at least this often, in case the peer died between two looks.
_MAX_SLEEP_S = 0.05
_SUBMITTED, _COMPLETED, _IN_USE, _STATUS = "submitted", "completed", "in_use", "status"
_SERVER_SLEEPS, _CLIENT_SLEEPS = "server_sleeps", "client_sleeps"
_ERROR = "error"
_COMMON = "common"
_ERROR_BYTES = 512
# In the error of a slot: its code comes before this, where it has one.
_CODE_ENDS = "\x1f"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RingShape:
    """The arrays of one slot and the number of slots; both sides must build the same one."""

    num_slots: int
    arrays: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]
    common: Mapping[str, tuple[DTypeLike, tuple[int, ...]]] = field(default_factory=dict)
    """Arrays that there is one of, whatever the slot. Whose they are when, the shape's maker says."""

    def layout(self) -> SegmentLayout:
        """The layout of the whole segment. Each counter has a cache line of its own."""
        fields: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            _SUBMITTED: (np.uint64, (8,)),
            _COMPLETED: (np.uint64, (8,)),
            _SERVER_SLEEPS: (np.uint64, (8,)),
            _CLIENT_SLEEPS: (np.uint64, (8,)),
            _IN_USE: (np.uint64, (8,)),
            _STATUS: (np.int64, (8,)),
        }
        for slot in range(self.num_slots):
            for name, (dtype, shape) in self.arrays.items():
                fields[f"{slot}.{name}"] = (dtype, shape)
            fields[f"{slot}.{_ERROR}"] = (np.uint8, (_ERROR_BYTES,))
        for name, described in self.common.items():
            fields[f"{_COMMON}.{name}"] = described
        return SegmentLayout(fields)


class _Counter:
    """One of the two counters: read, write and wake, wait."""

    def __init__(self, segment: Segment, name: str, sleeps: str) -> None:
        """`sleeps` is the word of who waits for it."""
        # An element of a memoryview reads faster than one of a numpy array: 0.8 against 1.3 us a round trip.
        self._cell = segment.arrays[name].data.cast("B").cast("Q")
        self._sleeps = segment.arrays[sleeps].data.cast("B").cast("Q")
        self._address = segment.address(name)

    @property
    def value(self) -> int:
        return self._cell[0]

    def publish(self, value: int) -> None:
        self._cell[0] = value
        # Whether anyone sleeps cannot be told here: that would need a fence between the store and the look.
        futex.wake(self._address)

    def sleep_while(self, value: int) -> None:
        self._sleeps[0] = 1
        futex.wait(self._address, value & 0xFFFFFFFF, _MAX_SLEEP_S)
        self._sleeps[0] = 0

    def wake(self) -> None:
        futex.wake(self._address)


class _RingSide:
    def __init__(self, shape: RingShape, segment: Segment, spin_s: float) -> None:
        self.shape = shape
        self._num_slots = shape.num_slots
        self._spin_s = spin_s
        self._segment = segment
        self._submitted = _Counter(segment, _SUBMITTED, _SERVER_SLEEPS)
        self._completed = _Counter(segment, _COMPLETED, _CLIENT_SLEEPS)
        names = [*shape.arrays, _ERROR]
        self._slots: list[Arrays] = [
            {name: segment.arrays[f"{slot}.{name}"] for name in names} for slot in range(shape.num_slots)
        ]
        self.common: Arrays = {name: segment.arrays[f"{_COMMON}.{name}"] for name in shape.common}
        addresses = {name: segment.address(f"0.{name}") for name in names}
        first = min(addresses.values())
        self.offsets = {name: address - first for name, address in addresses.items()}
        """Where the arrays of a slot begin, in bytes from the slot's begin: for native code."""
        slot_bytes = segment.address(f"1.{names[0]}") - first if shape.num_slots > 1 else 0
        self._record = record(
            RING,
            submitted=segment.address(_SUBMITTED),
            completed=segment.address(_COMPLETED),
            server_sleeps=segment.address(_SERVER_SLEEPS),
            client_sleeps=segment.address(_CLIENT_SLEEPS),
            slots=first,
            slot_bytes=slot_bytes,
            num_slots=shape.num_slots,
            error=self.offsets[_ERROR],
            spin_ns=round(spin_s * 1e9),
            status=segment.address(_STATUS),
        )
        self.status: memoryview = segment.arrays[_STATUS].data
        """The words of `RingStatus`: the server's to write, the client's to read."""
        self.status_address = segment.address(_STATUS)
        """Of these words, for native code, as long as the ring is not closed."""
        self.address = address_of(self._record)
        """Of the ring's RING: for native code (`shared.native.ring`), as long as the ring is not closed."""
        self._interrupt = self._record.view(np.int64)[INTERRUPT // 8 :].data

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

    @property
    def has_free_slot(self) -> bool:
        """Whether `next_slot` returns at once."""
        return self._submitted.value - self._completed.value < self._num_slots

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

        Raises the error given to `fail` once it was called, StepStalledError after `timeout_s` in which the
        server has noted no progress, and SlotError where it reported a failure for this slot.
        """
        self._wait_for(ticket, timeout_s, peer)
        slot = self._slots[ticket % self._num_slots]
        if slot[_ERROR][0]:
            raise self._slot_failure(ticket)
        return slot

    def slot(self, ticket: int) -> Arrays:
        """The slot of a submission that is done, valid until it is next filled."""
        return self._slots[ticket % self._num_slots]

    def failure(self, ticket: int, timeout_s: float, peer: str) -> GenerationError:
        """What `wait` would raise, for native code whose wait for a ticket has ended without a result."""
        if self._completed.value > ticket and self._slots[ticket % self._num_slots][_ERROR][0]:
            return self._slot_failure(ticket)
        return copy.copy(self._failure) or self._stalled(timeout_s, peer)

    def _slot_failure(self, ticket: int) -> "SlotError":
        encoded = bytes(self._slots[ticket % self._num_slots][_ERROR])
        code, _, text = encoded.split(b"\0", 1)[0].decode("utf-8", "replace").rpartition(_CODE_ENDS)
        return SlotError(text, code=code or None)

    def _wait_for(self, ticket: int, timeout_s: float, peer: str) -> None:
        if self._spin(lambda: self._completed.value > ticket):
            return
        patience = self._patience(timeout_s, peer)
        while (completed := self._completed.value) <= ticket:
            next(patience)
            # The value just looked at: an answer that came since then would otherwise be slept through.
            self._completed.sleep_while(completed)

    def wait_for_change(self, name: str, seen: int, timeout_s: float, peer: str) -> None:
        """Waits until the first word of a common array, one that the server counts up and wakes for, is no
        longer `seen`. Raises as `wait` does, but for SlotError."""
        word, address = self.common[name].data, self._segment.address(f"{_COMMON}.{name}")
        if self._spin(lambda: word[0] != seen):
            return
        patience = self._patience(timeout_s, peer)
        while word[0] == seen:
            next(patience)
            futex.wait(address, seen & 0xFFFFFFFF, _MAX_SLEEP_S)

    def check(self) -> None:
        """Raises the error given to `fail`, if it was called."""
        if self._failure is not None:
            # A fresh one each time: its traceback has the frames of the whole step, and the ring shall not
            # keep those, and their memory, alive.
            raise copy.copy(self._failure)

    def _patience(self, timeout_s: float, peer: str) -> Iterator[None]:
        """Goes on for as long as there is something to wait for; raises as `wait` does otherwise."""
        deadline, progress = time.monotonic() + timeout_s, self.status[RingStatus.PROGRESS]
        while True:
            self.check()
            if self.status[RingStatus.PROGRESS] != progress:
                deadline, progress = time.monotonic() + timeout_s, self.status[RingStatus.PROGRESS]
            if time.monotonic() > deadline:
                raise self._stalled(timeout_s, peer)
            yield

    def _stalled(self, timeout_s: float, peer: str) -> StepStalledError:
        outstanding = self.status[RingStatus.OUTSTANDING]
        waits_for = f", and none of the {outstanding} reads that it waits for has come" if outstanding else ""
        return StepStalledError(
            f"the {peer} has not answered for {timeout_s:g} s{waits_for}; "
            "raise --watchdog-s if the machine is that slow"
        )

    def is_done(self, ticket: int) -> bool:
        """Whether a submission has been served, well or not."""
        return self._completed.value > ticket

    def describe(self) -> str:
        """What the server is at, as words for the log."""
        num_open = self._submitted.value - self._completed.value
        at = f"works on {num_open} slot{'s' if num_open > 1 else ''}" if num_open else "has nothing to do"
        outstanding = self.status[RingStatus.OUTSTANDING]
        waits = f", waits for {outstanding} reads" if outstanding else ""
        return (
            f"{at}{waits}, {self._completed.value} slots done, {self.status[RingStatus.PROGRESS]} reads done"
        )

    def set_in_use(self, is_in_use: bool) -> None:
        """Tells the server whether more submissions are to be expected soon."""
        self._segment.arrays[_IN_USE][0] = is_in_use

    def fail(self, failure: GenerationError) -> None:
        """Makes every wait, the running one too, end with `failure`. Called from any thread."""
        self._failure = failure
        self._interrupt[0] = 1
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

    def serve(self, work: Callable[[Arrays], None], native: "NativeWork | None" = None) -> None:
        """Calls `work` on every submitted slot until `stop`. An exception of `work` fails its slot only.

        With `native`, slots are served in machine code, and only those that it leaves alone are for `work`.
        """
        while not self._stopped.is_set():
            if native is not None:
                self._serve_natively(native)
                if self._stopped.is_set():
                    return
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
            except GenerationError as error:
                # Worded for whoever asked.
                failure = f"{error.code}{_CODE_ENDS}{error}".encode(errors="replace")[: _ERROR_BYTES - 1]
            except Exception as error:
                _log.exception("the work of one slot failed")
                # "replace", because file names in errors need not be valid text.
                failure = f"{type(error).__name__}: {error}".encode(errors="replace")[: _ERROR_BYTES - 1]
            slot[_ERROR][: len(failure)] = np.frombuffer(failure, np.uint8)
            slot[_ERROR][len(failure) :] = 0
            self._completed.publish(number + 1)

    def _serve_natively(self, native: "NativeWork") -> None:
        """Returns when it is stopped, or where the next slot is for Python."""
        params = native.params(self)
        serve_kernel()(self.address, native.task, address_of(params))

    @property
    def is_in_use(self) -> bool:
        """Whether the client expects more of this ring, or waits for it."""
        is_open = self._submitted.value > self._completed.value
        return is_open or bool(self._segment.arrays[_IN_USE][0])

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to end: work that takes long looks at it."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Makes `serve` return soon. Called from any thread."""
        self._stopped.set()
        self._interrupt[0] = 1
        self._submitted.wake()

    def close(self) -> None:
        """Lets go of the client's segment."""
        self._segment.close()


class NativeWork(Protocol):
    """The work of slots as machine code."""

    task: int
    """The address of a task as `shared.native.ring.serve_kernel` says."""

    def params(self, server: RingServer) -> Record:
        """Its params, as they are now, for the slots of that server; kept alive while it serves."""


class SlotError(GenerationError):
    """The server could not do the work of one slot; the text says why."""

    default_code = "worker_error"
