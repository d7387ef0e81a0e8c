"""The kernel's queue pair for reads: submissions go into one ring in memory that the kernel shares,
completions come back in another, and one system call moves any number of both (io_uring(7)).

Only what reading needs is here: the set-up in Python, and three steps for native code. One thread at a time
may use a queue pair.
"""

import ctypes
import errno
import mmap
import os
import struct

import numpy as np

from shared.native.memory import load, load_word_shared, store, store_word_shared, system_call
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import jitable

# Numbers from the kernel's headers: system calls, flags, the places of its two mappings.
_SETUP, _ENTER = 425, 426
_WITHOUT_INTERRUPTS = 1 << 8
_HAS_ONE_MAPPING, _HAS_TIMED_WAITS = 1 << 0, 1 << 8
_WAIT, _TIMED = 1 << 0, 1 << 3
_OP_READ = 22
_RINGS_AT, _ENTRIES_AT = 0, 0x10000000
# struct io_uring_params: ten words of sizes, flags and features, then for each ring eight words with the
# places of its parts, and an address that is only used in other modes.
_PARAMS = struct.Struct("<10I8IQ8IQ")
_ENTRY_BYTES, _COMPLETION_BYTES = 64, 16
_SIGNAL_MASK_BYTES = 8
# The wait was long enough, or what could not be done will be possible later.
_PASSING = (-errno.ETIME, -errno.EINTR, -errno.EAGAIN, -errno.EBUSY)

URING = fields(
    "descriptor",
    "entries",  # of submissions, 64 bytes each
    "order",  # u32 [num_entries]: which entries are submitted, in order
    "submission_tail",  # addresses of the rings' words
    "submission_mask",  # the mask itself
    "completions",  # 16 bytes each
    "completion_head",
    "completion_tail",
    "completion_mask",
    "num_unsent",  # entries that the kernel has not been told of
    "wait",  # address of what a timed wait is given
)
_uring_at = reader(URING)


class IoUring:
    """One queue pair."""

    def __init__(self, num_entries: int, longest_wait_s: float) -> None:
        """For at most so many reads in flight. Raises OSError where the kernel has none, or forbids it, as
        containers' default profiles do."""
        buffer = ctypes.create_string_buffer(_PARAMS.size)
        descriptor = _set_up(num_entries, buffer, _WITHOUT_INTERRUPTS)
        self._descriptor = descriptor
        try:
            values = _PARAMS.unpack(buffer.raw)
            num_submissions, num_completions, features = values[0], values[1], values[5]
            if not features & _HAS_ONE_MAPPING or not features & _HAS_TIMED_WAITS:
                raise OSError("the kernel's io_uring is older than Linux 5.11")
            (_, submission_tail, submission_mask, _, _, _, order, *_) = values[10:19]
            (_head, completion_tail, completion_mask, _, _, completions, *_) = values[19:28]
            num_bytes = max(order + 4 * num_submissions, completions + _COMPLETION_BYTES * num_completions)
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
            rings = mmap.mmap(descriptor, num_bytes, flags, protection, offset=_RINGS_AT)
            entries = mmap.mmap(
                descriptor, _ENTRY_BYTES * num_submissions, flags, protection, offset=_ENTRIES_AT
            )
        except BaseException:
            os.close(descriptor)
            raise
        self._views = np.frombuffer(rings, np.uint8), np.frombuffer(entries, np.uint8)
        at = address_of(self._views[0])
        self._longest_wait = np.array([0, round(longest_wait_s * 1e9)], np.int64)
        self._wait = np.array([0, _SIGNAL_MASK_BYTES, address_of(self._longest_wait)], np.int64)
        self._record = record(
            URING,
            descriptor=descriptor,
            entries=self._views[1],
            order=at + order,
            submission_tail=at + submission_tail,
            submission_mask=int(self._views[0][submission_mask:].view(np.uint32)[0]),
            completions=at + completions,
            completion_head=at + _head,
            completion_tail=at + completion_tail,
            completion_mask=int(self._views[0][completion_mask:].view(np.uint32)[0]),
            wait=self._wait,
        )
        self.address = address_of(self._record)
        """Of its URING, for native code."""

    def close(self) -> None:
        """Gives it back. No read may be in flight."""
        os.close(self._descriptor)


def _set_up(num_entries: int, params: ctypes.Array[ctypes.c_char], flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    # The flag spares interrupts of the waiting thread and is younger (5.19) than the rest.
    for wanted in (flags, 0):
        params.raw = _PARAMS.pack(0, 0, wanted, *([0] * 25))
        descriptor = libc.syscall(_SETUP, num_entries, params)
        if descriptor >= 0:
            return int(descriptor)
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@jitable
def push_read(uring: int, file: int, offset: int, address: int, num_bytes: int, tag: int) -> None:
    """Native: adds a read; there is room, as no more are in flight than the queue pair was made for."""
    queue = _uring_at(uring)
    tail = load_word_shared(queue.submission_tail)
    place = tail & queue.submission_mask
    entry = queue.entries + place * _ENTRY_BYTES
    store(entry, _OP_READ | file << 32)
    store(entry + 8, offset)
    store(entry + 16, address)
    store(entry + 24, num_bytes)
    store(entry + 32, tag)
    for at in range(40, _ENTRY_BYTES, 8):
        store(entry + at, 0)
    store_word_shared(queue.order + 4 * place, place)
    store_word_shared(queue.submission_tail, tail + 1)
    queue.num_unsent += 1


@jitable
def enter(uring: int, num_awaited: int) -> int:
    """Native: tells the kernel of what was added, and waits until so many reads have completed, not for ever.
    Returns 0, or the negative errno of a failure that is not passing."""
    queue = _uring_at(uring)
    flags = _WAIT | _TIMED if num_awaited > 0 else _WAIT
    size = 24 if num_awaited > 0 else 0
    wait = queue.wait if num_awaited > 0 else 0
    sent = system_call(_ENTER, queue.descriptor, queue.num_unsent, num_awaited, flags, wait, size)
    if sent >= 0:
        queue.num_unsent -= sent
        return 0
    return 0 if sent in _PASSING else sent


@jitable
def pop_completion(uring: int, to: int) -> bool:
    """Native: takes the oldest completion, its tag and result to the two words at `to`; whether there was
    one."""
    queue = _uring_at(uring)
    head = load_word_shared(queue.completion_head)
    if head == load_word_shared(queue.completion_tail):
        return False
    completion = queue.completions + (head & queue.completion_mask) * _COMPLETION_BYTES
    store(to, load(completion))
    result = load_word_shared(completion + 8)
    store(to + 8, result - (1 << 32) if result >= 1 << 31 else result)
    store_word_shared(queue.completion_head, head + 1)
    return True
