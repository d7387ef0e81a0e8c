"""The cache of n-gram rows, seen through those who use it: exact whatever happens, bounded, and it keeps what
is used."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig, read_model_config
from stager.ngram_hash import NgramHash
from stager.ngram_rows import RowReader, open_rows
from stager.ngram_table import NgramTable, TableOptions
from stager.read_queue import NO_FAULTS, Faults, ReadQueue
from tests.support.tiny_model import tiny_model

ROUNDS = 60
BYTES_A_PLACE = 2 * 32 + 12
"""Of a row of 32 float16."""


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    return np.random.default_rng(0).integers(-127, 128, (4000, 32)).astype(np.float32)


@pytest.fixture(scope="module")
def opened(
    values: NDArray[np.float32], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GGUFModel, NgramConfig]]:
    model = tiny_model()
    table = model.tensors["per_layer_token_embd.weight"]
    table.shape, table.type_name, table.data = values.shape, "F16", values.astype(np.float16).tobytes()
    path: Path = model.write(tmp_path_factory.mktemp("cache") / "tiny.gguf")
    with GGUFModel(path) as file:
        ngram = read_model_config(file).ngram
        assert ngram is not None
        yield file, ngram


def some_windows(rng: np.random.Generator, most_tokens: int, ngram: NgramConfig) -> NDArray[np.int32]:
    num_tokens = int(rng.integers(1, most_tokens + 1))
    return rng.integers(0, 60, (num_tokens, ngram.ngram_size)).astype(np.int32)


def open_pair(
    opened: tuple[GGUFModel, NgramConfig], cache_bytes: int, faults: Faults
) -> tuple[NgramTable, list[RowReader]]:
    """Two readers of one table, one of which only fills the cache."""
    model, ngram = opened
    table = NgramTable(model, TableOptions("direct", cache_bytes, 8, faults))
    readers = [
        RowReader(table, ngram, ReadQueue(8, faults), 32, is_staging=is_staging)
        for is_staging in (False, True)
    ]
    return table, readers


@pytest.mark.parametrize("num_places", [8, 64, 4096])
@pytest.mark.parametrize("faults", [NO_FAULTS, Faults(fail_every=7), Faults(delay_s=0.0005)])
def test_it_is_exact_whoever_uses_it(
    opened: tuple[GGUFModel, NgramConfig], values: NDArray[np.float32], num_places: int, faults: Faults
) -> None:
    """A step and a prompt that is staged ask for the same rows at the same time, which evict each other, are
    waited for, and fail: every token has its rows or says that it has not, and nobody waits for ever."""
    ngram = opened[1]
    table, (serving, staging) = open_pair(opened, num_places * BYTES_A_PLACE, faults)
    ngram_hash, stop = NgramHash(ngram), threading.Event()

    def stage() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            staging.stage(some_windows(rng, 32, ngram))

    thread = threading.Thread(target=stage)
    thread.start()
    rng = np.random.default_rng(2)
    num_failed = 0
    try:
        for _ in range(ROUNDS):
            windows = some_windows(rng, 32, ngram)
            features = serving.features(windows)
            is_well = serving.counts_of_tokens["failures"][: len(windows)] == 0
            rows = ngram_hash.rows(windows)
            assert np.array_equal(features[is_well], values[rows].reshape(len(windows), -1)[is_well])
            num_failed += int((~is_well).sum())
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert table.cache is not None
    assert table.cache.num_present <= num_places
    assert (num_failed > 0) <= (faults.fail_every > 0)
    for reader in (serving, staging):
        reader.close()
    table.close()


def test_staged_rows_need_no_reads(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """The step finds all of them."""
    table, (serving, staging) = open_pair(opened, 1 << 20, NO_FAULTS)
    windows = some_windows(np.random.default_rng(0), 32, opened[1])
    staging.stage(windows)
    serving.features(windows)
    assert serving.queue.counts.num_reads == 0
    assert serving.num_hits == serving.num_rows == windows.shape[0] * serving.num_heads
    assert staging.num_hits < staging.num_rows
    for reader in (serving, staging):
        reader.close()
    table.close()


def test_what_is_used_stays(opened: tuple[GGUFModel, NgramConfig]) -> None:
    """A token that comes back in every step is read once, while others pass through; the cache stays as large
    as it was made."""
    num_places = 64
    with open_rows(*opened, TableOptions("direct", num_places * BYTES_A_PLACE, 8, NO_FAULTS), 8) as reader:
        rng = np.random.default_rng(0)
        hot = np.full((1, 3), 7, np.int32)
        reader.features(hot)
        hits = 0
        for _ in range(200):
            reader.features(rng.integers(8, 60, (2, 3)).astype(np.int32))
            reader.features(hot)
            hits += int(reader.counts_of_tokens["hits"][0])
        # Sets of eight places overflow by chance; places taken in any other order would lose most of it.
        assert hits >= 0.95 * 200 * reader.num_heads
        cache = reader.table.cache
        assert cache is not None
        assert cache.num_present <= cache.num_places == num_places
        assert cache.num_evicted > 0
