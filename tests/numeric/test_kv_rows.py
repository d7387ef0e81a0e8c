"""Rows of keys and values: as close as their format says, the same bytes from machine code and from torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.native.kv_rows import decode_rows, encode_row, half_bits, half_value
from gpu_worker.state.kv_rows import decoded, empty_rows, encoded
from shared.kv_format import F16, F32, INT4, INT8, KV_FORMATS, KV_TYPES, RowFormat, kv_format
from shared.native.memory import floats_at, halves_at, integers_at
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel

CPU = torch.device("cpu")
FORMATS = {"F32": F32, "F16": F16, "INT8": INT8, "INT4": INT4}
# Of groups of 64 and 32: fewer, whole ones, and some left, an odd number too.
DIMS = (2, 15, 32, 64, 96, 100, 256)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _encode(x: int, row_format: int, dim: int, num_rows: int, rows: int, row_bytes: int) -> None:
    for row in range(num_rows):
        encode_row(floats_at(x + row * dim * 4), row_format, dim, rows + row * row_bytes)


def _decode(addresses: int, row_format: int, dim: int, num_rows: int, out: int) -> None:
    decode_rows(integers_at(addresses), num_rows, row_format, dim, out)


def _halves(bits: int, values: int, count: int) -> None:
    for i in range(count):
        floats_at(values)[i] = half_value(halves_at(bits)[i])


def _to_halves(values: int, bits: int, count: int) -> None:
    for i in range(count):
        halves_at(bits)[i] = half_bits(floats_at(values)[i])


@pytest.fixture(scope="module")
def encode() -> Callable[[Floats, RowFormat], Bytes]:
    """x [n, dim] -> rows [n, row_bytes], in machine code."""
    kernel = compile_kernel(_encode, "test_encode_rows", *6 * (INTEGER,))

    def call(x: Floats, row_format: RowFormat) -> Bytes:
        num_rows, dim = x.shape
        rows = np.full((num_rows, row_format.row_bytes(dim)), 0, np.uint8)
        kernel(address_of(x), row_format.number, dim, num_rows, address_of(rows), row_format.row_bytes(dim))
        return rows

    return call


@pytest.fixture(scope="module")
def decode() -> Callable[[Bytes, RowFormat, int], Floats]:
    """Rows [n, row_bytes] -> [n, dim], in machine code, last row first."""
    kernel = compile_kernel(_decode, "test_decode_rows", *5 * (INTEGER,))

    def call(rows: Bytes, row_format: RowFormat, dim: int) -> Floats:
        num_rows, row_bytes = rows.shape
        out = np.empty((num_rows, dim), np.float32)
        addresses = address_of(rows) + row_bytes * np.arange(num_rows)[::-1]
        addresses = np.ascontiguousarray(addresses, np.int64)
        kernel(address_of(addresses), row_format.number, dim, num_rows, address_of(out))
        if row_format is F32:
            # They stay where they are.
            assert addresses[-1] == address_of(rows)
            return rows.view(np.float32).copy()
        assert addresses[0] == address_of(out)
        return out[::-1].copy()

    return call


def as_tensor(rows: Bytes, row_format: RowFormat) -> Tensor:
    dtype = empty_rows(0, 1, 2, row_format, CPU).dtype
    return torch.from_numpy(rows.copy()).view(dtype)


def samples(dim: int, seed: int = 4) -> Floats:
    """Rows of several sizes, with outliers, zeros, ties, and subnormal scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, dim)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-2, 3, (40, 1)).astype(np.float32)
    x[1, rng.integers(dim)] *= 50
    x[2] = 0
    x[3, ::2] = 0
    # The largest is as far from 0 on both sides; halves of steps.
    x[4] = np.resize(np.arange(-16, 17), dim)
    x[5] *= np.float32(1e-6)
    x[6] = -np.float32(3.5)
    x[7] *= np.float32(1e-9)
    return x


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_both_ways_write_the_same(
    encode: Callable[[Floats, RowFormat], Bytes],
    decode: Callable[[Bytes, RowFormat, int], Floats],
    name: str,
    dim: int,
) -> None:
    """To the bit, but for the codes of groups that are 0 or not numbers, which nobody sees; and read it to
    the same floats."""
    row_format, x = FORMATS[name], samples(dim)
    rows = encode(x, row_format)
    by_torch = encoded(torch.from_numpy(x), row_format)
    assert by_torch.shape == empty_rows(len(x), 1, dim, row_format, CPU)[:, 0].shape
    assert rows.shape == (len(x), row_format.row_bytes(dim)) == (*by_torch.shape[:1], by_torch[0].nbytes)
    values = decode(rows, row_format, dim)
    assert np.array_equal(values, decoded(by_torch, row_format, dim).numpy())
    assert np.array_equal(values, decoded(as_tensor(rows, row_format), row_format, dim).numpy())
    seen = slice(8, None)
    assert torch.equal(as_tensor(rows, row_format)[seen], by_torch[seen])
    # As they lie in stores, with rows picked.
    shaped = by_torch.view(20, 2, -1)[torch.tensor([7, 3, 3])]
    assert np.array_equal(decoded(shaped, row_format, dim).numpy(), values.reshape(20, 2, dim)[[7, 3, 3]])


def steps(x: Floats, row_format: RowFormat, highest: int) -> Floats:
    """The step of the group of each value."""
    sizes = np.empty_like(x)
    for first in range(0, x.shape[1], row_format.scaled):
        group = slice(first, first + row_format.scaled)
        sizes[:, group] = np.abs(x[:, group]).max(1, keepdims=True) / highest
    return sizes


@pytest.mark.parametrize("dim", DIMS)
def test_errors_are_half_a_step(
    encode: Callable[[Floats, RowFormat], Bytes], decode: Callable[[Bytes, RowFormat, int], Floats], dim: int
) -> None:
    """Of INT8; of INT4 a whole one where a value is nearly as far from 0 as the farthest, on the other side.
    A little more for the rounding of scales, which are no finer than 2^-24; of F16 a part in 2048."""
    x = samples(dim)
    error = {
        name: np.abs(decode(encode(x, row_format), row_format, dim) - x)
        for name, row_format in FORMATS.items()
    }
    assert not error["F32"].any()
    assert (error["F16"] <= np.abs(x) / 2048 + 2.0**-25).all()
    step = steps(x, INT8, 127)
    assert (error["INT8"] <= 0.5 * step * (1 + 127 / 1024) + 127 * 2.0**-24).all()
    step = steps(x, INT4, 8)
    assert (error["INT4"] <= step * (1 + 8 / 1024) + 8 * 2.0**-24).all()
    inside = np.abs(x) <= 7.4 * step
    assert (error["INT4"][inside] <= (0.5 * step * (1 + 8 / 1024) + 8 * 2.0**-24)[inside]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["F16", "INT8", "INT4"])
def test_what_is_no_number_is_not_hidden(
    encode: Callable[[Floats, RowFormat], Bytes],
    decode: Callable[[Bytes, RowFormat, int], Floats],
    name: str,
    bad: float,
) -> None:
    """Its group is NaN, or it is itself where values have no group; other groups are what they were."""
    row_format, dim = FORMATS[name], 160
    x = samples(dim)[8:]
    before = decode(encode(x, row_format), row_format, dim)
    x[3, 70] = bad
    rows = encode(x, row_format)
    values = decode(rows, row_format, dim)
    by_torch = decoded(encoded(torch.from_numpy(x), row_format), row_format, dim).numpy()
    assert np.array_equal(values, by_torch, equal_nan=True)
    hit = np.zeros(x.shape, bool)
    if row_format is F16:
        hit[3, 70] = True
        assert np.isnan(values[3, 70]) if np.isnan(bad) else values[3, 70] == np.sign(bad) * np.inf
    else:
        first = 70 // row_format.scaled * row_format.scaled
        hit[3, first : first + row_format.scaled] = True
        assert np.isnan(values[hit]).all()
    assert np.array_equal(values[~hit], before[~hit])


def test_halves() -> None:
    """All of them, and what lies between them, as numpy has it."""
    to_floats = compile_kernel(_halves, "test_halves", INTEGER, INTEGER, INTEGER)
    to_halves = compile_kernel(_to_halves, "test_to_halves", INTEGER, INTEGER, INTEGER)
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = np.empty(len(bits), np.float32)
    to_floats(address_of(bits), address_of(values), len(bits))
    assert np.array_equal(values, bits.view(np.float16).astype(np.float32), equal_nan=True)
    finite = np.sort(values[np.isfinite(values)])
    between = (finite[1:] + finite[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            values,
            between,
            np.nextafter(between, np.float32(np.inf)),
            np.nextafter(between, np.float32(-np.inf)),
            rng.standard_normal(1000).astype(np.float32) * 1e-7,
            np.array([65519, 65520, -65520, 1e6, 3e38, 1e-40, 0, -0.0], np.float32),
        ]
    ).astype(np.float32)
    got = np.empty(len(x), np.uint16)
    to_halves(address_of(x), address_of(got), len(x))
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    numbers = ~np.isnan(x)
    assert np.array_equal(got[numbers], want.view(np.uint16)[numbers])
    assert np.isnan(got.view(np.float16)[~numbers]).all()


def test_sizes() -> None:
    """With scales, and an even number of bytes; of the real model's heads of 256."""
    assert [row_format.row_bytes(256) for row_format in FORMATS.values()] == [1024, 512, 264, 144]
    assert [INT8.row_bytes(dim) for dim in (2, 15, 64, 65)] == [4, 18, 66, 70]
    assert [INT4.row_bytes(dim) for dim in (2, 15, 32, 64)] == [4, 10, 18, 36]
    assert KV_FORMATS["k8v4"].position_bytes(2, 256) == 2 * (264 + 144)
    assert {kv_format(kv_type) for kv_type in KV_TYPES} == set(KV_FORMATS.values())
    assert kv_format("auto") is KV_FORMATS["f32"]
