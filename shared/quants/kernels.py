"""The portable kernels: one source, compiled for each block format around its `decode_block`.

They run on every CPU numba compiles for, keep activations in float32, and are the reference for kernels made
for one CPU. Rows of weights are independent of each other, so callers may split them over threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.gguf.types import TensorType
from shared.quants.block_bytes import Bytes, Floats
from shared.quants.jit import (
    FLOATS,
    INTEGER,
    READONLY_BYTES,
    READONLY_ROWS,
    ROWS,
    compile_kernel,
    jitable_sum,
)

DecodeBlock = Callable[[Bytes, int, Floats, int], None]
"""`decode_block(raw, at, out, start)`; see `BlockFormat`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled kernels of one format. They check nothing; their callers have done that.

    `decode(raw, row_stride, num_blocks, out)`: rows of `num_blocks` blocks, `row_stride` bytes apart in
    `raw`, into `out` (one-dimensional; its size gives the number of rows).

    `multiply(raw, x, out, start, stop)`: for weight rows start to stop, `out[:, row]` = the products
    of that row with each row of `x` [num_tokens, width]. `out` is [num_tokens, num_rows].
    """

    decode: Callable[[Bytes, int, int, Floats], None]
    multiply: Callable[[Bytes, Floats, Floats, int, int], None]


@jitable_sum
def _dot_2x4(weights: Floats, x: Floats, t0: int, t1: int, t2: int, t3: int) -> tuple[np.float32, ...]:
    """Two weight rows times four tokens: the sums share their loads."""
    width = x.shape[1]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for i in range(width):
        a, b = weights[i], weights[width + i]
        x0, x1, x2, x3 = x[t0, i], x[t1, i], x[t2, i], x[t3, i]
        a0 += a * x0
        a1 += a * x1
        a2 += a * x2
        a3 += a * x3
        b0 += b * x0
        b1 += b * x1
        b2 += b * x2
        b3 += b * x3
    return a0, a1, a2, a3, b0, b1, b2, b3


def compile_kernels(tensor_type: TensorType, decode_block: DecodeBlock) -> Kernels:
    """Both kernels of one format, compiled or loaded from the cache."""
    block_size, block_bytes = tensor_type.block_size, tensor_type.block_bytes

    def decode(raw: Bytes, row_stride: int, num_blocks: int, out: Floats) -> None:
        width = num_blocks * block_size
        for row in range(out.size // width):
            for block in range(num_blocks):
                at = row * row_stride + block * block_bytes
                decode_block(raw, at, out, row * width + block * block_size)

    def multiply(raw: Bytes, x: Floats, out: Floats, start: int, stop: int) -> None:
        num_tokens, width = x.shape
        num_blocks = width // block_size
        last = num_tokens - 1
        weights = np.empty(2 * width, np.float32)  # two decoded rows, small enough for the L1 cache
        for first in range(start, stop, 2):
            # The last of an odd number of rows is its own partner, and the last token fills up a group of
            # four: some results are computed and written twice, and no other case is needed.
            second = min(first + 1, stop - 1)
            for half in range(2):
                row = second if half else first
                for block in range(num_blocks):
                    at = (row * num_blocks + block) * block_bytes
                    decode_block(raw, at, weights, half * width + block * block_size)
            for t0 in range(0, num_tokens, 4):
                t1, t2, t3 = min(t0 + 1, last), min(t0 + 2, last), min(t0 + 3, last)
                sums = _dot_2x4(weights, x, t0, t1, t2, t3)
                out[t0, first], out[t1, first], out[t2, first], out[t3, first] = sums[:4]
                out[t0, second], out[t1, second], out[t2, second], out[t3, second] = sums[4:]

    name = tensor_type.name
    return Kernels(
        decode=compile_kernel(decode, f"decode_{name}", READONLY_BYTES, INTEGER, INTEGER, FLOATS),
        multiply=compile_kernel(
            multiply, f"multiply_{name}", READONLY_BYTES, READONLY_ROWS, ROWS, INTEGER, INTEGER
        ),
    )
