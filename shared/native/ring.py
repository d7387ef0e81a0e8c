"""Native: the two sides of a ring (`shared.ring` says what that is) from compiled code.

A ring's record has the addresses of its words and slots. All functions but `serve_kernel` are callable from
compiled code only.

Whoever sleeps on a counter says so in a word of its own, and whoever publishes only makes the system call
that wakes where that word is set. No wake-up is lost::

    sleeper                                   publisher
    -------                                   ---------
    sleeps = 1                                counter = n + 1
    (the kernel locks, which is a fence)      fence
    the kernel compares the counter           looks at sleeps

One of the two sees what the other has stored: either the kernel finds the counter changed and does not put
the sleeper to sleep, or the publisher finds it asleep and wakes it.
"""

import functools
from collections.abc import Callable
from enum import IntEnum

from shared.native.memory import (
    EVERYONE,
    call_task,
    clock_ns,
    fence,
    futex_wait_shared,
    futex_wake_shared,
    load,
    load_shared,
    pause,
    store,
    store_shared,
)
from shared.native.records import fields
from shared.quants.jit import INTEGER, compile_kernel, jitable

RING = fields(
    "submitted",  # address of the counter
    "completed",
    "server_sleeps",  # addresses of the words of those who sleep on them
    "client_sleeps",
    "slots",  # address of the first slot
    "slot_bytes",  # from one slot to the next
    "num_slots",
    "error",  # where a slot has its error, from its begin
    "spin_ns",
    "interrupt",  # not 0: whoever waits returns
    "status",  # address of the server's status words; see `RingStatus`
    "is_done",  # what the work of a slot says of it
)
"""One side of a ring, in the memory of its process."""

SUBMITTED, COMPLETED, SERVER_SLEEPS, CLIENT_SLEEPS = range(0, 32, 8)
SLOTS, SLOT_BYTES, NUM_SLOTS, ERROR, SPIN_NS, INTERRUPT, STATUS, IS_DONE = range(32, RING.itemsize, 8)
"""Byte offsets of the fields of a RING."""

ARRIVED, INTERRUPTED, TIMED_OUT = range(3)
"""How a wait ends."""
FOREVER_NS = 1 << 62
"""More patience than anyone needs."""


class RingStatus(IntEnum):
    """Words that the server writes while it works on a slot, for the client to see that it gets on."""

    PROGRESS = 0
    """Grows with every read that has completed, and with every other wait that has ended."""
    OUTSTANDING = 1
    """Reads that are waited for."""


PROGRESS, OUTSTANDING = (8 * int(word) for word in RingStatus)
"""Byte offsets of the status words."""

# A sleeper looks up at least this often: `interrupt` may be set between its last look and its sleep.
_MAX_SLEEP_NS = 50_000_000
_PAUSES_BETWEEN_CLOCKS = 8


@jitable
def publish(counter: int, value: int, sleeps: int) -> None:
    """Stores the next value of a counter; wakes who sleeps on it according to the word at `sleeps`."""
    store_shared(counter, value)
    fence()
    if load_shared(sleeps) != 0:
        futex_wake_shared(counter, EVERYONE)


@jitable
def await_above(ring: int, counter: int, value: int, sleeps: int, patience_ns: int) -> int:
    """Waits until a counter is above a value: ARRIVED; or INTERRUPTED, or TIMED_OUT when there was no
    progress (`RingStatus`) for so long. What has arrived comes before both."""
    if load_shared(counter) > value:
        return ARRIVED
    started = now = clock_ns()
    while now - started < load(ring + SPIN_NS):
        for _ in range(_PAUSES_BETWEEN_CLOCKS):
            if load_shared(counter) > value:
                return ARRIVED
            pause()
        now = clock_ns()
    status = load(ring + STATUS)
    progress, deadline_ns = load_shared(status + PROGRESS), started + patience_ns
    while True:
        present = load_shared(counter)
        if present > value:
            return ARRIVED
        if load_shared(ring + INTERRUPT) != 0:
            return INTERRUPTED
        now = clock_ns()
        if load_shared(status + PROGRESS) != progress:
            progress, deadline_ns = load_shared(status + PROGRESS), now + patience_ns
        if now > deadline_ns:
            return TIMED_OUT
        store_shared(sleeps, 1)
        futex_wait_shared(counter, present, min(_MAX_SLEEP_NS, deadline_ns - now))
        store_shared(sleeps, 0)


@jitable
def slot_of(ring: int, number: int) -> int:
    """The address of the slot of a submission."""
    return load(ring + SLOTS) + number % load(ring + NUM_SLOTS) * load(ring + SLOT_BYTES)


def _serve(ring: int, task: int, params: int) -> None:
    submitted, completed = load(ring + SUBMITTED), load(ring + COMPLETED)
    while load_shared(ring + INTERRUPT) == 0:
        number = load_shared(completed)
        if await_above(ring, submitted, number, load(ring + SERVER_SLEEPS), FOREVER_NS) != ARRIVED:
            return
        slot = slot_of(ring, number)
        store(ring + IS_DONE, 0)
        call_task(task, params, slot, ring + IS_DONE, 0)
        if load(ring + IS_DONE) == 0:
            return
        # An error's text ends with its first zero.
        store(slot + load(ring + ERROR), 0)
        publish(completed, number + 1, load(ring + CLIENT_SLEEPS))


@functools.cache
def serve_kernel() -> Callable[[int, int, int], None]:
    """`serve(ring, task, params)`: serves slots until `interrupt` is set, or until the task leaves one alone.

    The task is called with its params, the address of a slot, and the address of a word that it writes 1 to
    when it has done the slot's work; otherwise it writes nothing at all. It gets no scratch memory.
    """
    return compile_kernel(_serve, "serve_ring", INTEGER, INTEGER, INTEGER)
