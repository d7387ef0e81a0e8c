"""Functions of float32 numbers in compiled code: exact enough everywhere, extremes included."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.native.arithmetic import exp, sigmoid, silu
from shared.native.memory import floats_at
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel

Floats = NDArray[np.float32]


def _apply(x: int, results: int, count: int) -> None:
    values, out = floats_at(x), floats_at(results)
    for i in range(count):
        out[i] = exp(values[i])
        out[count + i] = sigmoid(values[i])
        out[2 * count + i] = silu(values[i])


@pytest.fixture(scope="module")
def apply() -> Callable[[Floats], Floats]:
    """x [n] -> exp, sigmoid and silu of it [3, n]."""
    kernel = compile_kernel(_apply, "test_arithmetic", INTEGER, INTEGER, INTEGER)

    def call(x: Floats) -> Floats:
        out = np.empty((3, len(x)), np.float32)
        kernel(address_of(x), address_of(out), len(x))
        return out

    return call


def test_accuracy(apply: Callable[[Floats], Floats]) -> None:
    """To the last bits over the whole range of exponents, at lengths that vectors do not divide."""
    x = np.linspace(-87, 88, 100_003, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    results = apply(x)
    assert results[0] == pytest.approx(exact, rel=3e-7)
    assert results[1] == pytest.approx(exact / (1 + exact), rel=4e-7)
    assert results[2] == pytest.approx(x * exact / (1 + exact), rel=4e-7, abs=1e-35)


def test_extremes(apply: Callable[[Floats], Floats]) -> None:
    """Nothing overflows on the way, and NaN stays NaN."""
    results = apply(np.array([-np.inf, -1e30, -1000, -0.0, 0.0, 1000, 1e30, np.inf, np.nan], np.float32))
    assert results[0].tolist()[:8] == [0, 0, 0, 1, 1, np.inf, np.inf, np.inf]
    assert results[1].tolist()[:8] == [0, 0, 0, 0.5, 0.5, 1, 1, 1]
    assert results[2].tolist()[1:8] == [0, 0, 0, 0, 1000, np.float32(1e30), np.inf]
    assert np.isnan(results[:, 8]).all()
