"""Reads from the model's files, many at a time: what makes a disk fast, and what a page fault never does.

::

    native: run_reads(queue, reads, num_reads, on_read, params)

starts as many of the reads as the queue is deep, and another whenever one has ended; `on_read` is a task that
is told of each, in the order they end. Behind it is the kernel's io_uring, or threads where there is none.
Files are opened for direct I/O, which moves pages between disk and buffer and leaves the page cache alone, or
through the page cache.

What a read needs besides luck is done here: one that brings less than it should is continued, one behind the
end of a file that was truncated meanwhile fails, failures and delays can be injected, and every completion is
noted as progress, so that a watchdog can tell a slow disk from a dead one. Counts are kept in the queue's
record, for whoever shows them.

One thread at a time may use a queue.
"""

import errno
import functools
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFileError, ResourceError
from shared.native.memory import call_task, clock_ns, integers_at, load_shared, nap, store_shared
from shared.native.records import Record, fields, reader, record
from shared.native.ring import OUTSTANDING, PROGRESS
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel, compile_task, jitable
from stager.io_uring import IoUring, enter, pop_completion, push_read
from stager.read_threads import ReadThreads, await_arrivals, order_read, take_arrival

PAGE_BYTES = 4096
"""What reads of rows are rounded to. Direct I/O needs the disk's sectors at least, 512 or 4096 bytes."""
BUFFER_BYTES = 4 * PAGE_BYTES
"""Of a read that does not say where its bytes go."""

READ = fields(
    "file",  # descriptor
    "offset",
    "num_bytes",
    "needed",  # that many of them must be there: the last page of a file may be shorter
    "address",  # where they go; 0 for a buffer of the queue's, which is valid while `on_read` runs
    # Written before `on_read`.
    "result",  # 0, or a negative errno
    "num_calls",  # reads it took, more than one where some brought less than they should
    "num_brought",  # bytes
)
"""One read. For direct I/O offset, length and address are multiples of the disk's sectors."""

_URING, _THREADS = range(2)

QUEUE = fields(
    "kind",
    "backend",  # URING or THREADS
    "depth",
    "slots",  # _SLOT [depth]: reads in flight
    "buffers",  # BUFFER_BYTES each
    "free",  # i64 [depth]: numbers of free slots
    "num_free",
    "num_arrived",  # that threads have reported
    "num_held",  # arrivals that an injected delay holds back
    "completion",  # two words
    "status",  # address of words of `RingStatus`
    "interrupt",  # address of a word that is not 0 when reading is to end
    "run",  # the task that does it all
    "on_read",  # what it tells of reads, and the params of that
    "on_read_params",
    # Injected, for tests and to see what a bad disk does.
    "delay_ns",
    "fail_every",  # this many reads fail with EIO once; 0 for none
    "shorten_every",  # this many reads bring half of what they should; 0 for none
    # Counted since the start.
    "num_reads",
    "num_done",  # reads that ended in whatever way, each part of one that was continued
    "num_bytes",
    "num_failures",
    "busy_ns",  # time in which a read was in flight
    "depth_ns",  # the same, times the number of reads in flight
    "changed_ns",
)
_SLOT = fields("read", "done_bytes", "due_ns", "is_held", "result")
_queue_at = reader(QUEUE)
_read_at = reader(READ)
_slot_at = reader(_SLOT)
READ_BYTES, _SLOT_BYTES = READ.itemsize, _SLOT.itemsize

# A wait for the kernel or the threads ends at least this often, to look at `interrupt`.
_LONGEST_WAIT_S = 0.05
# Of the reads in flight, those that are waited for at once: a call for each would cost more than the read.
_SHARE_AWAITED = 2
_MAX_NAP_NS = 1_000_000
_END_OF_TIME_NS = 1 << 62
MOST_THREADS = 256
"""More would only wait for each other."""
_EIO, _ENODATA, _ECANCELED, _EINTR, _EAGAIN = (
    -number for number in (errno.EIO, errno.ENODATA, errno.ECANCELED, errno.EINTR, errno.EAGAIN)
)


@jitable
def _account(queue_address: int, now: int) -> None:
    """Adds the time since the last change of the number of reads in flight."""
    queue = _queue_at(queue_address)
    in_flight = queue.depth - queue.num_free
    if in_flight > 0:
        queue.busy_ns += now - queue.changed_ns
        queue.depth_ns += (now - queue.changed_ns) * in_flight
    queue.changed_ns = now


@jitable
def _start(queue_address: int, number: int) -> None:
    """Starts what is left of a slot's read."""
    queue = _queue_at(queue_address)
    slot = _slot_at(queue.slots + number * _SLOT_BYTES)
    read = _read_at(slot.read)
    offset, num_bytes = read.offset + slot.done_bytes, read.num_bytes - slot.done_bytes
    address = read.address if read.address != 0 else queue.buffers + number * BUFFER_BYTES
    slot.due_ns = clock_ns() + queue.delay_ns if queue.delay_ns > 0 else 0
    slot.is_held = 0
    queue.num_reads += 1
    read.num_calls += 1
    if queue.kind == _URING:
        push_read(queue.backend, read.file, offset, address + slot.done_bytes, num_bytes, number)
    else:
        order_read(queue.backend, number, read.file, offset, address + slot.done_bytes, num_bytes)


@jitable
def _result_of(queue_address: int, number: int, brought: int) -> int:
    """What becomes of a slot's read that brought so many bytes, or failed: 1 where it goes on, otherwise its
    end, 0 or a negative errno."""
    queue = _queue_at(queue_address)
    slot = _slot_at(queue.slots + number * _SLOT_BYTES)
    read = _read_at(slot.read)
    if brought in (_EINTR, _EAGAIN):
        _start(queue_address, number)
        return 1
    queue.num_done += 1
    if queue.fail_every > 0 and queue.num_done % queue.fail_every == 0:
        return _EIO
    if brought < 0:
        return brought
    if queue.shorten_every > 0 and queue.num_done % queue.shorten_every == 0 and brought > PAGE_BYTES:
        brought = brought // 2
    queue.num_bytes += brought
    read.num_brought += brought
    if slot.done_bytes + brought >= read.needed:
        return 0
    # Direct I/O goes on at a page only.
    whole = (slot.done_bytes + brought) // PAGE_BYTES * PAGE_BYTES
    if brought == 0 or whole == slot.done_bytes:
        return _ENODATA
    slot.done_bytes = whole
    _start(queue_address, number)
    return 1


@jitable
def _finish(queue_address: int, number: int, on_read: int, params: int) -> int:
    """Ends a slot's read and tells of it, or lets it go on; how many have ended."""
    queue = _queue_at(queue_address)
    slot = _slot_at(queue.slots + number * _SLOT_BYTES)
    result = _result_of(queue_address, number, slot.result)
    if result > 0:
        return 0
    read = _read_at(slot.read)
    read.result = result
    queue.num_failures += 1 if result < 0 else 0
    address = read.address if read.address != 0 else queue.buffers + number * BUFFER_BYTES
    # Before anybody is told: who is woken by that passes the progress on.
    store_shared(queue.status + PROGRESS, load_shared(queue.status + PROGRESS) + 1)
    call_task(on_read, params, slot.read, address, 0)
    _account(queue_address, clock_ns())
    integers_at(queue.free)[queue.num_free] = number
    queue.num_free += 1
    return 1


@jitable
def _arrive(queue_address: int, number: int, result: int, on_read: int, params: int) -> int:
    """Takes the result of a slot's read, now or when its injected delay is over; how many have ended."""
    queue = _queue_at(queue_address)
    slot = _slot_at(queue.slots + number * _SLOT_BYTES)
    slot.result = result
    if slot.due_ns > 0 and slot.due_ns > clock_ns():
        slot.is_held = 1
        queue.num_held += 1
        return 0
    return _finish(queue_address, number, on_read, params)


@jitable
def _release_held(queue_address: int, on_read: int, params: int) -> int:
    """Ends the reads whose delay is over, or all of them when it is time to end; how many have ended."""
    queue = _queue_at(queue_address)
    now, num_ended = clock_ns(), 0
    if load_shared(queue.interrupt) != 0:
        now = _END_OF_TIME_NS
    for number in range(queue.depth):
        slot = _slot_at(queue.slots + number * _SLOT_BYTES)
        if slot.is_held != 0 and slot.due_ns <= now:
            slot.is_held = 0
            queue.num_held -= 1
            num_ended += _finish(queue_address, number, on_read, params)
    return num_ended


@jitable
def _nap(queue_address: int) -> None:
    """Sleeps until the next delay is over, or until it is time to look again."""
    queue = _queue_at(queue_address)
    now = clock_ns()
    due = now + _MAX_NAP_NS
    for number in range(queue.depth):
        slot = _slot_at(queue.slots + number * _SLOT_BYTES)
        if slot.is_held != 0:
            due = min(due, slot.due_ns)
    nap(max(0, due - now))


@jitable
def _collect(queue_address: int, on_read: int, params: int) -> int:
    """Waits for arrivals; how many reads have ended."""
    queue = _queue_at(queue_address)
    num_ended = 0
    num_open = queue.depth - queue.num_free - queue.num_held
    # What is held back is due soon: only what is there is taken then.
    num_awaited = 0 if queue.num_held > 0 else (num_open + _SHARE_AWAITED - 1) // _SHARE_AWAITED
    if queue.kind == _URING:
        if enter(queue.backend, num_awaited) < 0:
            # What the kernel has begun may still write into buffers: nobody may go on without it.
            _nap(queue_address)
        while pop_completion(queue.backend, queue.completion):
            tag, result = integers_at(queue.completion)[0], integers_at(queue.completion)[1]
            num_ended += _arrive(queue_address, tag, result, on_read, params)
    else:
        if num_awaited > 0:
            queue.num_arrived = await_arrivals(queue.backend, queue.num_arrived)
        for number in range(queue.depth):
            if take_arrival(queue.backend, number, queue.completion):
                result = integers_at(queue.completion)[0]
                num_ended += _arrive(queue_address, number, result, on_read, params)
    if queue.num_held > 0:
        num_ended += _release_held(queue_address, on_read, params)
        if num_ended == 0:
            _nap(queue_address)
    return num_ended


def _run_reads(params: int, reads: int, num_reads: int, scratch: int) -> None:
    """Params QUEUE; see `run_reads`. A task, so that it is compiled once for all who call it."""
    queue = _queue_at(params)
    on_read, on_read_params = queue.on_read, queue.on_read_params
    num_started = num_ended = 0
    queue.changed_ns = clock_ns()
    while num_ended < num_reads:
        if load_shared(queue.interrupt) != 0:
            while num_started < num_reads:
                read_address = reads + num_started * READ_BYTES
                read = _read_at(read_address)
                read.result = _ECANCELED
                read.num_calls = read.num_brought = 0
                call_task(on_read, on_read_params, read_address, 0, 0)
                num_started += 1
                num_ended += 1
        _account(params, clock_ns())
        while num_started < num_reads and queue.num_free > 0:
            queue.num_free -= 1
            number = integers_at(queue.free)[queue.num_free]
            slot = _slot_at(queue.slots + number * _SLOT_BYTES)
            slot.read = reads + num_started * READ_BYTES
            _read_at(slot.read).num_calls = 0
            _read_at(slot.read).num_brought = 0
            slot.done_bytes = 0
            _start(params, number)
            num_started += 1
        store_shared(queue.status + OUTSTANDING, num_reads - num_ended)
        if num_ended < num_reads:
            num_ended += _collect(params, on_read, on_read_params)
        call_task(on_read, on_read_params, 0, 0, 0)
    store_shared(queue.status + OUTSTANDING, 0)


@jitable
def run_reads(queue_address: int, reads: int, num_reads: int, on_read: int, params: int) -> None:
    """Native: does all of these READs, which lie one after the other. `on_read` is called with `params`, the
    address of a READ that has ended, and that of its bytes, once for each; and with two zeros whenever some
    have ended, for what needs no doing after every single one.

    When `interrupt` is set, those that were not started end with ECANCELED; those in flight are waited for.
    """
    queue = _queue_at(queue_address)
    queue.on_read = on_read
    queue.on_read_params = params
    call_task(queue.run, queue_address, reads, num_reads, 0)


def _run(queue_address: int, reads: int, num_reads: int, on_read: int, params: int) -> None:
    run_reads(queue_address, reads, num_reads, on_read, params)


def _note_nothing(params: int, read: int, data: int, scratch: int) -> None:
    """The result is in the READ."""


@functools.cache
def _note_nothing_task() -> int:
    return compile_task(_note_nothing, "note_no_read")


@functools.cache
def _run_reads_task() -> int:
    return compile_task(_run_reads, "run_queued_reads")


@functools.cache
def _run_kernel() -> Callable[[int, int, int, int, int], None]:
    return compile_kernel(_run, "run_reads", *5 * (INTEGER,))


class Backend(IntEnum):
    """What does the reads."""

    IO_URING = _URING
    THREADS = _THREADS


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected into every queue, for tests and to see what a bad disk does."""

    delay_s: float = 0.0
    fail_every: int = 0
    shorten_every: int = 0


NO_FAULTS = Faults()


class ReadQueue:
    """A queue for one thread."""

    def __init__(self, depth: int, faults: Faults = NO_FAULTS, backend: Backend | None = None) -> None:
        """For `depth` reads at a time; by io_uring where that is allowed, else by threads, MOST_THREADS at
        most, unless `backend` says which. Raises ResourceError where neither is to be had."""
        self._backend, self.backend = _open_backend(depth, backend)
        depth = min(depth, MOST_THREADS) if self.backend is Backend.THREADS else depth
        self.depth = depth
        # Page-aligned, as direct I/O wants it.
        self._buffers = mmap.mmap(-1, depth * BUFFER_BYTES)
        self._buffer_view = np.frombuffer(self._buffers, np.uint8)
        self._slots = np.zeros(depth, _SLOT)
        self._free = np.arange(depth, dtype=np.int64)
        self._completion = np.zeros(2, np.int64)
        self._own_words = np.zeros(8, np.int64)
        self._record = record(
            QUEUE,
            kind=int(self.backend),
            backend=self._backend.address,
            depth=depth,
            slots=self._slots,
            buffers=self._buffer_view,
            free=self._free,
            num_free=depth,
            completion=self._completion,
            run=_run_reads_task(),
            status=self._own_words,
            interrupt=address_of(self._own_words) + 8 * (len(self._own_words) - 1),
            delay_ns=round(faults.delay_s * 1e9),
            fail_every=faults.fail_every,
            shorten_every=faults.shorten_every,
        )
        self.address = address_of(self._record)
        """Of its QUEUE, for native code."""

    def report_to(self, status: int, interrupt: int) -> None:
        """From now on progress is noted in the words at `status` (`RingStatus`), and the word at `interrupt`
        ends reading. They must outlive what is read."""
        self._record["status"], self._record["interrupt"] = status, interrupt

    def run(self, reads: Record, on_read: int | None = None, params: int = 0) -> None:
        """Does these READs, [num_reads]; how each ended is in its `result`. The task `on_read` is told of
        each as `run_reads` says."""
        on_read = _note_nothing_task() if on_read is None else on_read
        _run_kernel()(self.address, address_of(reads), len(reads), on_read, params)

    def interrupt(self) -> None:
        """Ends what is being read, unless `report_to` gave that to someone else. Called from any thread."""
        self._own_words[-1] = 1

    @property
    def counts(self) -> "ReadCounts":
        """What it has done since the start."""
        values = self._record[0]
        return ReadCounts(
            num_reads=int(values["num_reads"]),
            num_bytes=int(values["num_bytes"]),
            num_failures=int(values["num_failures"]),
            busy_s=int(values["busy_ns"]) * 1e-9,
            depth_s=int(values["depth_ns"]) * 1e-9,
        )

    def close(self) -> None:
        """Lets everything go. Nothing may be reading."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """`busy_s` is the time in which a read was in flight, `depth_s` the same times the number in flight:
    their quotient is the mean depth."""

    num_reads: int
    num_bytes: int
    num_failures: int
    busy_s: float
    depth_s: float


def _open_backend(depth: int, wanted: Backend | None) -> tuple[IoUring | ReadThreads, Backend]:
    refusal = ""
    if wanted is not Backend.THREADS:
        try:
            return IoUring(depth, _LONGEST_WAIT_S), Backend.IO_URING
        except OSError as error:
            # No such thing, a profile that forbids it, or a limit of locked memory, which older kernels count
            # it by.
            refusal = f"io_uring: {error.strerror or error}; "
            if wanted is Backend.IO_URING:
                raise ResourceError(f"{refusal}lower --io-depth, now {depth}") from None
    try:
        return ReadThreads(min(depth, MOST_THREADS), _LONGEST_WAIT_S), Backend.THREADS
    except RuntimeError as error:
        raise ResourceError(
            f"{refusal}{error}, of {depth} that read files; lower --io-depth, or raise the limit of threads"
        ) from None


def open_for_reading(path: Path, *, direct: bool) -> int:
    """A descriptor of a model's file. `direct` leaves the page cache alone; otherwise single pages are read
    through it. Raises OSError where the file system has no direct I/O, and ModelFileError where the file is
    gone."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: the model file is gone") from None
    if not direct:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def open_model_file(path: Path) -> tuple[int, bool]:
    """A descriptor for direct I/O where there is any, and whether it is that. Raises ModelFileError."""
    try:
        return open_for_reading(path, direct=True), True
    except OSError:
        # Some file systems (older tmpfs) refuse it.
        return open_for_reading(path, direct=False), False


def reads_of(
    file: int, ranges: NDArray[np.int64], needed: NDArray[np.int64], addresses: NDArray[np.int64] | int = 0
) -> Record:
    """READs of ranges [num_reads, 2], offsets and lengths, of one file."""
    reads = np.zeros(len(ranges), READ)
    values: Mapping[str, object] = {
        "file": file,
        "offset": ranges[:, 0],
        "num_bytes": ranges[:, 1],
        "needed": needed,
        "address": addresses,
    }
    for name, value in values.items():
        reads[name] = value
    return reads
