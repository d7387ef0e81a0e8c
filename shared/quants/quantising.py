"""Rounds activations to 16 or 8 bits.

Every 32 neighbouring values share a scale, the largest magnitude over `NUM_STEPS`, so one outlier costs its
neighbours precision and nobody else. (llama.cpp rounds to 8 bits, and its Q8_K shares a scale among 256.) The
largest error of a value is half a scale.
"""

import functools

from shared.quants.choice import kernel_target
from shared.quants.simd.quantise import compile_quantise


@functools.cache
def quantise_task() -> int:
    """The address of the task; its params are a `PLANE`, its items the groups of all tokens, one after the
    other. A value that is not finite makes the scale of its group NaN, and so every product of its token.
    0 where the kernels are the portable ones, which round nothing."""
    target = kernel_target()
    return compile_quantise(target) if target is not None else 0
