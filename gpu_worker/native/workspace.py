"""The memory in which a step is computed: buffers for so many tokens, used by one layer after the other.

Buffers are named, and come into being when the first part asks for them.
"""

import numpy as np
from numpy.typing import NDArray

from gpu_worker.native.script import Script
from shared.native.matrices import BYTE_NS, ROUNDING_NS, row_cost_ns
from shared.native.records import Record, record
from shared.native.task import address_of, aligned_zeros
from shared.quants import ActivationPlane, BlockFormat, multiply_task, quantise_task, uses_codes
from shared.quants.matrix import GROUP, MATRIX

Floats = NDArray[np.float32]


class Matrix:
    """Rows of encoded weights: `rows` uint8 [num_rows, row_bytes], a view of the mapped file."""

    def __init__(self, rows: NDArray[np.uint8], block_format: BlockFormat) -> None:
        self.rows = rows
        self.format = block_format

    @property
    def num_rows(self) -> int:
        """Outputs of the product."""
        return len(self.rows)


class Plane:
    """A buffer that matrices are multiplied with."""

    def __init__(self, floats: Floats) -> None:
        self.floats = floats
        self._plane = ActivationPlane(floats)
        self.record = self._plane.record

    @property
    def width(self) -> int:
        """Values of one token."""
        return int(self.floats.shape[1])


class Workspace:
    """Buffers for up to `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._arrays: dict[str, Floats] = {}
        self._planes: dict[str, Plane] = {}

    def floats(self, name: str, width: int, num_rows: int = 0) -> Floats:
        """The buffer of that name, float32 [capacity, width], or with so many rows."""
        if name not in self._arrays:
            self._arrays[name] = aligned(num_rows or self.capacity, width)
        assert self._arrays[name].shape[1] == width, name
        return self._arrays[name]

    def at_least(self, name: str, width: int) -> Floats:
        """The buffer of that name, made wider where it has to be: float32 [capacity, at least width]. What it
        held is lost then, and it has another address."""
        present = self._arrays.get(name)
        if present is None or present.shape[1] < width:
            wider = width if present is None else max(width, 2 * present.shape[1])
            self._arrays[name] = aligned(self.capacity, wider)
        return self._arrays[name]

    def plane(self, name: str, width: int) -> Plane:
        """The buffer of that name as the input of products."""
        if name not in self._planes:
            self._planes[name] = Plane(self.floats(name, width))
        assert self._planes[name].width == width, name
        return self._planes[name]

    def set_num_tokens(self, num_tokens: int) -> None:
        """The size of the next step."""
        for plane in self._planes.values():
            plane.record["num_tokens"] = num_tokens


def aligned(*shape: int) -> Floats:
    """`aligned_zeros` of float32 in that shape."""
    return aligned_zeros(4 * int(np.prod(shape))).view(np.float32).reshape(shape)


def multiply(script: Script, plane: Plane, *products: tuple[Matrix, Floats], rows_per_token: int = 1) -> None:
    """Appends the products of a plane that is finished before this step, each into rows of its buffer. The
    plane has so many rows for each token of a step.

    Where a format's kernel reads the plane's codes, they are made in a step before.
    """
    _quantise(script, plane, [matrix for matrix, _ in products], rows_per_token)
    for matrix, out in products:
        _multiply(script, plane, matrix, address_of(out), keep=out, rows_per_token=rows_per_token)


def multiply_into(script: Script, plane: Plane, matrix: Matrix) -> Record:
    """Appends a product whose result has no place yet; its record, a MATRIX, of which `out` is to be set."""
    _quantise(script, plane, [matrix])
    return _multiply(script, plane, matrix, 0, keep=None)


def _quantise(script: Script, plane: Plane, matrices: list[Matrix], rows_per_token: int = 1) -> None:
    if any(uses_codes(matrix.format) for matrix in matrices):
        num_groups = plane.width // GROUP * rows_per_token
        script.add(quantise_task(), plane.record, per_token=num_groups, ns=ROUNDING_NS, keep=plane)
        script.barrier()


def _multiply(
    script: Script, plane: Plane, matrix: Matrix, out: int, keep: object, rows_per_token: int = 1
) -> Record:
    num_rows, row_bytes = matrix.rows.shape
    params = record(
        MATRIX, weights=matrix.rows, row_bytes=row_bytes, plane=plane.record, out=out, out_stride=num_rows
    )
    script.add(
        multiply_task(matrix.format),
        params,
        fixed=num_rows,
        # What takes longer: decoding the row, or waiting for its bytes where all threads read at once.
        ns=max(row_cost_ns(plane.width, 1, 0), BYTE_NS * row_bytes),
        ns_per_token=row_cost_ns(plane.width, 0, 1) * rows_per_token,
        keep=(matrix, plane, keep),
    )
    return params
