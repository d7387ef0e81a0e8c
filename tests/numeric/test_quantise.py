"""Rounding activations to 16 and to 8 bits, against numpy."""

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.native.task import address_of
from shared.quants import ActivationPlane
from shared.quants.matrix import NUM_STEPS
from shared.quants.simd.instruction_set import ALL, Target, supported
from shared.quants.simd.quantise import compile_quantise
from tests.support.activations import steps_of

TASK = ctypes.CFUNCTYPE(None, *4 * (ctypes.c_int64,))


TARGETS = [Target(instructions, num_bytes) for instructions in ALL for num_bytes in (2, 1)]


@pytest.fixture(params=TARGETS, ids=lambda it: it.name)
def target(request: pytest.FixtureRequest) -> Target:
    target: Target = request.param
    if target.instructions not in supported():
        pytest.skip(f"this CPU has not all of {', '.join(target.instructions.features)}")
    return target


def quantise(target: Target, x: NDArray[np.float32]) -> ActivationPlane:
    plane = ActivationPlane(x)
    TASK(compile_quantise(target))(address_of(plane.record), 0, plane.scales.size, 0)
    return plane


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_values(target: Target, magnitude: float) -> None:
    """Codes are off by half a step at most, scales by a float's rounding, sums are those of the codes."""
    x = (np.random.default_rng(1).standard_normal((3, 96)) * magnitude).astype(np.float32)
    x[1, 32:64] = 0
    plane = quantise(target, x)
    groups, steps = x.reshape(3, 3, 32), steps_of(plane, target.activation_bytes).reshape(3, 3, 32)
    most = NUM_STEPS[target.activation_bytes]
    np.testing.assert_allclose(plane.scales, np.abs(groups).max(2) / most, rtol=1e-6)
    error = np.abs(steps * plane.scales[:, :, None] - groups)
    # The product that is rounded has 24 bits, of which two bytes take 15: it may be off by 1/256 of a step.
    assert (error <= (0.505 if target.activation_bytes == 2 else 0.5001) * plane.scales[:, :, None]).all()
    assert np.abs(steps).max() == most
    expected = steps.reshape(3, 6, 16).sum(2) * np.repeat(plane.scales, 2, axis=1)
    np.testing.assert_allclose(plane.sums, expected, rtol=1e-6, atol=1e-6 * magnitude)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(target: Target, poison: float) -> None:
    """It shows in the scale of its own group only."""
    x = np.ones((2, 64), np.float32)
    x[1, 40] = poison
    scales = quantise(target, x).scales
    assert np.isfinite(scales).tolist() == [[True, True], [True, False]]


def test_a_range_of_groups(target: Target) -> None:
    """Threads take ranges: only their groups are written."""
    plane = ActivationPlane(np.ones((2, 64), np.float32))
    plane.scales[:] = 7
    TASK(compile_quantise(target))(address_of(plane.record), 1, 3, 0)
    step = 1 / NUM_STEPS[target.activation_bytes]
    np.testing.assert_allclose(plane.scales, [[7, step], [step, 7]], rtol=1e-6)
