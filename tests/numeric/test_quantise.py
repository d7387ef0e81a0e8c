"""Rounding activations to 8 bits: what the vectors compute and what numba computes, against numpy."""

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.native.task import address_of
from shared.quants import ActivationPlane
from shared.quants.jit import compile_task
from shared.quants.quantising import _quantise
from shared.quants.simd.instruction_set import ALL, InstructionSet, supported
from shared.quants.simd.quantise import compile_quantise

TASK = ctypes.CFUNCTYPE(None, *4 * (ctypes.c_int64,))


@pytest.fixture(params=[*ALL, None], ids=lambda it: it.name if it else "portable")
def task(request: pytest.FixtureRequest) -> int:
    instructions: InstructionSet | None = request.param
    if instructions is None:
        return compile_task(_quantise, "quantise_plane")
    if instructions not in supported():
        pytest.skip(f"this CPU has not all of {', '.join(instructions.features)}")
    return compile_quantise(instructions)


def quantise(task: int, x: NDArray[np.float32]) -> ActivationPlane:
    plane = ActivationPlane(x)
    TASK(task)(address_of(plane.record), 0, plane.scales.size, 0)
    return plane


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_values(task: int, magnitude: float) -> None:
    """Codes are off by half a step at most, scales by a float's rounding, sums are those of the codes."""
    x = (np.random.default_rng(1).standard_normal((3, 96)) * magnitude).astype(np.float32)
    x[1, 32:64] = 0
    plane = quantise(task, x)
    steps = plane.codes.astype(np.float64).reshape(3, 3, 32) - 128
    np.testing.assert_allclose(plane.scales, np.abs(x.reshape(3, 3, 32)).max(2) / 127, rtol=1e-6)
    error = np.abs(steps * plane.scales[:, :, None] - x.reshape(3, 3, 32))
    assert (error <= 0.5001 * plane.scales[:, :, None]).all()
    assert np.abs(steps).max() == 127
    expected = steps.reshape(3, 6, 16).sum(2) * np.repeat(plane.scales, 2, axis=1)
    np.testing.assert_allclose(plane.sums, expected, rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(task: int, poison: float) -> None:
    """It shows in the scale of its own group only."""
    x = np.ones((2, 64), np.float32)
    x[1, 40] = poison
    scales = quantise(task, x).scales
    assert np.isfinite(scales).tolist() == [[True, True], [True, False]]


def test_a_range_of_groups(task: int) -> None:
    """Threads take ranges: only their groups are written."""
    plane = ActivationPlane(np.ones((2, 64), np.float32))
    plane.scales[:] = 7
    TASK(task)(address_of(plane.record), 1, 3, 0)
    np.testing.assert_allclose(plane.scales, [[7, 1 / 127], [1 / 127, 7]], rtol=1e-6)
