"""Products with quantised weights against the same product in float64: every format, by every kernel that
this CPU can run, for one token, for windows of 2 to 8, and for batches.

Two tolerances. Kernels that round activations are held, first, to the product with the activations as they
were rounded: what is left are the rounding errors of float32 sums. 16 units (2**-24) of the sum of the
magnitudes of all terms are allowed; nothing here is off by more than 4, and one weight decoded wrongly costs
thousands. Second, to the product with the activations as they are: rounding may move each by half a step,
1/254 of the largest magnitude among its 32, or with two bytes 1/65534.
"""

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.gguf.types import tensor_type_named
from shared.quants import SUPPORTED, ActivationPlane, BlockFormat, block_format, matmul
from shared.quants.kernels import compile_portable_multiply
from shared.quants.products import run_multiply, run_task
from shared.quants.simd.instruction_set import ALL, AVXVNNI, Target, supported
from shared.quants.simd.multiply import compile_multiply
from shared.quants.simd.quantise import compile_quantise
from shared.quants.simd.ways import QuantisedWays
from tests.support.activations import steps_of
from tests.support.quant_blocks import dequantize, random_rows, set_scale

WIDTH = 512
NUM_ROWS = 37
UNIT = 2.0**-24
MOVED = {1: 0.5 / 127, 2: 0.5 / 32767}
FILLINGS = (0x00, 0x55, 0xAA, 0xFF)

Floats = NDArray[np.float32]
Exact = NDArray[np.float64]

TARGETS = [Target(instructions, num_bytes) for instructions in ALL for num_bytes in (2, 1)]

# AVX-VNNI has the sums of AVX-512 for the registers of AVX2, and both are held against everything: a few
# formats show that they work together. Compiling the others takes most of the time here.
TESTED_EVERYWHERE = [target for target in TARGETS if target.instructions is not AVXVNNI]

every_kernel = pytest.mark.parametrize(
    "target", [*TESTED_EVERYWHERE, None], ids=lambda it: it.name if it else "portable"
)


def format_named(name: str) -> BlockFormat:
    return block_format(tensor_type_named(name).type_id)


def activations(num_tokens: int, width: int = WIDTH) -> Floats:
    return np.random.default_rng(num_tokens).standard_normal((num_tokens, width)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Product:
    """By one kernel. `used`: the activations as they were rounded; `moved`: the most that rounding may have
    moved one of them, as a share of the largest of its 32."""

    out: Floats
    used: Exact
    moved: float


def multiply(name: str, target: Target | None, raw: NDArray[np.uint8], x: Floats) -> Product:
    fmt = format_named(name)
    out = np.full((len(x), len(raw)), np.nan, np.float32)
    plane = ActivationPlane(x)
    if target is None:
        run_multiply(compile_portable_multiply(fmt.type, fmt.decode_block), raw, plane, out, 0, len(raw))
        return Product(out, x.astype(np.float64), 0)
    if target.instructions not in supported():
        pytest.skip(f"this CPU has not all of {', '.join(target.instructions.features)}")
    is_rounded = isinstance(fmt.ways, QuantisedWays)
    if is_rounded:
        run_task(compile_quantise(target), plane.record, 0, plane.scales.size)
    run_multiply(compile_multiply(fmt.type, fmt.ways, target), raw, plane, out, 0, len(raw))
    if not is_rounded:
        return Product(out, x.astype(np.float64), 0)
    return Product(out, rounded(plane, target.activation_bytes), MOVED[target.activation_bytes])


def rounded(plane: ActivationPlane, num_bytes: int) -> Exact:
    """What the plane's codes and scales stand for."""
    steps = steps_of(plane, num_bytes)
    values: Exact = (steps.reshape(len(steps), -1, 32) * plane.scales[:, :, None]).reshape(steps.shape)
    return values


def assert_product(product: Product, x: Floats, weights: Floats, terms: Floats | None = None) -> None:
    """`terms`: what the weights may be the difference of, where that is more than they are."""
    exact_weights = weights.astype(np.float64)
    magnitudes = np.abs(exact_weights if terms is None else terms.astype(np.float64))
    allowed = 16 * UNIT * (np.abs(product.used) @ magnitudes.T)
    assert (np.abs(product.out - product.used @ exact_weights.T) <= allowed).all()
    if x.shape[1] % 32 == 0:
        most = np.abs(x.reshape(len(x), -1, 32)).max(2) * product.moved
        moved = most @ np.abs(exact_weights).reshape(len(weights), -1, 32).sum(2).T
        exact = x.astype(np.float64) @ exact_weights.T
        assert (np.abs(product.out - exact) <= 1.001 * moved + allowed).all()


@every_kernel
@pytest.mark.parametrize("name", SUPPORTED)
def test_product(name: str, target: Target | None) -> None:
    """One token, windows, and batches, with groups of tokens and tiles of rows that do not come out even."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=1)
    weights = dequantize(name, raw)
    for num_tokens in (*range(1, 10), 15, 33, 70):
        x = activations(num_tokens)
        assert_product(multiply(name, target, raw, x), x, weights)


@every_kernel
@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("filling", FILLINGS)
def test_extreme_blocks(name: str, filling: int, target: Target | None) -> None:
    """All bits clear, set, or alternating, so that codes, sub-scales and sums reach their limits, with scales
    at the edges of half precision, and activations that are all as large as a code can be."""
    raw = extreme_rows(name, filling)
    weights = dequantize(name, raw)
    assert np.isfinite(weights).all()
    fillings = [np.abs(dequantize(name, extreme_rows(name, other))) for other in FILLINGS]
    signs = np.random.default_rng(3).choice([-1.0, 1.0], (9, WIDTH))
    for x in (np.ones((9, WIDTH)), -np.ones((9, WIDTH)), signs):
        for num_tokens in (1, 4, 9):
            some = x[:num_tokens].astype(np.float32)
            assert_product(multiply(name, target, raw, some), some, weights, terms=np.max(fillings, axis=0))


def extreme_rows(name: str, filling: int) -> NDArray[np.uint8]:
    """Rows of blocks of one byte, each row with another scale at the edges of half precision."""
    kind = tensor_type_named(name)
    scales = np.array([0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0, -1.0, 65504.0, -65504.0], np.float32)
    blocks = np.full((len(scales) * (WIDTH // kind.block_size), kind.block_bytes), filling, np.uint8)
    set_scale(name, blocks, np.repeat(scales, WIDTH // kind.block_size))
    return blocks.reshape(len(scales), -1)


@every_kernel
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("width", [1, 5, 31, 40, 1000])
def test_floats_of_any_width(name: str, width: int, target: Target | None) -> None:
    """Blocks of one weight allow every width; what no register fills is taken one by one."""
    raw = random_rows(name, 19, width, seed=9)
    for num_tokens in (1, 2, 3, 6, 17):
        x = activations(num_tokens, width)
        assert_product(multiply(name, target, raw, x), x, dequantize(name, raw))


@every_kernel
@pytest.mark.parametrize("name", [name for name in SUPPORTED if tensor_type_named(name).block_size > 1])
def test_narrow_rows(name: str, target: Target | None) -> None:
    """From one block on: as many blocks as do not come out even with what a register holds, or a round."""
    size = tensor_type_named(name).block_size
    for width in (size, 2 * size, 3 * size, 5 * size):
        raw = random_rows(name, 5, width, seed=11)
        for num_tokens in (1, 2, 3, 5, 8, 11):
            x = activations(num_tokens, width)
            assert_product(multiply(name, target, raw, x), x, dequantize(name, raw))


@pytest.mark.parametrize("target", [*TARGETS, None], ids=lambda it: it.name if it else "portable")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ2_XS", "Q2_0", "BF16"])
def test_real_widths(name: str, target: Target | None) -> None:
    """Rows of an expert, and of a hyper-connection, the widest there are."""
    for width in (2560, 10240):
        raw = random_rows(name, 20, width, seed=3)
        for num_tokens in (1, 3, 12):
            x = activations(num_tokens, width)
            assert_product(multiply(name, target, raw, x), x, dequantize(name, raw))


@every_kernel
def test_one_outlier_costs_only_its_neighbours(target: Target | None) -> None:
    """A scale belongs to 32 activations: a huge one must not round the others to nothing."""
    raw = random_rows("Q8_0", NUM_ROWS, WIDTH, seed=10)
    x = activations(1)
    x[0, 7] = 1e6
    product = multiply("Q8_0", target, raw, x)
    weights = dequantize("Q8_0", raw).astype(np.float64)
    exact = x.astype(np.float64) @ weights.T
    near = np.abs(weights[:, :32]).sum(1) * 1e6 * product.moved
    far = np.abs(weights[:, 32:]).sum(1) * np.abs(x[:, 32:]).max() * product.moved
    units = 16 * UNIT * (np.abs(x.astype(np.float64)) @ np.abs(weights).T)
    assert (np.abs(product.out[0] - exact[0]) <= near + far + units[0]).all()
    without = x.copy()
    without[0, :32] = 0
    rest = multiply("Q8_0", target, raw, without).out
    assert (np.abs(rest[0] - without.astype(np.float64)[0] @ weights.T) <= far + 1e-3).all()


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q2_0"])
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 18), (18, 37), (36, None), (5, 5)])
def test_range_of_rows(name: str, num_tokens: int, start: int, stop: int | None) -> None:
    """A thread writes its own columns and no others."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=2)
    x, out = activations(num_tokens), np.full((num_tokens, NUM_ROWS), 7, np.float32)
    whole = np.empty_like(out)
    matmul(format_named(name), raw, x, whole)
    matmul(format_named(name), raw, x, out, start, stop)
    np.testing.assert_allclose(out[:, start:stop], whole[:, start:stop], rtol=1e-5, atol=1e-5)
    others = np.delete(out, np.s_[start:stop], axis=1)
    np.testing.assert_array_equal(others, 7)


@pytest.mark.parametrize("name", ["F32", "Q4_0"])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_read_only_mapping(name: str, num_tokens: int, tmp_path: Path) -> None:
    """Weights in a read-only mapping, activations read-only and in any memory order."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=4)
    path = tmp_path / "tensor"
    path.write_bytes(bytes(32) + raw.tobytes())
    x = np.asfortranarray(activations(num_tokens))
    x.flags.writeable = False
    out, expected = (np.empty((num_tokens, NUM_ROWS), np.float32) for _ in range(2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapped = np.frombuffer(mapping, np.uint8, offset=32).reshape(raw.shape)
        matmul(format_named(name), mapped, x, out)
        del mapped
    matmul(format_named(name), raw, activations(num_tokens), expected)
    np.testing.assert_array_equal(out, expected)


@every_kernel
@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q4_K", "IQ4_NL"])
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 33])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_passed_on(
    name: str, num_tokens: int, poison: float, target: Target | None
) -> None:
    """A broken activation must show in its own token's results, and in no other's."""
    raw = random_rows(name, NUM_ROWS, WIDTH, seed=5)
    x = activations(num_tokens)
    x[num_tokens - 1, WIDTH - 1] = poison
    with np.errstate(invalid="ignore"):
        out = multiply(name, target, raw, x).out
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
