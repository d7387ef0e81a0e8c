"""Functions of float32 numbers and sums over rows that LLVM turns into vector instructions.

Callable from compiled code only. NaN goes through all of them, and nothing overflows on the way.

Compiled code that called the C library's `expf` would take one number at a time, and a layer of the real
model wants 30 000 of them for every token. So exp is a polynomial here (measured: 0.2 ns a number).
"""

from typing import Any

import numpy as np

from shared.quants.jit import jitable, jitable_sum

Pointer = Any
"""A typed pointer, as `shared.native.memory` makes them; `pointer[i]` reads and writes without any test."""

# exp(x) = 2^n exp(r) with |r| <= ln(2) / 2: range reduction and polynomial of Cephes' expf (S. L. Moshier,
# cephes/single/expf.c); its relative error is about 1e-7.
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
# Where n would leave the exponents of normal numbers.
_MAX_ARGUMENT, _MIN_ARGUMENT = np.float32(88.37), np.float32(-87.33)
# Added to a small number this leaves its nearest integer in the lowest bits of the sum.
_ROUNDING = np.float32(1.5 * 2**23)
_INFINITY, _ONE, _ZERO = np.float32(np.inf), np.float32(1), np.float32(0)


@jitable
def exp(x: np.float32) -> np.float32:
    """e^x; 0 below -87.33, infinite above 88.37."""
    # NaN is neither above nor below, and goes on.
    clamped = _MAX_ARGUMENT if x > _MAX_ARGUMENT else x
    clamped = _MIN_ARGUMENT if clamped < _MIN_ARGUMENT else clamped
    shifted = np.float32(clamped * _LOG2_E + _ROUNDING)
    n = shifted - _ROUNDING
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = np.uint32((shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    result = (p * r * r + r + _ONE) * power
    result = _ZERO if x < _MIN_ARGUMENT else result
    return _INFINITY if x > _MAX_ARGUMENT else result


@jitable
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x)."""
    result: np.float32 = np.divide(_ONE, _ONE + exp(-x))  # unlike `/`, without a test for 0
    return result


@jitable
def silu(x: np.float32) -> np.float32:
    """x sigmoid(x)."""
    result: np.float32 = np.divide(x, _ONE + exp(-x))
    return result


@jitable_sum
def sum_of_squares(x: Pointer, width: int) -> np.float32:
    """Of x [width]."""
    total = _ZERO
    for i in range(width):
        total += x[i] * x[i]
    return total


@jitable_sum
def dot(x: Pointer, y: Pointer, width: int) -> np.float32:
    """Of x and y [width]."""
    total = _ZERO
    for i in range(width):
        total += x[i] * y[i]
    return total
