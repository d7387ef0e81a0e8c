"""The portable kernels: one source, compiled for each block format around its `decode_block`.

They run on every CPU numba compiles for, keep activations in float32, and are the reference for kernels made
for one CPU. Rows of weights are independent of each other, so callers may split them over threads.
"""

from collections.abc import Callable

import numpy as np

from shared.gguf.types import TensorType
from shared.native.memory import bytes_at, carray, floats_at, integers_at
from shared.quants.block_bytes import Bytes, Floats
from shared.quants.jit import FLOATS, INTEGER, READONLY_BYTES, compile_kernel, compile_task, jitable_sum

DecodeBlock = Callable[[Bytes, int, Floats, int], None]
"""`decode_block(raw, at, out, start)`; see `BlockFormat`."""


Decode = Callable[[Bytes, int, int, Floats], None]
"""`decode(raw, row_stride, num_blocks, out)`: rows of `num_blocks` blocks, `row_stride` bytes apart in `raw`,
into `out` (one-dimensional; its size gives the number of rows). It checks nothing."""


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


def compile_decode(tensor_type: TensorType, decode_block: DecodeBlock) -> Decode:
    """Compiled, or loaded from the cache."""
    block_size, block_bytes = tensor_type.block_size, tensor_type.block_bytes

    def decode(raw: Bytes, row_stride: int, num_blocks: int, out: Floats) -> None:
        width = num_blocks * block_size
        for row in range(out.size // width):
            for block in range(num_blocks):
                at = row * row_stride + block * block_bytes
                decode_block(raw, at, out, row * width + block * block_size)

    name = f"decode_{tensor_type.name}"
    return compile_kernel(decode, name, READONLY_BYTES, INTEGER, INTEGER, FLOATS)


def compile_gather(tensor_type: TensorType, decode_block: DecodeBlock) -> int:
    """The address of the gather task (`shared.native.task`), compiled or loaded from the cache; its params
    are a `GATHERED`."""
    block_size, block_bytes = tensor_type.block_size, tensor_type.block_bytes

    def gather(params: int, start: int, stop: int, scratch: int) -> None:
        # The fields of a GATHERED, in their order.
        fields = carray(integers_at(params), (6,))
        row_bytes, num_rows, num_blocks = fields[1], fields[2], fields[5]
        width = num_blocks * block_size
        raw = carray(bytes_at(fields[0]), (num_rows * row_bytes,))
        numbers = integers_at(fields[3])
        out = carray(floats_at(fields[4]), (stop * width,))
        for item in range(start, stop):
            number = numbers[item]
            if number < 0 or number >= num_rows:
                for i in range(width):
                    out[item * width + i] = np.float32(np.nan)
                continue
            for block in range(num_blocks):
                at = number * row_bytes + block * block_bytes
                decode_block(raw, at, out, item * width + block * block_size)

    return compile_task(gather, f"gather_{tensor_type.name}")


def compile_portable_multiply(tensor_type: TensorType, decode_block: DecodeBlock) -> int:
    """The address of the multiply task (`shared.native.task`), compiled or loaded from the cache; its params
    are a `MATRIX`."""
    block_size, block_bytes = tensor_type.block_size, tensor_type.block_bytes

    def multiply(params: int, start: int, stop: int, scratch: int) -> None:
        # The fields of a MATRIX and of its PLANE, in their order.
        matrix = carray(integers_at(params), (5,))
        row_bytes, out_stride = matrix[1], matrix[4]
        plane = carray(integers_at(matrix[2]), (6,))
        width, num_tokens = plane[4], plane[5]
        raw = carray(bytes_at(matrix[0]), (stop * row_bytes,))
        x = carray(floats_at(plane[0]), (num_tokens, width))
        out = carray(floats_at(matrix[3]), ((num_tokens - 1) * out_stride + stop,))
        weights = carray(floats_at(scratch), (2 * width,))  # two decoded rows
        num_blocks = width // block_size
        last = num_tokens - 1
        for first in range(start, stop, 2):
            # The last of an odd number of rows is its own partner, and the last token fills up a group of
            # four: some results are computed and written twice, and no other case is needed.
            second = min(first + 1, stop - 1)
            for half in range(2):
                row = second if half else first
                for block in range(num_blocks):
                    at = row * row_bytes + block * block_bytes
                    decode_block(raw, at, weights, half * width + block * block_size)
            for t0 in range(0, num_tokens, 4):
                t1, t2, t3 = min(t0 + 1, last), min(t0 + 2, last), min(t0 + 3, last)
                a0, a1, a2, a3, b0, b1, b2, b3 = _dot_2x4(weights, x, t0, t1, t2, t3)
                out[t0 * out_stride + first] = a0
                out[t1 * out_stride + first] = a1
                out[t2 * out_stride + first] = a2
                out[t3 * out_stride + first] = a3
                out[t0 * out_stride + second] = b0
                out[t1 * out_stride + second] = b1
                out[t2 * out_stride + second] = b2
                out[t3 * out_stride + second] = b3

    return compile_task(multiply, f"multiply_{tensor_type.name}")
