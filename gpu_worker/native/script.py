"""Programs whose entries grow with the step: by its tokens, by its spans, or not at all."""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.native.program import Program
from shared.native.records import Record

# What a unit of work should take: more than claiming it costs, less than others should wait for it.
_UNIT_NS = 10_000
# What a step costs that several threads compute: they wait for the last of them. Small steps, however many,
# are quicker on one thread (the demo model: 280 us for a token, 340 on two).
_BARRIER_NS = 5_000
# How many sizes of steps are kept.
_NUM_SIZES = 48
# Kernels treat a few rows of weights at a time.
_GRAIN_MULTIPLE = 16


class Sizes(NamedTuple):
    """How large a step is. `num_parts` counts the parts that the contexts of its tokens are divided into,
    `part_length` is the number of positions of the longest, roughly."""

    num_tokens: int
    num_spans: int = 0
    num_parts: int = 0
    part_length: int = 0


class Script:
    """A program, and how the number of items of each entry follows from the sizes of a step."""

    def __init__(self) -> None:
        self.program = Program()
        self._counts: list[tuple[int, int, int, int]] = []
        self._costs: list[tuple[float, float, float]] = []
        self._sized: OrderedDict[Sizes, Program] = OrderedDict()

    def add(
        self,
        task: int,
        params: Record,
        *,
        fixed: int = 0,
        per_token: int = 0,
        per_span: int = 0,
        per_part: int = 0,
        ns: float,
        ns_per_token: float = 0.0,
        ns_per_position: float = 0.0,
        keep: object = None,
    ) -> None:
        """Appends an entry to the current step; the numbers of items are added up. One item takes about
        `ns`, and more for every token of the step and for every position of a part."""
        self._counts.append((fixed, per_token, per_span, per_part))
        self._costs.append((ns, ns_per_token, ns_per_position))
        self.program.add(task, params, 0, grain=1, cost_ns=0, keep=keep)
        self._sized.clear()

    def barrier(self) -> None:
        """What is added from now on begins when everything before is done."""
        self.program.barrier()
        self._sized.clear()

    def resize(self, sizes: Sizes) -> Program:
        """The program for a step of that size. Those of the last few sizes are kept: windows of some tokens
        come again and again, and to work one out takes as long as a small step."""
        program = self._sized.get(sizes)
        if program is None:
            program = self._sized[sizes] = self._resized(sizes)
            if len(self._sized) > _NUM_SIZES:
                self._sized.popitem(last=False)
        return program

    def _resized(self, sizes: Sizes) -> Program:
        program = self.program.copy()
        num_items: NDArray[np.int64] = np.array(self._counts) @ np.array([1, *sizes[:3]])
        item_ns: NDArray[np.float64] = np.array(self._costs) @ np.array(
            [1, sizes.num_tokens, sizes.part_length]
        )
        grain = np.maximum(1, _UNIT_NS / item_ns).astype(np.int64)
        is_matrix = np.array(self._counts)[:, 0] > 0
        grain[is_matrix] = -(-grain[is_matrix] // _GRAIN_MULTIPLE) * _GRAIN_MULTIPLE
        program.entries["num_items"] = num_items
        program.entries["grain"] = grain
        # What is worth sharing is what the steps have beyond the cost of coming together after each.
        steps = np.bincount(program.entries["step"], num_items * item_ns)
        program.cost_ns = int(np.maximum(steps - _BARRIER_NS, 0).sum())
        program.seal()
        return program
