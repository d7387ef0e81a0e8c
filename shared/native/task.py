"""What a task is: machine code that computes a range of items of some piece of work.

::

    void task(int64 params, int64 start, int64 stop, int64 scratch)

`params` is the address of a record that says what to compute, `start` and `stop` are the items (rows of a
matrix, tokens, heads) wanted of it, `scratch` the address of `SCRATCH_BYTES` of memory, 64-byte aligned, that
are the calling thread's own. Items of one task may be computed by several threads at once and in any order.

Everything that the CPU computes in a step is such a task, so that a team (`shared.native.team`) can run a
whole list of them without returning to Python, whatever compiled them.
"""

import numpy as np
from numpy.typing import NDArray

SCRATCH_BYTES = 1 << 20
"""Enough for one tile of decoded weights of the widest matrix that kernels take whole."""

OUTER_SCRATCH_BYTES = 1 << 19
"""A task that calls other tasks passes its scratch on, and keeps what is its own in these bytes behind it."""


ALIGNMENT = 64
"""A cache line, in bytes."""


def address_of(array: NDArray[np.generic]) -> int:
    """Of the first element. Whoever keeps the address must keep the array."""
    return int(array.ctypes.data)


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins on a cache line; no page of it exists before it is first written to."""
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    return memory[-address_of(memory) % ALIGNMENT :][:num_bytes]
