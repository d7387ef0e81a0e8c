"""Every block format decodes to exactly what the `gguf` package makes of the same bytes."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.gguf.types import tensor_type_named
from shared.native.task import address_of
from shared.quants import SUPPORTED, BlockFormat, block_format, decode_rows, gather_task
from shared.quants.matrix import GATHERED
from shared.quants.products import run_task
from tests.support.quant_blocks import dequantize, random_rows, set_scale

HALF = np.finfo(np.float16)
SMALLEST = HALF.smallest_subnormal
EXTREME_SCALES = np.array(
    [0.0, -0.0, HALF.max, HALF.min, HALF.tiny, SMALLEST, 3 * SMALLEST, -SMALLEST, np.inf, -np.inf, np.nan],
    np.float32,
)


def format_named(name: str) -> BlockFormat:
    return block_format(tensor_type_named(name).type_id)


def assert_same_floats(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    """Bit for bit, signs of zeros included; any NaN will do for a NaN."""
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize("name", SUPPORTED)
def test_random_blocks(name: str) -> None:
    """Guards against a wrong bit anywhere in a layout: all codes, table entries and sub-scales occur."""
    rows = random_rows(name, num_rows=33, width=4096, seed=1)
    assert_same_floats(decode_rows(format_named(name), rows), dequantize(name, rows))


@pytest.mark.parametrize("name", SUPPORTED)
def test_bytes_of_any_kind(name: str) -> None:
    """Scales are random bits too, so NaN, infinite and subnormal ones occur."""
    kind = tensor_type_named(name)
    rows = np.random.default_rng(2).integers(0, 256, (64, kind.row_bytes(1024)), dtype=np.uint8)
    assert_same_floats(decode_rows(format_named(name), rows), dequantize(name, rows))


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("filling", [0x00, 0xFF])
def test_extreme_blocks(name: str, filling: int) -> None:
    """The smallest and the largest code with the scales at the edges of half precision."""
    kind = tensor_type_named(name)
    blocks = np.full((len(EXTREME_SCALES), kind.block_bytes), filling, np.uint8)
    set_scale(name, blocks, EXTREME_SCALES)
    assert_same_floats(decode_rows(format_named(name), blocks), dequantize(name, blocks))


def test_every_half_precision_number() -> None:
    """All scales go through one conversion, written out in integers: here with each of its inputs."""
    every = np.arange(2**16, dtype=np.uint16)
    decoded = decode_rows(format_named("F16"), every.view(np.uint8).reshape(256, 512))
    assert_same_floats(decoded.reshape(-1), every.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_K"])
def test_rows_of_a_larger_array(name: str) -> None:
    """A selection of rows or columns decodes in place; reversed rows and spread bytes by way of a copy."""
    fmt = format_named(name)
    rows = random_rows(name, num_rows=12, width=1024, seed=3)
    values = dequantize(name, rows)
    half = rows.shape[1] // 2
    np.testing.assert_array_equal(decode_rows(fmt, rows[1::3]), values[1::3])
    np.testing.assert_array_equal(decode_rows(fmt, rows[:, half:]), values[:, 512:])
    np.testing.assert_array_equal(decode_rows(fmt, rows[::-1]), values[::-1])
    np.testing.assert_array_equal(decode_rows(fmt, np.asfortranarray(rows)), values)
    np.testing.assert_array_equal(
        decode_rows(fmt, np.broadcast_to(rows[4], (3, rows.shape[1]))), values[[4] * 3]
    )


@pytest.mark.parametrize("name", ["F32", "Q4_0"])
def test_read_only_mapping_into_given_array(name: str, tmp_path: Path) -> None:
    """The way weights are read: from a read-only mapping, at an offset, into memory of the caller's."""
    rows = random_rows(name, num_rows=7, width=256, seed=4)
    path = tmp_path / "tensor"
    path.write_bytes(bytes(32) + rows.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        mapped = np.frombuffer(mapping, np.uint8, offset=32).reshape(rows.shape)
        out = np.empty((7, 256), np.float32)
        assert decode_rows(format_named(name), mapped, out) is out
        np.testing.assert_array_equal(out, dequantize(name, rows))
        del mapped


def test_no_rows() -> None:
    """An empty selection is not an error."""
    assert decode_rows(format_named("Q8_0"), np.empty((0, 34), np.uint8)).shape == (0, 32)
    assert decode_rows(format_named("Q8_0"), np.empty((3, 0), np.uint8)).shape == (3, 0)


def test_wrong_shapes_are_refused() -> None:
    """The kernels check no bounds, so nothing that does not fit may reach them."""
    fmt = format_named("Q8_0")
    rows = random_rows("Q8_0", num_rows=2, width=64, seed=5)
    with pytest.raises(ValueError, match="a multiple of 34"):
        decode_rows(fmt, rows[:, 1:])
    with pytest.raises(ValueError, match="uint8"):
        decode_rows(fmt, rows.view(np.int8))
    for out in (
        np.empty((2, 32), np.float32),
        np.empty((2, 64), np.float64),
        np.empty((64, 2), np.float32).T,
    ):
        with pytest.raises(ValueError, match=r"float32 array \[2, 64\]"):
            decode_rows(fmt, rows, out)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_K", "IQ2_XS"])
def test_gathering_single_rows(name: str) -> None:
    """The task gives what rows decode to, in the order asked for; a row that is not there is NaN, whatever
    lies in its place in memory."""
    fmt = format_named(name)
    width = 1024
    raw = random_rows(name, num_rows=9, width=width, seed=1)
    numbers = np.array([3, 0, 8, 3, -1, 9, 1 << 40, 5])
    out = np.full((len(numbers), width), 7, np.float32)
    params = np.zeros(1, GATHERED)
    params["weights"], params["row_bytes"], params["num_rows"] = address_of(raw), raw.shape[1], len(raw)
    params["numbers"], params["out"] = address_of(numbers), address_of(out)
    params["num_blocks"] = raw.shape[1] // fmt.type.block_bytes
    run_task(gather_task(fmt), params, 1, len(numbers))
    assert (out[0] == 7).all(), "not asked for"
    exists = (numbers >= 0) & (numbers < len(raw))
    assert np.isnan(out[~exists]).all()
    np.testing.assert_array_equal(out[exists][1:], decode_rows(fmt, raw)[numbers[exists]][1:])
