"""Decodes whole rows of a tensor to float32."""

from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shared.quants.block_bytes import Bytes, Floats
from shared.quants.block_format import BlockFormat

Element = TypeVar("Element", bound=np.generic)


def decode_rows(fmt: BlockFormat, raw: Bytes, out: Floats | None = None) -> Floats:
    """Decodes `raw` [num_rows, row_bytes] to float32 [num_rows, width], into `out` where it is given.

    `raw` may be read-only, and a selection of rows or columns of a larger array: only the bytes of one row
    must lie next to each other. `out` must be C-contiguous. Raises ValueError where a shape or type is wrong.
    """
    kind = fmt.type
    if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] % kind.block_bytes:
        raise ValueError(
            f"{kind.name} rows must be uint8 [num_rows, a multiple of {kind.block_bytes}],"
            f" not {raw.dtype} {list(raw.shape)}"
        )
    num_rows, row_bytes = raw.shape
    num_blocks = row_bytes // kind.block_bytes
    shape = (num_rows, num_blocks * kind.block_size)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"decoded {kind.name} rows need a C-contiguous float32 array {list(shape)}")
    if out.size == 0:
        return out
    row_stride, byte_stride = raw.strides
    if not raw.flags.c_contiguous and row_stride >= 0 and byte_stride == 1:
        # From the first row to the end of the last, with whatever lies between the rows.
        flat = as_strided(raw, ((num_rows - 1) * row_stride + row_bytes,), (1,))
    else:
        flat, row_stride = raw.reshape(-1), row_bytes
    fmt.decode(read_only(flat), row_stride, num_blocks, out.reshape(-1))
    return out


def read_only(array: NDArray[Element]) -> NDArray[Element]:
    """A read-only view, the only kind of input that the kernels are compiled for."""
    view = array.view()
    view.flags.writeable = False
    return view
