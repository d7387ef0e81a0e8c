"""Rows of the n-gram table where the file maps it."""

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig, read_model_config
from shared.work_slots import NgramHeader, ngram_ring
from stager.ngram_hash import NgramHash, windows_of
from stager.ngram_table import NgramTable
from stager.worker import NgramReader
from tests.support.tiny_model import tiny_model

NUM_ROWS = 4000
WIDTH = 32


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    """What the table holds, exact in every type that is used here."""
    return np.random.default_rng(0).integers(-127, 128, (NUM_ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(params=["F32", "F16", "Q8_0"])
def opened(
    request: pytest.FixtureRequest, values: NDArray[np.float32], tmp_path: Path
) -> Iterator[tuple[GGUFModel, NgramConfig]]:
    """A model whose table spans many pages."""
    model = tiny_model()
    table = model.tensors["per_layer_token_embd.weight"]
    table.shape, table.type_name = values.shape, request.param
    match request.param:
        case "F32":
            table.data = values.tobytes()
        case "F16":
            table.data = values.astype(np.float16).tobytes()
        case "Q8_0":
            scale = np.full((NUM_ROWS, 1), 1, np.float16).view(np.uint8)
            table.data = np.hstack([scale, values.astype(np.int8).view(np.uint8)]).tobytes()
    with GGUFModel(model.write(tmp_path / "tiny.gguf")) as file:
        ngram = read_model_config(file).ngram
        assert ngram is not None
        yield file, ngram


def test_features(opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32]) -> None:
    """The rows of each token side by side, in the order of the heads; rows that occur twice, the first and
    the last of the table."""
    table = NgramTable(*opened)
    rows = np.array([[3, 0, NUM_ROWS - 1, 3], [0, 0, 0, 0], [17, 3, 2000, 1]])
    assert np.array_equal(table.features(rows), values[rows].reshape(3, 4 * WIDTH))
    assert table.features(rows[:0]).shape == (0, 4 * WIDTH)
    del table


def test_bring_near(opened: tuple[GGUFModel, NgramConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the pages of the rows are asked for, each once, neighbours together: more would read the disk
    for nothing, fewer would leave a page fault to the step that waits."""
    model, ngram = opened
    info, file = model.info("per_layer_token_embd.weight"), model.home("per_layer_token_embd.weight")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(file, "will_need", lambda start, num_bytes: asked.append((start, num_bytes)))
    table = NgramTable(model, ngram)
    rows = np.array([[3, 0, NUM_ROWS - 1, 3], [2001, 2000, 0, 1]])
    assert table.bring_near(rows) == len(asked)
    row_bytes = info.num_bytes // NUM_ROWS
    needed = {
        page
        for row in rows.reshape(-1).tolist()
        for page in range(
            (info.offset + row * row_bytes) // mmap.PAGESIZE,
            (info.offset + (row + 1) * row_bytes - 1) // mmap.PAGESIZE + 1,
        )
    }
    pages = [
        page
        for start, num_bytes in asked
        for page in range(start // mmap.PAGESIZE, (start + num_bytes) // mmap.PAGESIZE)
    ]
    assert sorted(pages) == sorted(needed)
    assert all(start % mmap.PAGESIZE == 0 for start, _ in asked)
    gaps = [after[0] - sum(before) for before, after in pairwise(asked)]
    assert all(gap > 0 for gap in gaps), "ranges that touch are one"
    del table


def test_bring_near_reaches_the_kernel(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """The advice itself is accepted, for the last row of the file too."""
    table = NgramTable(*opened)
    assert table.bring_near(np.array([[0, 1, NUM_ROWS - 2, NUM_ROWS - 1]])) == 2
    del table


def test_reader(opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32]) -> None:
    """A slot of the ring: windows in, features out for the tokens of the step only, the time back."""
    model, ngram = opened
    shape = ngram_ring(ngram, 5)
    slot = {name: np.zeros(extents, dtype) for name, (dtype, extents) in shape.arrays.items()}
    slot["features"][:] = 7
    slot["windows"][:3] = windows_of(np.array([4, 5, 6], np.int32), ngram.ngram_size)
    slot["header"][NgramHeader.NUM_TOKENS] = 3
    table, ngram_hash = NgramTable(model, ngram), NgramHash(ngram)
    NgramReader(table, ngram_hash)(slot)
    expected = values[ngram_hash.rows(slot["windows"][:3])].reshape(3, -1)
    assert np.array_equal(slot["features"][:3], expected)
    assert (slot["features"][3:] == 7).all()
    assert slot["header"][NgramHeader.SERVE_NS] > 0
    del table
