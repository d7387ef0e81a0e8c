"""A program: the list of tasks that a team runs in one go.

::

    program = Program()
    program.add(quantise_task(), plane, num_items=80, grain=80, cost_ns=2_000)
    program.barrier()
    program.add(multiply_task(gate_format), gate, num_items=640, grain=32, cost_ns=100_000)
    program.add(multiply_task(up_format), up, num_items=640, grain=32, cost_ns=100_000)
    team.run(program)

Between two barriers lies a *step*: its entries may be computed at the same time, in any order. Items of an
entry are claimed `grain` at a time, always as the same ranges [n * grain, (n + 1) * grain), whoever computes
them; one such range is a *unit*. A unit of 10 to 50 us is a good size: much shorter, and claiming it costs,
much longer, and threads wait for the last one.

A program may be run again and again. What its params point at may change between two runs; a change of
`entries` needs `seal` afterwards.

Native code makes programs of its own (`cpu_worker.expert_plan`): it writes entries with `set_entry`, then
calls `seal_entries` and `shared.native.team.run_entries`.
"""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.native.memory import load, store
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel, jitable

ENTRY = np.dtype(
    [
        ("task", np.int64),  # address of the code
        ("params", np.int64),  # address of its record
        ("num_items", np.int64),
        ("grain", np.int64),  # items claimed at a time, at least 1
        ("step", np.int64),  # entries are in ascending order of it; numbers may be left out
        # Written by `seal_entries`. Units are counted through the whole program.
        ("stop_unit", np.int64),  # the first unit behind this entry; its own begin where the last one's stop
        ("step_start", np.int64),  # the first unit of the step
        ("step_stop", np.int64),  # the first unit behind the step
    ]
)

ENTRY_BYTES = ENTRY.itemsize
TASK, PARAMS, NUM_ITEMS, GRAIN, STEP, STOP_UNIT, STEP_START, STEP_STOP = range(0, 64, 8)
"""Byte offsets of the fields of an entry, for native code."""


@jitable
def set_entry(address: int, task: int, params: int, num_items: int, grain: int, step: int) -> int:
    """Native: writes what `seal_entries` needs of an entry; returns where the next one goes."""
    store(address + TASK, task)
    store(address + PARAMS, params)
    store(address + NUM_ITEMS, num_items)
    store(address + GRAIN, grain)
    store(address + STEP, step)
    return address + ENTRY_BYTES


@jitable
def seal_entries(entries: int, num_entries: int) -> int:
    """Native: numbers the units of the entries at that address; returns how many units there are."""
    num_units = 0
    step_start = 0
    for number in range(num_entries):
        entry = entries + number * ENTRY_BYTES
        if number > 0 and load(entry + STEP) != load(entry - ENTRY_BYTES + STEP):
            step_start = num_units
        grain = load(entry + GRAIN)
        num_units += (load(entry + NUM_ITEMS) + grain - 1) // grain
        store(entry + STOP_UNIT, num_units)
        store(entry + STEP_START, step_start)
    step_stop = num_units
    for number in range(num_entries - 1, -1, -1):
        entry = entries + number * ENTRY_BYTES
        store(entry + STEP_STOP, step_stop)
        if number > 0 and load(entry + STEP) != load(entry - ENTRY_BYTES + STEP):
            step_stop = load(entry + STEP_START)
    return num_units


def _seal(entries: int, num_entries: int) -> int:
    return seal_entries(entries, num_entries)


@functools.cache
def seal_kernel() -> Callable[[int, int], int]:
    """`seal_entries`, to be called from Python."""
    return compile_kernel(_seal, "seal_program", INTEGER, INTEGER)


class Program:
    """Entries, and the arrays that their params and results live in, kept alive."""

    def __init__(self) -> None:
        self.entries: NDArray[np.void] = np.zeros(0, ENTRY)
        self.cost_ns = 0
        """What one thread would need for all of it, roughly. Decides whether, and how many, others are
        woken; change it where the work changes."""
        self.num_units = 0
        self.address = 0
        self._step = 0
        self._kept: list[object] = []
        self._is_sealed = True

    def add(
        self,
        task: int,
        params: NDArray[np.generic],
        num_items: int,
        *,
        grain: int,
        cost_ns: int,
        keep: object = None,
    ) -> int:
        """Appends an entry to the current step; returns its index in `entries`.

        `task` is an address, `params` the array of one record; `grain` the items claimed at a time; `cost_ns`
        what one thread would need for all items, roughly. `keep` is kept alive with the program, as is
        `params`. Raises ValueError for a negative number of items or a grain below 1.
        """
        if num_items < 0 or grain < 1:
            raise ValueError(f"{num_items} items, {grain} at a time")
        entry = np.zeros(1, ENTRY)
        entry["task"], entry["params"] = task, address_of(params)
        entry["num_items"], entry["grain"], entry["step"] = num_items, grain, self._step
        self.entries = np.concatenate([self.entries, entry])
        self.cost_ns += cost_ns
        self._kept += [params, keep]
        self._is_sealed = False
        return len(self.entries) - 1

    def barrier(self) -> None:
        """What is added from now on begins when everything before is done."""
        self._step += 1

    def copy(self) -> "Program":
        """One with entries of its own, of the same tasks and params."""
        made = Program()
        made.entries, made.cost_ns = self.entries.copy(), self.cost_ns
        made._step, made._kept = self._step, list(self._kept)
        made.seal()
        return made

    def seal(self) -> None:
        """Numbers the units anew, after `entries` was changed by hand."""
        self.address = address_of(self.entries)
        self.num_units = seal_kernel()(self.address, len(self.entries))
        self._is_sealed = True

    def ready(self) -> None:
        """Seals what `add` has changed."""
        if not self._is_sealed:
            self.seal()
