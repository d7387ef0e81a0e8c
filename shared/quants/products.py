"""Matrix products with quantised weights, activations in float32."""

import ctypes
import threading

import numpy as np
from numpy.typing import NDArray

from shared.native.records import Record, record
from shared.native.task import SCRATCH_BYTES, address_of, aligned_zeros
from shared.quants.block_bytes import Bytes, Floats
from shared.quants.block_format import BlockFormat
from shared.quants.matrix import CODE_STRIDE, GATHERED, GROUP, HALF_GROUP, MATRIX, MAX_WIDTH, PLANE
from shared.quants.quantising import quantise_task

_TASK = ctypes.CFUNCTYPE(None, *4 * (ctypes.c_int64,))
"""Calls through it do not hold the GIL."""


def multiply_task(fmt: BlockFormat) -> int:
    """The address of the task that multiplies rows of this format; its params are a `MATRIX`."""
    return fmt.multiply_task


def gather_task(fmt: BlockFormat) -> int:
    """The address of the task that decodes single rows of this format; its params are a `GATHERED`."""
    return fmt.gather_task


def uses_codes(fmt: BlockFormat) -> bool:
    """Whether that task reads the plane's codes, so that `quantise_task` has to run before it."""
    return fmt.activation_bytes > 0


_memory = threading.local()


def _scratch() -> int:
    """The address of this thread's scratch memory."""
    if not hasattr(_memory, "scratch"):
        _memory.scratch = aligned_zeros(SCRATCH_BYTES)
    return address_of(_memory.scratch)


class ActivationPlane:
    """Activations x, float32 [num_tokens, width], as the tasks read them."""

    def __init__(self, x: Floats) -> None:
        num_tokens, width = x.shape
        self.floats = np.ascontiguousarray(x)
        self.codes: NDArray[np.uint8] = np.empty((num_tokens, CODE_STRIDE * width), np.uint8)
        self.scales: Floats = np.empty((num_tokens, width // GROUP), np.float32)
        self.sums: Floats = np.empty((num_tokens, width // HALF_GROUP), np.float32)
        self.record = record(
            PLANE,
            floats=self.floats,
            codes=self.codes,
            scales=self.scales,
            sums=self.sums,
            width=width,
            num_tokens=num_tokens,
        )

    def quantise(self) -> None:
        """Fills in everything but the floats."""
        run_task(quantise_task(), self.record, 0, self.scales.size)


def matmul(
    fmt: BlockFormat, raw: Bytes, x: Floats, out: Floats, start: int = 0, stop: int | None = None
) -> None:
    """`out[:, start:stop] = x @ decode(raw[start:stop]).T`; other columns of `out` are left alone.

    `raw`: uint8 [num_rows, row_bytes], C-contiguous, read-only or not (a view of a mapped file).
    `x`: float32 [num_tokens, width]. `out`: float32 [num_tokens, num_rows], C-contiguous.

    Threads may share the arguments and compute different rows: nothing here holds the GIL for long, and which
    rows are computed together does not show in the results. Nor does the number of tokens up to
    `WINDOW_TOKENS`, and with deterministic kernels (`choose_kernels`) it never does; otherwise products with
    more are added up in another order, which differs in the last bits. NaN and infinity in `x` reach every
    result of their token. Raises ValueError where a shape or type is wrong.
    """
    stop = len(raw) if stop is None else stop
    _check(fmt, raw, x, out, start, stop)
    if len(x) == 0 or start == stop:
        return
    plane = ActivationPlane(x)
    if uses_codes(fmt):
        plane.quantise()
    run_multiply(multiply_task(fmt), raw, plane, out, start, stop)


def run_multiply(task: int, raw: Bytes, plane: ActivationPlane, out: Floats, start: int, stop: int) -> None:
    """Runs a multiply task on this thread, unchecked: arguments as those of `matmul`, the plane quantised
    where the task wants that."""
    run_task(task, matrix_record(raw, plane, out), start, stop)


def matrix_record(raw: Bytes, plane: ActivationPlane, out: Floats) -> Record:
    """A `MATRIX` of these; it holds their addresses only."""
    return record(
        MATRIX, weights=raw, row_bytes=raw.shape[1], plane=plane.record, out=out, out_stride=out.shape[1]
    )


def gathered_record(fmt: BlockFormat, raw: Bytes) -> Record:
    """A `GATHERED` of the rows `raw`, uint8 [num_rows, row_bytes]; it holds their address only. `numbers` and
    `out` are still to be set."""
    num_rows, row_bytes = raw.shape
    num_blocks = row_bytes // fmt.type.block_bytes
    return record(GATHERED, weights=raw, row_bytes=row_bytes, num_rows=num_rows, num_blocks=num_blocks)


def run_task(task: int, params: Record, start: int, stop: int) -> None:
    """Runs a task (`shared.native.task`) on this thread, for items `start` to `stop`."""
    _TASK(task)(address_of(params), start, stop, _scratch())


def _check(fmt: BlockFormat, raw: Bytes, x: Floats, out: Floats, start: int, stop: int) -> None:
    if raw.ndim != 2 or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
        raise ValueError(
            f"weights must be C-contiguous uint8 [num_rows, row_bytes], not {raw.dtype} {list(raw.shape)}"
        )
    if x.ndim != 2 or x.dtype != np.float32:
        raise ValueError(f"activations must be float32 [num_tokens, width], not {x.dtype} {list(x.shape)}")
    num_rows, row_bytes = raw.shape
    num_tokens, width = x.shape
    if width % fmt.type.block_size or row_bytes != fmt.type.row_bytes(width):
        raise ValueError(f"{fmt.type.name} rows of {row_bytes} bytes do not hold {width} weights")
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} weights are longer than the kernels' limit, {MAX_WIDTH}")
    if out.shape != (num_tokens, num_rows) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(
            f"products need a C-contiguous float32 array {[num_tokens, num_rows]},"
            f" not {out.dtype} {list(out.shape)}"
        )
    if not 0 <= start <= stop <= num_rows:
        raise ValueError(f"rows {start} to {stop} are not within the {num_rows} rows there are")
