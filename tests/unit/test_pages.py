"""Pages of keys and values: who has them, and how their memory grows and shrinks."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.state.pages import PAGE_TOKENS, STEP_TOKENS, PagePool, capacity_of, storage_bytes
from gpu_worker.state.sequence_state import SequenceState
from shared.gguf.model import GGUFModel
from shared.kv_format import KV_FORMATS, KvFormat
from shared.model_config import Qwen4ExpConfig, read_model_config
from tests.support.tiny_model import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Qwen4ExpConfig:
    path = tiny_model().write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return read_model_config(GGUFModel(path))


def test_pages_are_taken_and_come_back(config: Qwen4ExpConfig) -> None:
    """Each belongs to one holder, until nobody has it any more; lower numbers go first."""
    pool = PagePool(config, CPU)
    first, second = pool.take(3), pool.take(2)
    numbers = {page.number for page in first + second}
    assert numbers == set(range(5))
    assert pool.num_pages == 5
    shared = first[1]
    del first
    assert pool.num_pages == 3
    assert [page.number for page in pool.take(2)] == [0, 2]
    del shared
    assert pool.num_pages == 2
    assert {page.number for page in second} == {3, 4}


def test_what_stores_hold_stays_when_they_grow(config: Qwen4ExpConfig) -> None:
    """Rows keep their place and their content."""
    pool = PagePool(config, CPU)
    (page,) = pool.take(1)
    for store in pool.stores.values():
        store.keys[page.number * pool.page_tokens + 5] = 3.0
    many = pool.take(200)
    for store in pool.stores.values():
        assert (store.keys[page.number * pool.page_tokens + 5] == 3.0).all()
        assert len(store.keys) == len(store.values) >= 201 * pool.page_tokens
        assert len(store.block_keys) == len(store.keys) // store.ratio
    del many


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_stores_grow_in_steps_and_shrink(config: Qwen4ExpConfig, kv_format: KvFormat) -> None:
    """Twice as large while they are small, then by a step; what is planned with is what they take. What only
    free pages take is given back, as far as nobody has a page behind it."""
    assert [capacity_of(length) for length in (0, 1, 257, 8192, 8193)] == [0, 256, 512, 8192, 16384]
    pool = PagePool(config, CPU, kv_format)
    assert pool.num_bytes == 0
    held = []
    for length in (1, 300, 9000, 20000):
        state = SequenceState(config, pool)
        expected = pool.bytes_with(state.num_pages_for(length))
        state.reserve(length)
        assert pool.num_bytes == expected
        held.append(state)
        if len(held) == 1:
            assert pool.num_bytes == storage_bytes(config, length, kv_format)
        held = held[-1:]
        pool.trim()
        # Low pages may still be free.
        assert pool.num_bytes <= storage_bytes(config, 2 * max(length, STEP_TOKENS), kv_format)
    held.clear()
    del state
    pool.trim()
    assert pool.num_bytes == 0
    assert pool.num_pages == 0


def test_a_page_in_use_is_never_given_back(config: Qwen4ExpConfig) -> None:
    """Also where all before it are free."""
    pool = PagePool(config, CPU)
    pages = pool.take(10)
    last = pages[-1]
    store = next(iter(pool.stores.values()))
    store.values[last.number * pool.page_tokens] = 7.0
    del pages
    pool.trim()
    assert (store.values[last.number * pool.page_tokens] == 7.0).all()
    taken = pool.take(9)
    assert last.number not in {page.number for page in taken}


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_copied_pages(config: Qwen4ExpConfig, kv_format: KvFormat) -> None:
    """As many tokens as are wanted, with the keys of their blocks."""
    pool = PagePool(config, CPU, kv_format)
    source, target = pool.take(2)
    first, to = source.number * pool.page_tokens, target.number * pool.page_tokens
    for store in pool.stores.values():
        for rows in (store.keys, store.values, store.block_keys):
            rows.copy_(100 * torch.rand(rows.shape))
    pool.copy(source, target, 10)
    for store in pool.stores.values():
        assert torch.equal(store.keys[to : to + 10], store.keys[first : first + 10])
        assert not torch.equal(store.keys[to + 10], store.keys[first + 10])
        blocks = 10 // store.ratio
        got = store.block_keys[to // store.ratio :][:blocks]
        assert torch.equal(got, store.block_keys[first // store.ratio :][:blocks])


def test_blocks_lie_in_one_page(config: Qwen4ExpConfig) -> None:
    """Whatever their length; layers without an indexer have none."""
    ratios = iter((4, 3, 0, 5))
    mixed = replace(
        config,
        is_recurrent=tuple(False for _ in config.is_recurrent),
        compress_ratios=tuple(next(ratios, 0) for _ in config.compress_ratios),
    )
    pool = PagePool(mixed, CPU)
    assert pool.page_tokens == 120 >= PAGE_TOKENS
    state = SequenceState(mixed, pool)
    state.reserve(1000)
    rows = state.rows(1000)
    assert len(set(rows.tolist())) == 1000
    for ratio in (4, 3, 5):
        blocks = state.block_rows(1000 // ratio, ratio)
        assert torch.equal(blocks * ratio, rows[: len(blocks) * ratio : ratio])
