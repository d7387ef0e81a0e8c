"""The n-gram table of a model file: how it is chosen to be read, and that its rows are its rows."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.errors import ModelFileError, ResourceError
from shared.gguf.model import GGUFModel
from shared.memory_budget import Memory
from shared.model_config import NgramConfig, read_model_config
from shared.work_slots import NgramHeader, ngram_ring
from stager import ngram_table
from stager.ngram_hash import NgramHash, windows_of
from stager.ngram_rows import RowReader, open_rows
from stager.ngram_table import NgramTable, TableOptions, Way
from stager.probe import ProbedRates
from stager.read_queue import NO_FAULTS, Faults
from stager.worker import NgramSlots
from tests.support.tiny_model import tiny_model

NUM_ROWS = 4000
WIDTH = 32
SMALL_CACHE = 1 << 14


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    """What the table holds, exact in every type that is used here."""
    return np.random.default_rng(0).integers(-127, 128, (NUM_ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(params=["F32", "F16", "Q8_0"])
def path(request: pytest.FixtureRequest, values: NDArray[np.float32], tmp_path: Path) -> Path:
    """A model whose table spans many pages, with rows that reach from one to the next."""
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
    return model.write(tmp_path / "tiny.gguf")


@pytest.fixture
def opened(path: Path) -> Iterator[tuple[GGUFModel, NgramConfig]]:
    with GGUFModel(path) as file:
        ngram = read_model_config(file).ngram
        assert ngram is not None
        yield file, ngram


def options(io: str, cache_bytes: int | None = SMALL_CACHE, faults: Faults = NO_FAULTS) -> TableOptions:
    return TableOptions(io, cache_bytes, depth=8, faults=faults)


@pytest.fixture(params=["ram", "direct", "mmap"])
def rows(request: pytest.FixtureRequest, opened: tuple[GGUFModel, NgramConfig]) -> Iterator[RowReader]:
    """Every way of reading, with a cache for about a hundred rows."""
    with open_rows(*opened, options(request.param), 64) as reader:
        yield reader


def expected(
    windows: NDArray[np.int32], values: NDArray[np.float32], ngram: NgramConfig
) -> NDArray[np.float32]:
    rows = NgramHash(ngram).rows(windows)
    return values[rows].reshape(len(windows), rows.shape[1] * WIDTH)


def test_features(
    rows: RowReader, opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32]
) -> None:
    """The rows of each token side by side, in the order of the heads: of steps of any size, of tokens that
    occur again, beyond what the cache holds."""
    ngram = opened[1]
    rng = np.random.default_rng(0)
    for num_tokens in [0, 1, 1, 2, 40, 64, 3, 64]:
        windows = rng.integers(-1, 300, (num_tokens, ngram.ngram_size)).astype(np.int32)
        windows[:, 0] = np.abs(windows[:, 0])
        assert np.array_equal(rows.features(windows), expected(windows, values, ngram))
    assert not rows.counts_of_tokens["failures"].any()


def test_what_came_from_where(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """Rows are read once; a second time they are in the cache. What is counted for tokens adds up to what the
    queue has done."""
    with open_rows(*opened, options("direct", 1 << 20), 8) as reader:
        windows = windows_of(np.arange(10, 17, dtype=np.int32), opened[1].ngram_size)
        windows = np.ascontiguousarray(windows)
        reader.features(windows)
        counts, queue = reader.counts_of_tokens, reader.queue.counts
        num_rows = len(np.unique(NgramHash(opened[1]).rows(windows)))
        assert counts["hits"].sum() + num_rows <= windows.shape[0] * reader.num_heads
        assert counts["reads"].sum() == queue.num_reads > 0
        assert counts["read_bytes"].sum() == queue.num_bytes
        reader.features(windows)
        assert counts["hits"][:7].tolist() == [reader.num_heads] * 7
        assert counts["reads"].sum() == counts["read_bytes"].sum() == 0
        assert reader.queue.counts == queue


def test_rows_of_one_page_come_with_one_read(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """No more reads than pages, but for rows that reach over the end of one."""
    model, ngram = opened
    with open_rows(model, ngram, options("direct", 1 << 20), 200) as reader:
        rng = np.random.default_rng(0)
        windows = rng.integers(0, 300, (200, ngram.ngram_size)).astype(np.int32)
        reader.features(windows)
        num_bytes = model.info("per_layer_token_embd.weight").num_bytes
        assert reader.queue.counts.num_bytes <= 2 * num_bytes + 8192


def test_failing_reads_cost_their_tokens(
    opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32]
) -> None:
    """Their features are zeros, and their errno is told; other tokens of the step have theirs, and the next
    step reads again what failed."""
    ngram = opened[1]
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 300, (60, ngram.ngram_size)).astype(np.int32)
    with open_rows(*opened, options("direct", 1 << 20, Faults(fail_every=2)), 64) as reader:
        features = reader.features(windows)
        failures = reader.counts_of_tokens["failures"][:60]
        assert set(failures.tolist()) == {0, 5}
        is_well = failures == 0
        assert np.array_equal(features[is_well], expected(windows, values, ngram)[is_well])
        heads = features.reshape(60, reader.num_heads, WIDTH)
        assert (~heads.any(axis=2))[~is_well].any(axis=1).all()
        for _ in range(20):
            features = reader.features(windows)
            if not reader.counts_of_tokens["failures"].any():
                break
        assert np.array_equal(features, expected(windows, values, ngram))


def test_a_truncated_file(path: Path, opened: tuple[GGUFModel, NgramConfig]) -> None:
    """Rows behind its end fail; the process lives."""
    for io in ("direct", "mmap"):
        with open_rows(*opened, options(io), 64) as reader, path.open("r+b") as file:
            content = path.read_bytes()
            file.truncate(opened[0].info("per_layer_token_embd.weight").offset + 4096)
            windows = np.arange(128 * 3, dtype=np.int32).reshape(-1, 3)[:64].copy()
            reader.features(windows)
            assert set(reader.counts_of_tokens["failures"].tolist()) <= {0, 61}
            assert reader.counts_of_tokens["failures"].any()
            path.write_bytes(content)


def test_small_tables_are_loaded(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """Without a probe: there is nothing to choose."""
    table = NgramTable(opened[0], options("auto"))
    assert table.way is Way.MEMORY
    assert table.cache is None
    assert table.rates == {}
    assert table.capabilities() == {"ple_io": "ram", "io_depth": 8}
    table.close()


@pytest.mark.parametrize(
    ("direct", "cached", "way"),
    [(100.0, 100.0, "direct"), (85.0, 100.0, "direct"), (50.0, 100.0, "mmap"), (50.0, 0.0, "direct")],
)
def test_what_auto_chooses(
    opened: tuple[GGUFModel, NgramConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    direct: float,
    cached: float,
    way: str,
) -> None:
    """What was measured decides, at the depth that reading has. Choice and numbers are logged and told."""
    rates = iter([ProbedRates(2, cached), ProbedRates(1, direct)])
    monkeypatch.setattr(ngram_table, "probe_file", lambda *_: next(rates))
    monkeypatch.setattr(ngram_table, "SMALL_TABLE_BYTES", 0)
    with caplog.at_level(logging.INFO):
        table = NgramTable(opened[0], options("auto"))
    assert table.way == way
    told = table.capabilities()
    assert told["ple_io"] == way
    assert told["ple_probe_direct_1"] == 1
    assert told["ple_probe_direct_8"] == direct
    assert told["ple_probe_mapped_8"] == cached
    assert f"by {way}" in caplog.text
    assert f"direct 1 reads/s one at a time and {direct:.0f} at a depth of 8" in caplog.text
    table.close()


def test_the_real_probe(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """It measures something in both ways, and takes a delay for what it is."""
    table = NgramTable(opened[0], options("direct", faults=Faults(delay_s=0.005)))
    rates = table.rates[Way.DIRECT]
    assert 0 < rates.single <= 200
    assert 200 < rates.deep <= 8 * 200
    table.close()


def test_no_direct_io(opened: tuple[GGUFModel, NgramConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without it, as tmpfs was: auto goes without; who insists is told."""
    original = ngram_table.open_for_reading

    def refuse(path: Path, *, direct: bool) -> int:
        if direct:
            raise OSError(22, "Invalid argument")
        return original(path, direct=direct)

    monkeypatch.setattr(ngram_table, "open_for_reading", refuse)
    monkeypatch.setattr(ngram_table, "SMALL_TABLE_BYTES", 0)
    table = NgramTable(opened[0], options("auto"))
    assert table.way is Way.CACHED
    table.close()
    with pytest.raises(ResourceError, match=r"--ple-io is direct, but .*; use auto or mmap"):
        NgramTable(opened[0], options("direct"))


def test_no_memory_for_the_table(
    opened: tuple[GGUFModel, NgramConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading is refused before it begins, with both sizes and what else there is."""
    monkeypatch.setattr(ngram_table, "read_memory", lambda: Memory(1 << 30, 64 << 20))
    with pytest.raises(ResourceError, match=r"--ple-io is ram, but .* use auto, direct or mmap"):
        NgramTable(opened[0], options("ram"))


def test_no_memory_for_the_cache(
    opened: tuple[GGUFModel, NgramConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clearly."""
    monkeypatch.setattr(ngram_table, "read_memory", lambda: Memory(1 << 30, 1 << 12))
    with pytest.raises(ResourceError, match=r"the cache of n-gram rows takes .*; set --ple-cache-mib lower"):
        NgramTable(opened[0], options("direct"))


def test_a_table_that_cannot_be_read(opened: tuple[GGUFModel, NgramConfig], path: Path) -> None:
    """Cut off between opening the model and reading it."""
    with path.open("r+b") as file:
        file.truncate(opened[0].info("per_layer_token_embd.weight").offset)
    for io in ("ram", "direct"):
        with pytest.raises(ModelFileError, match="cannot be read"):
            NgramTable(opened[0], options(io))


def test_slots(rows: RowReader, opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32]) -> None:
    """A slot of the ring, in Python: windows in, features out for the tokens of the step only, and how they
    came."""
    ngram = opened[1]
    shape = ngram_ring(ngram, 5)
    slot = {name: np.zeros(extents, dtype) for name, (dtype, extents) in shape.arrays.items()}
    slot["features"][:] = 7
    slot["windows"][:3] = windows_of(np.array([4, 5, 6], np.int32), ngram.ngram_size)
    slot["header"][NgramHeader.NUM_TOKENS] = 3
    NgramSlots(rows)(slot)
    assert np.array_equal(slot["features"][:3], expected(slot["windows"][:3], values, ngram))
    assert (slot["features"][3:] == 7).all()
    assert slot["header"][NgramHeader.SERVE_NS] > 0
    assert (slot["hits"].sum() > 0) == (slot["reads"].sum() == 0)
