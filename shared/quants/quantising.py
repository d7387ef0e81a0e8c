"""Rounds activations to 8 bits.

Every 32 neighbouring values share a scale, the largest magnitude / 127, so one outlier costs its neighbours
precision and nobody else. (llama.cpp's Q8_K shares one among 256.) The largest error of a value is half a
scale.
"""

import functools

import numpy as np

from shared.native.memory import bytes_at, carray, floats_at, integers_at
from shared.quants.choice import instruction_set
from shared.quants.jit import compile_task
from shared.quants.simd.quantise import compile_quantise


def _quantise(params: int, start: int, stop: int, scratch: int) -> None:
    plane = carray(integers_at(params), (6,))
    floats = carray(floats_at(plane[0]), (stop * 32,))
    codes = carray(bytes_at(plane[1]), (stop * 32,))
    scales = carray(floats_at(plane[2]), (stop,))
    sums = carray(floats_at(plane[3]), (stop * 2,))
    for group in range(start, stop):
        first = group * 32
        largest = np.float32(0)
        # NaN where a value is not finite, else 0: comparisons would lose a NaN.
        check = np.float32(0)
        for i in range(first, first + 32):
            largest = max(largest, abs(floats[i]))
            check += floats[i] * np.float32(0)
        inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
        scale = largest * np.float32(1 / 127) + check
        scales[group] = scale
        for half in range(2):
            total = 0
            for i in range(first + 16 * half, first + 16 * half + 16):
                code = int(np.rint(floats[i] * inverse))
                codes[i] = code + 128
                total += code
            sums[2 * group + half] = scale * np.float32(total)


@functools.cache
def quantise_task() -> int:
    """The address of the task; its params are a `PLANE`, its items the groups of all tokens, one after the
    other. A value that is not finite makes the scale of its group NaN, and so every product of its token."""
    instructions = instruction_set()
    if instructions is None:
        return compile_task(_quantise, "quantise_plane")
    return compile_quantise(instructions)
