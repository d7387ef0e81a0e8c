"""Matrix products with quantised weights, activations in float32."""

import numpy as np

from shared.quants.block_bytes import Bytes, Floats
from shared.quants.block_format import BlockFormat
from shared.quants.decoding import decode_rows, read_only

_FEW_TOKENS = 24
"""Up to here the kernel that decodes two rows at a time is faster, above it a BLAS product of decoded tiles.
Measured on one core (AMD EPYC with AVX2, OpenBLAS) at widths 640 and 2560: 0.91 to 0.93 ns a weight for 24
tokens, 1.19 to 1.08 for 32."""

_TILE_WEIGHTS = 128 * 2560
"""Decoded weights in one tile, 1.25 MiB. Measured so too: a quarter is 15 % slower, more is no faster."""


def matmul(
    fmt: BlockFormat, raw: Bytes, x: Floats, out: Floats, start: int = 0, stop: int | None = None
) -> None:
    """`out[:, start:stop] = x @ decode(raw[start:stop]).T`; other columns of `out` are left alone.

    `raw`: uint8 [num_rows, row_bytes], C-contiguous, read-only or not (a view of a mapped file).
    `x`: float32 [num_tokens, width]. `out`: float32 [num_tokens, num_rows], C-contiguous.

    Threads may share the arguments and compute different rows: nothing here holds the GIL for long. The order
    of additions depends on the number of tokens, so results for one token differ in the last bits between
    batch sizes. NaN and infinity in `x` reach every result of their token. Raises ValueError where a shape or
    type is wrong.
    """
    stop = len(raw) if stop is None else stop
    _check(fmt, raw, x, out, start, stop)
    num_tokens, width = x.shape
    if num_tokens == 0 or start == stop:
        return
    if fmt.decode_block is None:
        _float_product(x, raw[start:stop].view(np.float32), out[:, start:stop])
    elif num_tokens <= _FEW_TOKENS:
        fmt.kernels.multiply(read_only(raw.reshape(-1)), read_only(np.ascontiguousarray(x)), out, start, stop)
    else:
        rows_per_tile = max(1, _TILE_WEIGHTS // width)
        tile = np.empty((min(rows_per_tile, stop - start), width), np.float32)
        for first in range(start, stop, rows_per_tile):
            last = min(first + rows_per_tile, stop)
            weights = decode_rows(fmt, raw[first:last], tile[: last - first])
            _float_product(x, weights, out[:, first:last])


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
    if out.shape != (num_tokens, num_rows) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(
            f"products need a C-contiguous float32 array {[num_tokens, num_rows]},"
            f" not {out.dtype} {list(out.shape)}"
        )
    if not 0 <= start <= stop <= num_rows:
        raise ValueError(f"rows {start} to {stop} are not within the {num_rows} rows there are")


def _float_product(x: Floats, weights: Floats, out: Floats) -> None:
    # NaN and infinity are results like others here, as in the kernels; numpy would warn of them.
    with np.errstate(invalid="ignore", over="ignore"):
        np.matmul(x, weights.T, out=out)
