"""A team: a few threads that run programs (`shared.native.program`) in machine code, with their caller.

`Team.run` is one native call that holds no GIL. Every thread of the team executes the same loop::

    take a ticket: the number of a unit of the program
    if the unit's step is not the one at hand: report what was done of that, wait for its end
    compute the unit

Tickets are numbered through the whole program, so a thread that finds its step exhausted already holds its
first unit of the next one, and no counter is ever reset. A step ends when all its *units* are done, not when
all threads say so: a thread that is still asleep, or that the kernel has put aside, delays nobody unless it
has taken a ticket.

The threads wait spinning for a while, then in the kernel (futex). Waking one costs the caller a few
microseconds, and it arrives tens of microseconds later; so only as many are woken as the program's cost is
worth, and a small program runs on the caller alone, without a system call and without an atomic operation.

Words the threads share, each group on cache lines of its own::

    generation                   counted up when a program is there, or the end of the team
    number of parked threads     that sleep until then
    entries, units               the program, constant while it runs
    tickets                      units given out
    completed                    units done
    released                     units of finished steps; waited for between steps and at the end
    number of waiting threads    that sleep until `released`, or the door, changes
    door                         OPEN + number of threads inside the program

The door is why the caller can reuse the words for its next program: a thread enters by adding 1, and leaves
at once where the sum shows that the door is shut. The caller shuts it at the end and waits until nobody is
inside.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.native.memory import (
    EVERYONE,
    call_task,
    clock_ns,
    fetch_add,
    futex_wait,
    futex_wake,
    load,
    load_shared,
    pause,
    store,
)
from shared.native.program import (
    ENTRY_BYTES,
    GRAIN,
    NUM_ITEMS,
    PARAMS,
    STEP_START,
    STEP_STOP,
    STOP_UNIT,
    TASK,
    Program,
    seal_kernel,
)
from shared.native.task import OUTER_SCRATCH_BYTES, SCRATCH_BYTES, address_of, aligned_zeros
from shared.quants.jit import INTEGER, compile_kernel, jitable
from shared.topology import spin_time_s

# Byte offsets of the shared words. 128: the CPU fetches lines in pairs.
_GENERATION = 0
_NUM_PARKED = 128
_ENTRIES = 256
_NUM_UNITS = 264
_IS_CLOSED = 272
_NUM_HELPERS = 280
_IDLE_SPIN_NS = 288
_STEP_SPIN_NS = 296
_CALLER_SCRATCH = 304
_TICKETS = 384
_COMPLETED = 512
_RELEASED = 640
_NUM_WAITING = 768
_DOOR = 896
_TEAM_BYTES = 1024

_OPEN = 1 << 32

_WORTH_WAKING_NS = 50_000
"""Work for which one more sleeping thread is woken, beyond what is done until it arrives, which takes 30 to
60 us."""
_WORTH_SHARING_NS = 8_000
"""Work that is shared with threads that are still awake, which costs about a microsecond."""
_MIN_IDLE_SPIN_NS = 4_000
_MIN_STEP_SPIN_NS = 15_000
"""Where the CPUs are too few to spin on (`shared.topology`): about a unit's length, which the end of a step
usually takes; a sleep and a wake-up would take longer than that."""
_PAUSES_BETWEEN_CLOCKS = 8


@jitable
def _spin(address: int, below: int, limit_ns: int) -> bool:
    """Looks at a word until it is at least `below`; False where it is not within the time."""
    started = clock_ns()
    while True:
        for _ in range(_PAUSES_BETWEEN_CLOCKS):
            if load_shared(address) >= below:
                return True
            pause()
        if clock_ns() - started > limit_ns:
            return False


@jitable
def _await_released(team: int, num_units: int) -> None:
    """Returns when all steps up to that unit are done."""
    address = team + _RELEASED
    if load_shared(address) >= num_units or _spin(address, num_units, load(team + _STEP_SPIN_NS)):
        return
    # Counted before the last look: whoever releases looks at the count after it wrote.
    fetch_add(team + _NUM_WAITING, 1)
    released = load_shared(address)
    while released < num_units:
        futex_wait(address, released)
        released = load_shared(address)
    fetch_add(team + _NUM_WAITING, -1)


@jitable
def _report(team: int, num_done: int, step_stop: int) -> None:
    """Adds to the units done; whoever completes a step releases the next one."""
    if num_done > 0 and fetch_add(team + _COMPLETED, num_done) + num_done == step_stop:
        # An atomic addition, since it must be ordered before the look at the count of waiting threads.
        fetch_add(team + _RELEASED, step_stop - load(team + _RELEASED))
        if load_shared(team + _NUM_WAITING) > 0:
            futex_wake(team + _RELEASED, EVERYONE)


@jitable
def _compute(entry: int, unit: int, scratch: int) -> None:
    """One unit, counted from the first of its entry."""
    grain = load(entry + GRAIN)
    start = unit * grain
    stop = min(start + grain, load(entry + NUM_ITEMS))
    call_task(load(entry + TASK), load(entry + PARAMS), start, stop, scratch)


@jitable
def _work(team: int, scratch: int) -> None:
    """Takes units of the program until none is left."""
    num_units = load(team + _NUM_UNITS)
    entry = load(team + _ENTRIES)
    first_unit = 0
    step_start, step_stop, num_done = 0, 0, 0
    ticket = fetch_add(team + _TICKETS, 1)
    while ticket < num_units:
        while ticket >= load(entry + STOP_UNIT):
            first_unit = load(entry + STOP_UNIT)
            entry += ENTRY_BYTES
        if load(entry + STEP_START) != step_start:
            _report(team, num_done, step_stop)
            step_start, num_done = load(entry + STEP_START), 0
            _await_released(team, step_start)
        step_stop = load(entry + STEP_STOP)
        _compute(entry, ticket - first_unit, scratch)
        num_done += 1
        ticket = fetch_add(team + _TICKETS, 1)
    _report(team, num_done, step_stop)


@jitable
def _run_alone(entries: int, num_entries: int, scratch: int) -> None:
    """All units in order."""
    first_unit = 0
    for number in range(num_entries):
        entry = entries + number * ENTRY_BYTES
        stop_unit = load(entry + STOP_UNIT)
        for unit in range(stop_unit - first_unit):
            _compute(entry, unit, scratch)
        first_unit = stop_unit


@jitable
def _leave(team: int) -> None:
    # The last one out after the door was shut.
    if fetch_add(team + _DOOR, -1) == 1 and load_shared(team + _NUM_WAITING) > 0:
        futex_wake(team + _DOOR, EVERYONE)


@jitable
def _shut(team: int) -> None:
    """Shuts the door and waits until nobody is inside."""
    inside = fetch_add(team + _DOOR, -_OPEN) - _OPEN
    if inside == 0:
        return
    started = clock_ns()
    while load_shared(team + _DOOR) > 0:
        pause()
        if clock_ns() - started > load(team + _STEP_SPIN_NS):
            fetch_add(team + _NUM_WAITING, 1)
            inside = load_shared(team + _DOOR)
            while inside > 0:
                futex_wait(team + _DOOR, inside)
                inside = load_shared(team + _DOOR)
            fetch_add(team + _NUM_WAITING, -1)


@jitable
def num_threads(team: int) -> int:
    """Native: of the team at that address, the caller's counted."""
    return load(team + _NUM_HELPERS) + 1


@jitable
def run_entries(team: int, entries: int, num_entries: int, num_units: int, cost_ns: int) -> None:
    """Native: runs the sealed entries at that address on the team at `Team.address`; see `Team.run`."""
    scratch = load(team + _CALLER_SCRATCH)
    if num_units < 2 or cost_ns < _WORTH_SHARING_NS or load(team + _NUM_HELPERS) == 0:
        _run_alone(entries, num_entries, scratch)
        return
    num_parked = load_shared(team + _NUM_PARKED)
    num_awake = load(team + _NUM_HELPERS) - num_parked
    num_wanted = min(cost_ns // _WORTH_WAKING_NS - 1, num_units - 1) - num_awake
    if num_awake == 0 and num_wanted <= 0:
        _run_alone(entries, num_entries, scratch)
        return
    store(team + _ENTRIES, entries)
    store(team + _NUM_UNITS, num_units)
    store(team + _TICKETS, 0)
    store(team + _COMPLETED, 0)
    store(team + _RELEASED, 0)
    fetch_add(team + _DOOR, _OPEN)
    fetch_add(team + _GENERATION, 1)
    if num_wanted > 0 and load_shared(team + _NUM_PARKED) > 0:
        futex_wake(team + _GENERATION, num_wanted)
    _work(team, scratch)
    _await_released(team, num_units)
    _shut(team)


def _help(team: int, scratch: int) -> None:
    """What the other threads do, until the team is closed."""
    generation = 0
    while True:
        if not _spin(team + _GENERATION, generation + 1, load(team + _IDLE_SPIN_NS)):
            fetch_add(team + _NUM_PARKED, 1)
            while load_shared(team + _GENERATION) == generation:
                futex_wait(team + _GENERATION, generation)
            fetch_add(team + _NUM_PARKED, -1)
        generation = load_shared(team + _GENERATION)
        if load_shared(team + _IS_CLOSED) != 0:
            return
        if fetch_add(team + _DOOR, 1) >= _OPEN:
            _work(team, scratch)
        _leave(team)


def _run(team: int, entries: int, num_entries: int, num_units: int, cost_ns: int) -> None:
    run_entries(team, entries, num_entries, num_units, cost_ns)


def _close(team: int) -> None:
    store(team + _IS_CLOSED, 1)
    fetch_add(team + _GENERATION, 1)
    futex_wake(team + _GENERATION, EVERYONE)


@functools.cache
def _run_kernel() -> Callable[[int, int, int, int, int], None]:
    return compile_kernel(_run, "run_program", *5 * (INTEGER,))


@functools.cache
def _help_kernel() -> Callable[[int, int], None]:
    return compile_kernel(_help, "help_team", INTEGER, INTEGER)


@functools.cache
def _close_kernel() -> Callable[[int], None]:
    return compile_kernel(_close, "close_team", INTEGER)


class Team:
    """`num_threads` threads, the caller's counted among them.

    One caller at a time: a team belongs to the thread that runs programs on it. The threads are daemons and
    wait outside of Python, so a process may end with them, closed or not.
    """

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        """`cpus` pins the threads other than the caller's, each to one of the list in turn, beginning with
        its second; None leaves them alone."""
        self.num_threads = max(1, num_threads)
        self._words = aligned_zeros(_TEAM_BYTES)
        self.address = address_of(self._words)
        """For `run_entries`."""
        self._scratch = aligned_zeros(SCRATCH_BYTES + OUTER_SCRATCH_BYTES)
        self._workspace = aligned_zeros(0)
        self._workspace_address = 0
        self.workspace_bytes = 0
        self._run = _run_kernel()
        # Programs are sealed when they are first run: not to be compiled then, in the middle of a request.
        seal_kernel()
        spin_ns = round(spin_time_s() * 1e9)
        words = self._words.view(np.int64)
        words[_NUM_HELPERS // 8] = self.num_threads - 1
        words[_IDLE_SPIN_NS // 8] = max(spin_ns, _MIN_IDLE_SPIN_NS)
        words[_STEP_SPIN_NS // 8] = max(spin_ns, _MIN_STEP_SPIN_NS)
        words[_CALLER_SCRATCH // 8] = address_of(self._scratch)
        help_kernel = _help_kernel()
        self._threads = [
            threading.Thread(
                target=_run_helper,
                args=(help_kernel, self._words, None if cpus is None else cpus[(number + 1) % len(cpus)]),
                name=f"compute {number + 1}",
                daemon=True,
            )
            for number in range(self.num_threads - 1)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, program: Program) -> None:
        """Runs all of the program and returns when it is done.

        Other threads take part where `program.cost_ns` is worth it (50 us for each that must be woken, beyond
        the first 50; less where they are still awake). The results do not depend on that, as long as a task's
        do not depend on the order of its items.
        """
        program.ready()
        self._run(self.address, program.address, len(program.entries), program.num_units, program.cost_ns)

    def workspace(self, num_bytes: int) -> int:
        """The address of that much memory, 64-byte aligned, for whoever has the team: what it holds is lost
        when the next one asks. It only grows."""
        if self.workspace_bytes < num_bytes:
            self._workspace = aligned_zeros(num_bytes)
            self._workspace_address = address_of(self._workspace)
            self.workspace_bytes = num_bytes
        return self._workspace_address

    def close(self) -> None:
        """Ends the threads. The caller alone is left, and can still run programs."""
        self._words.view(np.int64)[_NUM_HELPERS // 8] = 0
        _close_kernel()(self.address)
        for thread in self._threads:
            thread.join()


def _run_helper(help_kernel: Callable[[int, int], None], words: NDArray[np.uint8], cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    # Both arrays live in this frame: a thread that is left behind by its team still looks at them.
    scratch = aligned_zeros(SCRATCH_BYTES + OUTER_SCRATCH_BYTES)
    help_kernel(address_of(words), address_of(scratch))
