"""Several matrices times the same activations, as one native call on a team.

The activations are rounded once, where a kernel wants that; then the rows of all matrices are shared out.
Records and buffers lie in the team's workspace.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared import quants
from shared.native.matrices import (
    ROUNDED_AT_ONCE,
    ROUNDING_NS,
    UNITS_A_THREAD,
    grain_of,
    plane_bytes,
    row_cost_ns,
    set_matrix,
    set_plane,
    unit_cost_ns,
    up_to_line,
)
from shared.native.program import ENTRY_BYTES, seal_entries, set_entry
from shared.native.records import fields, reader
from shared.native.task import address_of
from shared.native.team import Team, num_threads, run_entries
from shared.quants import BlockFormat
from shared.quants.jit import INTEGER, compile_kernel
from shared.quants.matrix import GROUP, MATRIX, PLANE

_LINEAR = fields(
    "task",
    "weights",  # u8 [num_rows, row_bytes]
    "row_bytes",
    "num_rows",
    "reads_codes",
    "out",  # f32 [tokens, num_rows]
)
_linear_at = reader(_LINEAR)
_LINEAR_BYTES, _MATRIX_BYTES, _PLANE_BYTES = _LINEAR.itemsize, MATRIX.itemsize, PLANE.itemsize
# Where a kernel's tiles begin.
_ROWS_OF_TILE = 16


def _multiply(
    linears: int,
    num_linears: int,
    quantise_task: int,
    team: int,
    memory: int,
    memory_bytes: int,
    x: int,
    num_tokens: int,
    width: int,
) -> int:
    matrices = memory + up_to_line(_PLANE_BYTES)
    entries = up_to_line(matrices + num_linears * _MATRIX_BYTES)
    codes = entries + (num_linears + 1) * ENTRY_BYTES
    needed_bytes = codes + plane_bytes(num_tokens, width) - memory
    if needed_bytes > memory_bytes:
        return needed_bytes
    set_plane(memory, x, codes, num_tokens, width)
    row_ns = row_cost_ns(width, 1, num_tokens)
    num_groups, num_rows, reads_codes = num_tokens * (width // GROUP), 0, 0
    for number in range(num_linears):
        linear = _linear_at(linears + number * _LINEAR_BYTES)
        num_rows += linear.num_rows
        reads_codes |= linear.reads_codes
    cost_ns = num_rows * row_ns
    num_units_wanted = num_threads(team) * UNITS_A_THREAD
    grain = grain_of(row_ns, unit_cost_ns(cost_ns, num_units_wanted), _ROWS_OF_TILE)
    entry = entries
    if reads_codes != 0:
        cost_ns += num_groups * ROUNDING_NS
        entry = set_entry(entry, quantise_task, memory, num_groups, ROUNDED_AT_ONCE, 0)
    for number in range(num_linears):
        linear = _linear_at(linears + number * _LINEAR_BYTES)
        matrix = matrices + number * _MATRIX_BYTES
        set_matrix(matrix, linear.weights, linear.row_bytes, memory, linear.out, linear.num_rows)
        entry = set_entry(entry, linear.task, matrix, linear.num_rows, grain, 1)
    num_entries = (entry - entries) // ENTRY_BYTES
    num_units = seal_entries(entries, num_entries)
    run_entries(team, entries, num_entries, num_units, int(cost_ns))
    return 0


@functools.cache
def _multiply_kernel() -> Callable[[int, int, int, int, int, int, int, int, int], int]:
    """Returns 0; or, having done nothing, the bytes of memory that it needs."""
    return compile_kernel(_multiply, "multiply_linears", *9 * (INTEGER,))


class Products:
    """Matrices of the same width, where the model file maps them."""

    def __init__(self, matrices: Sequence[tuple[NDArray[np.uint8], BlockFormat]], team: Team) -> None:
        """`matrices`: rows uint8 [num_rows, row_bytes] and their format."""
        widths = {raw.shape[1] // kind.type.block_bytes * kind.type.block_size for raw, kind in matrices}
        if len(widths) != 1:
            raise ValueError(f"matrices of the widths {sorted(widths)} have no x in common")
        (self._width,) = widths
        self._team = team
        self._raw = [raw for raw, _ in matrices]
        self._num_rows = [len(raw) for raw in self._raw]
        self._records = np.zeros(len(matrices), _LINEAR)
        for linear, (raw, block_format) in zip(self._records, matrices, strict=True):
            linear["task"] = quants.multiply_task(block_format)
            linear["weights"] = address_of(raw)
            linear["num_rows"], linear["row_bytes"] = raw.shape
            linear["reads_codes"] = quants.uses_codes(block_format)
        self._address = address_of(self._records)
        self._quantise_task = quants.quantise_task()
        self._multiply = _multiply_kernel()

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x [num_tokens, width] float32 -> for each matrix its products [num_tokens, num_rows].

        Raises ValueError for another width or type.
        """
        if x.shape[1] != self._width or x.dtype != torch.float32:
            raise ValueError(f"activations {list(x.shape)} of {x.dtype} for matrices of width {self._width}")
        x = x.contiguous()
        num_tokens, width = x.shape
        out = [torch.empty((num_tokens, num_rows)) for num_rows in self._num_rows]
        if num_tokens == 0:
            return out
        self._records["out"] = [products.data_ptr() for products in out]
        team = self._team
        num_bytes = max(team.workspace_bytes, _PLANE_BYTES)
        while True:
            needed_bytes = self._multiply(
                self._address,
                len(out),
                self._quantise_task,
                team.address,
                team.workspace(num_bytes),
                num_bytes,
                x.data_ptr(),
                num_tokens,
                width,
            )
            if needed_bytes == 0:
                return out
            num_bytes = needed_bytes
