"""Teams of threads that run programs: every item once, steps in order, nothing left behind."""

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import shared
from shared.native.memory import clock_ns, fetch_add, load, load_shared, pause, store
from shared.native.program import Program
from shared.native.task import OUTER_SCRATCH_BYTES, SCRATCH_BYTES, address_of
from shared.native.team import Team
from shared.quants.jit import compile_task

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

Integers = NDArray[np.int64]

ALL_THREADS_NS = 1_000_000_000
"""A cost for which every thread is woken."""
MEETING_LIMIT_S = 60


def _note(params: int, start: int, stop: int, scratch: int) -> None:
    """Notes for every item: how often it was computed, when that began and ended (numbers drawn from one
    counter), where its range started, and whose scratch it was given."""
    count, begun, ended, range_start, scratch_of = (
        load(params),
        load(params + 8),
        load(params + 16),
        load(params + 24),
        load(params + 32),
    )
    counter = load(params + 40)
    for item in range(start, stop):
        fetch_add(count + 8 * item, 1)
        store(begun + 8 * item, fetch_add(counter, 1))
        store(range_start + 8 * item, start)
        store(scratch_of + 8 * item, scratch)
    limit = clock_ns() + load(params + 48)
    while clock_ns() < limit:
        pause()
    for item in range(start, stop):
        store(ended + 8 * item, fetch_add(counter, 1))


def _meet(params: int, start: int, stop: int, scratch: int) -> None:
    """Returns when as many are here as the record says, or at the time it says."""
    fetch_add(params, 1)
    while load_shared(params) < load(params + 8) and clock_ns() < load(params + 16):
        pause()
    # The first and the last byte of what a task may write.
    store(scratch, start)
    store(scratch + SCRATCH_BYTES + OUTER_SCRATCH_BYTES - 8, start)
    fetch_add(params + 24, load(scratch))


@functools.cache
def note_task() -> int:
    return compile_task(_note, "test_note")


@functools.cache
def meet_task() -> int:
    return compile_task(_meet, "test_meet")


@dataclass
class Notes:
    """What `_note` wrote for the items of one entry."""

    count: Integers
    begun: Integers
    ended: Integers
    range_start: Integers
    scratch_of: Integers


def add_notes(
    program: Program, num_items: int, grain: int, counter: Integers, *, busy_ns: int = 0, cost_ns: int = 0
) -> Notes:
    """Appends an entry; `busy_ns` is how long each range takes."""
    notes = Notes(*(np.zeros(num_items, np.int64) for _ in range(5)))
    arrays = [notes.count, notes.begun, notes.ended, notes.range_start, notes.scratch_of, counter]
    params = np.array([*map(address_of, arrays), busy_ns], np.int64)
    program.add(note_task(), params, num_items, grain=grain, cost_ns=cost_ns, keep=arrays)
    return notes


def run_meeting(team: Team, size: int) -> int:
    """Units that wait for each other, so that each is computed by another thread: how many came."""
    program = Program()
    limit = time.monotonic_ns() + MEETING_LIMIT_S * 1_000_000_000
    params = np.array([0, size, limit, 0], np.int64)
    program.add(meet_task(), params, size, grain=1, cost_ns=ALL_THREADS_NS)
    team.run(program)
    assert time.monotonic_ns() < limit
    # Each found in its scratch what it had put there.
    assert params[3] == sum(range(size))
    return int(params[0])


@functools.cache
def lasting_team(num_threads: int) -> Team:
    """For tests that need many runs and no end."""
    return Team(num_threads)


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Teams of several sizes, the caller alone among them."""
    made = Team(request.param)
    yield made
    made.close()


STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, print_blob=True)
@given(STEPS, st.sampled_from([1, 2, 3, 6]), st.sampled_from([0, 20_000, ALL_THREADS_NS]))
def test_any_program(steps: list[list[tuple[int, int]]], num_threads: int, cost_ns: int) -> None:
    """Every item exactly once, in the ranges its grain makes, and no step before the end of the last one;
    twice, since a program may be run again."""
    program, counter = Program(), np.zeros(1, np.int64)
    notes: list[list[Notes]] = []
    for number, entries in enumerate(steps):
        if number:
            program.barrier()
        notes.append(
            [add_notes(program, num_items, grain, counter, cost_ns=cost_ns) for num_items, grain in entries]
        )
    for run in (1, 2):
        lasting_team(num_threads).run(program)
        ended = -1
        for of_step, entries in zip(notes, steps, strict=True):
            for of_entry, (num_items, grain) in zip(of_step, entries, strict=True):
                items = np.arange(num_items)
                assert (of_entry.count == run).all()
                assert (of_entry.range_start == items // grain * grain).all()
                assert (of_entry.begun > ended).all()
            ended = max([ended, *(int(n.ended.max()) for n in of_step if n.ended.size)])


def test_empty_program(team: Team) -> None:
    """Nothing to do is no error."""
    team.run(Program())


def test_threads_compute_at_the_same_time(team: Team) -> None:
    """As many units as threads, that wait for each other, can only end together; and each thread has scratch
    of its own, all of it."""
    for _ in range(3):
        assert run_meeting(team, team.num_threads) == team.num_threads


def test_ranges_of_one_entry_are_shared() -> None:
    """A single matrix keeps all threads busy, and the next step of the program has all of them again."""
    team, program, counter = Team(3), Program(), np.zeros(1, np.int64)
    entries = []
    for _ in range(2):
        entries.append(add_notes(program, 30, 1, counter, busy_ns=2_000_000, cost_ns=ALL_THREADS_NS))
        program.barrier()
    team.run(program)
    for notes in entries:
        assert len(set(notes.scratch_of.tolist())) == 3
    team.close()


def test_small_programs_stay_with_the_caller() -> None:
    """What is not worth waking anyone for is computed by the caller, in order."""
    team, counter = Team(4), np.zeros(1, np.int64)
    single_unit, small = Program(), Program()
    callers = add_notes(single_unit, 1, 1, counter, cost_ns=ALL_THREADS_NS)
    notes = add_notes(small, 100, 7, counter, cost_ns=1_000)
    team.run(single_unit)
    for _ in range(50):
        team.run(small)
    assert set(notes.scratch_of.tolist()) == set(callers.scratch_of.tolist())
    assert (np.diff(notes.begun) > 0).all()
    team.close()


def test_many_runs_in_a_row() -> None:
    """A thread that comes late to one program finds the next one, and never computes for the last."""
    team, counter = Team(4), np.zeros(1, np.int64)
    programs = []
    for num_items, grain in ((5, 1), (64, 3), (2, 1), (1000, 10)):
        program = Program()
        notes = [add_notes(program, num_items, grain, counter, cost_ns=ALL_THREADS_NS)]
        program.barrier()
        notes.append(add_notes(program, num_items, grain, counter, cost_ns=ALL_THREADS_NS))
        programs.append((program, notes))
    for run in range(1, 2001):
        for program, _ in programs:
            team.run(program)
        if run % 100 == 0:
            for _, notes in programs:
                assert all((n.count == run).all() for n in notes)
            # Long enough for the threads to go to sleep.
            time.sleep(0.001)
    team.close()


def test_change_of_a_program(team: Team) -> None:
    """The same entries with other numbers of items, none among them."""
    program, counter = Program(), np.zeros(1, np.int64)
    first = add_notes(program, 20, 4, counter, cost_ns=ALL_THREADS_NS)
    program.barrier()
    second = add_notes(program, 20, 4, counter, cost_ns=ALL_THREADS_NS)
    for num_items in ((20, 3), (0, 7), (5, 0), (0, 0), (20, 20)):
        for notes in (first, second):
            notes.count[:] = 0
        program.entries["num_items"] = num_items
        program.seal()
        team.run(program)
        for notes, wanted in zip((first, second), num_items, strict=True):
            assert notes.count.tolist() == [1] * wanted + [0] * (20 - wanted)


@pytest.mark.parametrize(("num_items", "grain"), [(-1, 1), (1, 0), (5, -2)])
def test_entries_that_make_no_sense(num_items: int, grain: int) -> None:
    """They are refused where they are added."""
    with pytest.raises(ValueError, match=f"{num_items} items"):
        Program().add(1, np.zeros(1, np.int64), num_items, grain=grain, cost_ns=0)


def test_close_ends_the_threads() -> None:
    """After close nobody is left, sleeping threads included, and the caller can still run programs."""
    before = threading.active_count()
    team, program, counter = Team(4), Program(), np.zeros(1, np.int64)
    notes = add_notes(program, 9, 1, counter, cost_ns=ALL_THREADS_NS)
    assert threading.active_count() == before + 3
    team.run(program)
    time.sleep(0.01)
    team.close()
    assert threading.active_count() == before
    team.run(program)
    assert (notes.count == 2).all()
    team.close()


def test_threads_are_pinned() -> None:
    """Each thread to one CPU of the list; the caller is left where it is."""
    before = os.sched_getaffinity(0)
    cpus = sorted(before)[:2]
    known = set(threading.enumerate())
    team = Team(3, cpus)
    run_meeting(team, 3)
    threads = [thread for thread in threading.enumerate() if thread not in known]
    pinned = sorted(sorted(os.sched_getaffinity(thread.native_id or 0)) for thread in threads)
    team.close()
    assert pinned == sorted([cpus[number % len(cpus)]] for number in (1, 2))
    assert os.sched_getaffinity(0) == before


def test_there_is_always_a_thread() -> None:
    """Nonsense counts mean the caller alone."""
    assert Team(0).num_threads == Team(-3).num_threads == 1


def test_workspace() -> None:
    """Aligned memory that grows, and stays where it is while it suffices."""
    team = Team(1)
    small = team.workspace(100)
    assert small % 64 == 0
    assert team.workspace(50) == small
    large = team.workspace(10_000_000)
    assert large % 64 == 0
    assert team.workspace(9_000_000) == large


@pytest.mark.parametrize("ending", ["pass", "raise RuntimeError('over')"])
def test_a_process_ends_with_its_team(ending: str) -> None:
    """Threads that nobody closed hold up no exit."""
    program = f"from shared.native.team import Team; team = Team(3); {ending}"
    environment = os.environ | {"PYTHONPATH": str(Path(shared.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert done.returncode == (0 if ending == "pass" else 1), done.stderr
