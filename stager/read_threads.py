"""Reads by threads, where the kernel has no io_uring or a container's profile forbids it.

Each thread has a desk: two words, what state it is in and the result, and what is to be read. Whoever gives
the orders writes a desk and wakes its thread; the thread reads, writes the result, counts it in a word that
all of them share, and wakes whoever waits there. No desk is touched by two sides at once.
"""

import functools
import threading
from collections.abc import Callable

import numpy as np

from shared import futex
from shared.native.memory import (
    EVERYONE,
    fetch_add,
    futex_wait_shared,
    futex_wake_shared,
    load_shared,
    store,
    store_shared,
    system_call,
)
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel, jitable

_PREAD = 17  # the system call's number on x86-64
_LONGEST_SLEEP_NS = 1_000_000_000
_IDLE, _ORDERED, _READ, _CLOSED = range(4)

DESK = fields("state", "result", "file", "offset", "address", "num_bytes")
THREADS = fields("num_arrived", "desks", "longest_wait_ns")
"""The first word is the one that arrivals are counted in, and waited for."""
_desk_at = reader(DESK)
_threads_at = reader(THREADS)
_DESK_BYTES = DESK.itemsize


def _work(threads: int, number: int) -> None:
    desk = _desk_at(_threads_at(threads).desks + number * _DESK_BYTES)
    state_at = _threads_at(threads).desks + number * _DESK_BYTES
    while True:
        state = load_shared(state_at)
        if state == _CLOSED:
            return
        if state != _ORDERED:
            futex_wait_shared(state_at, state, _LONGEST_SLEEP_NS)
            continue
        desk.result = system_call(_PREAD, desk.file, desk.address, desk.num_bytes, desk.offset, 0, 0)
        store_shared(state_at, _READ)
        fetch_add(threads, 1)
        futex_wake_shared(threads, EVERYONE)


@functools.cache
def _work_kernel() -> Callable[[int, int], None]:
    return compile_kernel(_work, "read_at_desk", INTEGER, INTEGER)


class ReadThreads:
    """Some threads and their desks."""

    def __init__(self, num_threads: int, longest_wait_s: float) -> None:
        """Raises RuntimeError where there can be no more threads."""
        self._desks = np.zeros(num_threads, DESK)
        self._record = record(THREADS, desks=self._desks, longest_wait_ns=round(longest_wait_s * 1e9))
        self.address = address_of(self._record)
        """Of its THREADS, for native code."""
        work = _work_kernel()
        self._threads = [
            threading.Thread(target=work, args=(self.address, number), name=f"read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        num_started = 0
        try:
            for thread in self._threads:
                thread.start()
                num_started += 1
        except RuntimeError:
            del self._threads[num_started:]
            self.close()
            raise

    def close(self) -> None:
        """Ends the threads. No read may be in flight."""
        self._desks["state"] = _CLOSED
        for number in range(len(self._desks)):
            futex.wake(address_of(self._desks) + number * _DESK_BYTES)
        for thread in self._threads:
            thread.join()


@jitable
def order_read(threads: int, number: int, file: int, offset: int, address: int, num_bytes: int) -> None:
    """Native: gives the thread of that number, which is idle, a read."""
    state_at = _threads_at(threads).desks + number * _DESK_BYTES
    desk = _desk_at(state_at)
    desk.file = file
    desk.offset = offset
    desk.address = address
    desk.num_bytes = num_bytes
    store_shared(state_at, _ORDERED)
    futex_wake_shared(state_at, 1)


@jitable
def await_arrivals(threads: int, num_seen: int) -> int:
    """Native: waits until more reads than `num_seen` have come since the start, not for ever; how many."""
    present = load_shared(threads)
    if present == num_seen:
        futex_wait_shared(threads, present, _threads_at(threads).longest_wait_ns)
        present = load_shared(threads)
    return present


@jitable
def take_arrival(threads: int, number: int, to: int) -> bool:
    """Native: takes the result of the thread of that number to the word at `to`; whether there is one."""
    state_at = _threads_at(threads).desks + number * _DESK_BYTES
    if load_shared(state_at) != _READ:
        return False
    store(to, _desk_at(state_at).result)
    store_shared(state_at, _IDLE)
    return True
