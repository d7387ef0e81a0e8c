"""Products with quantised weights against the same product in float64, for every format.

Tolerance: 16 units of float32 rounding (2**-24) of the sum of the magnitudes of all terms. Adding n terms
one after the other may cost n - 1 such units, but the kernels add them in eight or more partial sums and
most rounding errors cancel: no result here is off by more than 4, and one weight decoded wrongly costs
thousands.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.gguf.types import tensor_type_named
from shared.quants import SUPPORTED, BlockFormat, block_format, matmul
from tests.support.quant_blocks import dequantize, random_rows

WIDTH = 512
NUM_ROWS = 37


def format_named(name: str) -> BlockFormat:
    return block_format(tensor_type_named(name).type_id)


def activations(num_tokens: int, width: int = WIDTH) -> NDArray[np.float32]:
    return np.random.default_rng(num_tokens).standard_normal((num_tokens, width)).astype(np.float32)


def assert_product(out: NDArray[np.float32], x: NDArray[np.float32], weights: NDArray[np.float32]) -> None:
    exact_x, exact_weights = x.astype(np.float64), weights.astype(np.float64)
    allowed = 16 * 2.0**-24 * (np.abs(exact_x) @ np.abs(exact_weights).T)
    assert (np.abs(out - exact_x @ exact_weights.T) <= allowed).all()


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 8, 16, 33, 128])
def test_product(name: str, num_tokens: int) -> None:
    """Both ways of computing, with groups of tokens and pairs of rows that do not come out even."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=1)
    x, out = activations(num_tokens), np.full((num_tokens, NUM_ROWS), np.nan, np.float32)
    matmul(format_named(name), raw, x, out)
    assert_product(out, x, dequantize(name, raw))


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q2_0"])
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 18), (18, 37), (36, None), (5, 5)])
def test_range_of_rows(name: str, num_tokens: int, start: int, stop: int | None) -> None:
    """A thread writes its own columns and no others."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=2)
    x, out = activations(num_tokens), np.full((num_tokens, NUM_ROWS), 7, np.float32)
    matmul(format_named(name), raw, x, out, start, stop)
    assert_product(out[:, start:stop], x, dequantize(name, raw)[start:stop])
    others = np.delete(out, np.s_[start:stop], axis=1)
    np.testing.assert_array_equal(others, 7)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_more_than_one_tile(num_tokens: int) -> None:
    """At the width of real experts, rows past the first decoded tile, and a short last tile."""
    raw = random_rows("Q4_0", 300, 2560, seed=3)
    x, out = activations(num_tokens, 2560), np.empty((num_tokens, 300), np.float32)
    matmul(format_named("Q4_0"), raw, x, out)
    assert_product(out, x, dequantize("Q4_0", raw))


@pytest.mark.parametrize("name", ["F32", "Q4_0"])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_read_only_mapping(name: str, num_tokens: int, tmp_path: Path) -> None:
    """Weights in a read-only mapping, activations read-only and in any memory order."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=4)
    path = tmp_path / "tensor"
    path.write_bytes(bytes(32) + raw.tobytes())
    x = np.asfortranarray(activations(num_tokens))
    x.flags.writeable = False
    out = np.empty((num_tokens, NUM_ROWS), np.float32)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapped = np.frombuffer(mapping, np.uint8, offset=32).reshape(raw.shape)
        matmul(format_named(name), mapped, x, out)
        del mapped
    assert_product(out, x, dequantize(name, raw))


@pytest.mark.parametrize("name", ["F32", "Q4_0"])
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 33])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_is_passed_on(name: str, num_tokens: int, poison: float) -> None:
    """A broken activation must show in its own token's results, and in no other's."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=5)
    x, out = activations(num_tokens), np.empty((num_tokens, NUM_ROWS), np.float32)
    x[num_tokens - 1, WIDTH - 1] = poison
    matmul(format_named(name), raw, x, out)
    assert not np.isfinite(out[num_tokens - 1]).any()
    assert np.isfinite(out[: num_tokens - 1]).all()


def test_threads_share_the_arguments() -> None:
    """Ranges computed at the same time add up to what one call computes, to the bit."""
    fmt = format_named("Q8_0")
    raw = random_rows("Q8_0", 64, WIDTH, seed=6)
    x, out, whole = activations(4), np.empty((4, 64), np.float32), np.empty((4, 64), np.float32)
    matmul(fmt, raw, x, whole)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(matmul, fmt, raw, x, out, start, start + 16) for start in range(0, 64, 16)]:
            done.result()
    np.testing.assert_array_equal(out, whole)


def test_no_tokens() -> None:
    """An expert that nobody chose is not an error."""
    raw = random_rows("Q8_0", 2, WIDTH, seed=7)
    matmul(format_named("Q8_0"), raw, np.empty((0, WIDTH), np.float32), np.empty((0, 2), np.float32))


def test_wrong_shapes_are_refused() -> None:
    """The kernels check no bounds, so nothing that does not fit may reach them."""
    fmt = format_named("Q8_0")
    raw = random_rows("Q8_0", 4, 64, seed=8)
    x, out = activations(2, 64), np.empty((2, 4), np.float32)
    with pytest.raises(ValueError, match="weights must be C-contiguous uint8"):
        matmul(fmt, raw[::2], x, out)
    with pytest.raises(ValueError, match="activations must be float32"):
        matmul(fmt, raw, x.astype(np.float64), out)
    with pytest.raises(ValueError, match="68 bytes do not hold 63 weights"):
        matmul(fmt, raw, x[:, :63], out)
    with pytest.raises(ValueError, match="68 bytes do not hold 32 weights"):
        matmul(fmt, raw, x[:, :32], out)
    for wrong in (out[:1], out[:, :3], np.empty((4, 2), np.float32).T, out.astype(np.float64)):
        with pytest.raises(ValueError, match=r"float32 array \[2, 4\]"):
            matmul(fmt, raw, x, wrong)  # type: ignore[arg-type]
    for start, stop in ((-1, 4), (0, 5), (3, 2)):
        with pytest.raises(ValueError, match="not within the 4 rows"):
            matmul(fmt, raw, x, out, start, stop)
