"""What is kept of conversations: which prompt goes on from where, what has to go, and what is told of it."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from gpu_worker.conversations import MIN_TOKENS, ConversationCache
from gpu_worker.state.checkpoint import Checkpoint
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig, read_model_config
from tests.support.tiny_model import tiny_model

MANY = 1 << 30


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Qwen4ExpConfig:
    path = tiny_model().write(tmp_path_factory.mktemp("model") / "tiny.gguf")
    return read_model_config(GGUFModel(path))


class Conversations:
    """A cache, and sequences that have computed nothing but say so."""

    def __init__(self, config: Qwen4ExpConfig, max_bytes: int = MANY) -> None:
        self._config = config
        self.pool = PagePool(config, torch.device("cpu"))
        self.cache = ConversationCache(self.pool, max_bytes)

    def state(self, length: int) -> SequenceState:
        """One of so many tokens."""
        state = SequenceState(self._config, self.pool)
        state.reserve(length)
        state.advance(length)
        return state

    def keep(self, token_ids: Sequence[int], salt: str = "") -> None:
        """The end of a sequence."""
        self.cache.keep_end(token_ids, self.state(len(token_ids)), salt)

    def reused(self, token_ids: Sequence[int], salt: str = "") -> int:
        """How many tokens of a prompt are there."""
        return self.cache.find(token_ids, salt).num_tokens


@pytest.fixture
def conversations(config: Qwen4ExpConfig) -> Conversations:
    return Conversations(config)


def tokens(*parts: tuple[int, int]) -> list[int]:
    """Runs of a token id."""
    return [token_id for token_id, count in parts for _ in range(count)]


def test_the_longest_beginning(conversations: Conversations) -> None:
    """Of several that are kept; what is beyond the prompt's last token but one is no use."""
    first, second = tokens((1, 40)), tokens((1, 40), (2, 40))
    conversations.keep(first)
    conversations.keep(second)
    assert conversations.reused([*second, 3]) == 80
    assert conversations.reused(second) == 40
    assert conversations.reused([*second[:79], 9, 9]) == 40
    assert conversations.reused(first) == 0
    assert conversations.reused([*first, 1]) == 40
    assert conversations.reused([2, *first]) == 0


def test_clients_that_are_set_apart(conversations: Conversations) -> None:
    """Another salt finds nothing, and is not told that there is something."""
    conversations.keep(tokens((1, 40)), salt="a")
    assert conversations.reused(tokens((1, 41)), salt="a") == 40
    for salt in ("", "b"):
        reuse = conversations.cache.find(tokens((1, 41)), salt)
        assert (reuse.num_tokens, reuse.num_agreeing, reuse.why) == (0, 0, "nothing is kept yet")


def test_what_saves_too_little_is_not_kept(conversations: Conversations) -> None:
    """Neither a short beginning nor one that is hardly longer than another."""
    conversations.keep(tokens((1, MIN_TOKENS - 1)))
    assert len(conversations.cache) == 0
    for length in (40, 40, 41, 40 + MIN_TOKENS - 1):
        conversations.keep(tokens((1, length)))
        assert len(conversations.cache) == 1
    conversations.keep(tokens((1, 40 + MIN_TOKENS)))
    assert len(conversations.cache) == 2


def test_the_least_recently_used_goes_first(config: Qwen4ExpConfig) -> None:
    """And its memory with it; pages that others share stay."""
    one = Conversations(config)
    one.keep(tokens((1, 40)))
    conversations = Conversations(config, 3 * one.cache.num_bytes)
    for token_id in (1, 2, 3):
        conversations.keep(tokens((token_id, 40)))
    assert conversations.pool.num_pages == 3
    assert conversations.reused(tokens((1, 41))) == 40
    conversations.keep(tokens((4, 40)))
    assert conversations.cache.num_bytes <= 3 * one.cache.num_bytes
    assert conversations.pool.num_pages == 3
    assert [conversations.reused(tokens((token_id, 41))) for token_id in (1, 2, 3, 4)] == [40, 0, 40, 40]
    assert conversations.cache.num_evicted == 1
    why = conversations.cache.find(tokens((2, 41))).why
    assert why == "its first 40 tokens were kept, and had to go: --conversation-cache-mib was full"


def test_more_than_there_is_room_for(config: Qwen4ExpConfig) -> None:
    """One that does not fit at all is not kept; nothing is kept where nothing may be."""
    for max_bytes in (1000, 0):
        conversations = Conversations(config, max_bytes)
        conversations.keep(tokens((1, 40)))
        assert len(conversations.cache) == conversations.cache.num_bytes == conversations.pool.num_pages == 0
    assert conversations.cache.wanted(tokens((1, 100)), [50]) == []
    assert conversations.cache.find([1, 2]).why == "nothing is kept: --conversation-cache-mib is 0"


def test_one_that_is_too_large_drives_out_nobody(config: Qwen4ExpConfig) -> None:
    """It is not kept itself, and what it is told next time is why."""
    one = Conversations(config)
    one.keep(tokens((1, 40)))
    conversations = Conversations(config, 3 * one.cache.num_bytes)
    conversations.keep(tokens((1, 40)))
    conversations.keep(tokens((2, 40)))
    conversations.keep(tokens((3, 2000)))
    assert [conversations.reused(tokens((token_id, 41))) for token_id in (1, 2)] == [40, 40]
    assert conversations.cache.num_evicted == 0
    why = conversations.cache.find(tokens((3, 2001))).why
    assert why.startswith("its first 2000 tokens were kept, and had to go")


def test_bytes_are_those_of_pages_and_copies(conversations: Conversations) -> None:
    """A page that two checkpoints have counts once."""
    token_ids = tokens((1, 200))
    state = conversations.state(200)
    conversations.cache.keep(token_ids, Checkpoint.of(state))
    copied = Checkpoint.of(state).num_bytes
    page_bytes = conversations.pool.page_bytes
    assert conversations.cache.num_bytes == copied + 4 * 200 + 4 * page_bytes
    state.advance(50)
    state.reserve(250)
    token_ids += [2] * 50
    conversations.cache.keep(token_ids, Checkpoint.of(state))
    assert conversations.cache.num_bytes == 2 * copied + 4 * (200 + 250) + 4 * page_bytes
    conversations.cache.clear()
    assert conversations.cache.num_bytes == 0
    del state
    assert conversations.pool.num_pages == 0


def test_where_checkpoints_are_wanted(conversations: Conversations) -> None:
    """At the end of the first message, and before the last two; far enough from each other and from what is
    there; where no messages are known, before the last token."""
    wanted = conversations.cache.wanted
    prompt = list(range(1000))
    assert wanted(prompt, [100, 300, 500, 700, 900]) == [100, 700, 900]
    assert wanted(prompt, [5, 990]) == [990]
    assert wanted(prompt, [100, 105]) == [105]
    assert wanted(prompt, [0, 1000, 2000]) == wanted(prompt, []) == [999]
    conversations.keep(prompt[:690])
    assert wanted(prompt, [100, 300, 500, 700, 900]) == [100, 900]
    assert wanted(prompt[:10], []) == []


def test_checkpoints_of_long_prompts(config: Qwen4ExpConfig) -> None:
    """At intervals, where messages begin if that is near; of a bounded number."""
    conversations = Conversations(config)
    prompt = list(range(20_000))
    assert conversations.cache.wanted(prompt, [50, 8000, 19_000, 19_500]) == [
        50,
        4096,
        8000,
        12_288,
        16_384,
        19_000,
        19_500,
    ]
    few = Conversations(config, 8 * conversations.pool.state_bytes)
    assert few.cache.wanted(prompt, [19_500]) == [10_000, 19_500]


def test_why_it_was_not_more(conversations: Conversations) -> None:
    """Each case in words."""
    conversations.keep(tokens((1, 40), (2, 40)))
    conversations.keep(tokens((1, 20)))
    cases = {
        (3,) * 10: (0, "it differs from all that is kept from token 0 on"),
        tuple(tokens((1, 40), (2, 41))): (80, ""),
        tuple(tokens((1, 40), (3, 41))): (
            20,
            "40 tokens agree with what is kept; the last checkpoint is at 20",
        ),
        tuple(tokens((1, 10))): (0, "a longer conversation is kept, which has no checkpoint in this prompt"),
    }
    for prompt, (num_tokens, why) in cases.items():
        reuse = conversations.cache.find(prompt)
        assert (reuse.num_tokens, reuse.why) == (num_tokens, why)


def test_many_conversations(config: Qwen4ExpConfig) -> None:
    """Whatever is kept and goes, pages are neither lost nor shared by mistake, and the bound holds."""
    rng = torch.Generator().manual_seed(0)
    one = Conversations(config)
    one.keep(tokens((1, 100)))
    conversations = Conversations(config, 5 * one.cache.num_bytes)
    for number in range(200):
        first, second, length = torch.randint(0, 3, (3,), generator=rng).tolist()
        conversations.keep(tokens((first, 60), (second, 20 * length + 20), (number, 20)))
        assert conversations.cache.num_bytes <= 5 * one.cache.num_bytes
        conversations.reused(tokens((second, 60), (first, 70)))
    assert conversations.cache.num_evicted > 100
    kept_pages = list(itertools.chain.from_iterable(k.checkpoint.pages for k in conversations.cache._kept))
    assert conversations.pool.num_pages == len(set(kept_pages))
