"""Which positions a query sees, against the definition taken literally."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.model.batch import Span
from gpu_worker.model.indexer import Indexer
from gpu_worker.model.rotary import Rotary
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.model_config import IndexerConfig
from shared.window import WINDOW_TOKENS
from tests.support.prepared import Prepared
from tests.support.tensor_device import TensorDevice

LAYER = 3
NUM_TOKENS = 90


@dataclass(frozen=True, slots=True)
class Setting:
    """An indexer with random weights, and the inputs of one sequence."""

    indexer: Indexer
    x: Tensor
    queries: Tensor
    new_state: Callable[[], SequenceState]
    definition: Callable[[int], tuple[np.ndarray, int]]
    """Of a position: the exact score of every complete block, and how many are kept."""


@pytest.fixture(params=[(4, 32, 4), (4, 16, 8), (1, 8, 8), (2, 6, 2), (8, 5, 1), (3, 9, 3)], ids=str)
def setting(prepare: Callable[[str], Prepared], request: pytest.FixtureRequest) -> Setting:
    num_heads, budget, ratio = request.param
    dim = 16
    plain = prepare("plain").model.config
    config = replace(
        plain,
        rope_dim=8,
        indexer=IndexerConfig(num_heads, dim, budget),
        compress_ratios=tuple(ratio for _ in plain.compress_ratios),
    )
    generator = torch.Generator().manual_seed(num_heads + ratio)
    weights = {
        "q_proj": torch.randn(num_heads * dim, config.hidden, generator=generator),
        "k_proj": torch.randn(dim, config.hidden, generator=generator),
        "q_norm": torch.rand(dim, generator=generator) + 0.5,
        "k_norm": torch.rand(dim, generator=generator) + 0.5,
    }
    device = TensorDevice({f"blk.{LAYER}.indexer.{name}.weight": value for name, value in weights.items()})
    rotary = Rotary(config.rope_dim, config.rope_base, config.rope_scaling, device.torch_device)
    indexer = Indexer(device, LAYER, config, rotary)
    x = torch.randn(NUM_TOKENS, config.hidden, generator=generator)

    exact_x = x.double().numpy()
    exact = {name: value.double().numpy() for name, value in weights.items()}

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        half = config.rope_dim // 2
        angle = position * config.rope_base ** (-np.arange(half) / half)
        first, second = vector[:half].copy(), vector[half : 2 * half].copy()
        turned = [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
        return np.concatenate([*turned, vector[2 * half :]])

    def normed(vector: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return vector / np.sqrt((vector**2).mean() + config.rms_epsilon) * weight

    def definition(position: int) -> tuple[np.ndarray, int]:
        heads = (exact["q_proj"] @ exact_x[position]).reshape(num_heads, dim)
        queries = [rotated(normed(head, exact["q_norm"]), position) for head in heads]
        scores = []
        for block in range((position + 1) // ratio):
            members = exact_x[block * ratio : (block + 1) * ratio] @ exact["k_proj"].T
            key = rotated(normed(members.mean(0), exact["k_norm"]), block * ratio)
            scores.append(sum(max(0.0, float(query @ key)) for query in queries) / dim**0.5)
        return np.array(scores), min(budget // ratio, len(scores))

    return Setting(
        indexer,
        x,
        indexer.queries(x, rotary.at(torch.arange(NUM_TOKENS))),
        lambda: SequenceState(config, PagePool(config, device.torch_device)),
        definition,
    )


def append(setting: Setting, start: int, stop: int, state: SequenceState) -> None:
    state.reserve(state.position + stop - start)
    raw_keys = setting.indexer.project_keys(setting.x[start:stop])
    setting.indexer.append_keys(raw_keys, Span(0, stop - start, state))
    state.advance(stop - start)


def filled(setting: Setting, num_tokens: int, pieces: tuple[int, ...] = ()) -> SequenceState:
    """The state after some tokens, taken in pieces."""
    state, at = setting.new_state(), 0
    for size in [*pieces, num_tokens]:
        stop = min(at + size, num_tokens)
        if stop > at:
            append(setting, at, stop, state)
        at = stop
    return state


def assert_as_defined(setting: Setting, position: int, seen: set[int]) -> None:
    """The kept blocks score best; where that leaves a choice among equals, any will do."""
    ratio = setting.indexer.ratio
    scores, num_kept = setting.definition(position)
    num_blocks = len(scores)
    tail = set(range(num_blocks * ratio, position + 1))
    assert tail <= seen
    kept = sorted({place // ratio for place in seen - tail})
    assert len(seen) == len(kept) * ratio + len(tail), "a block is seen as a whole or not at all"
    assert len(kept) == num_kept
    dropped = [block for block in range(num_blocks) if block not in kept]
    if kept and dropped:
        assert scores[kept].min() >= scores[dropped].max() - 1e-5


def test_mask_for_many_queries(setting: Setting) -> None:
    """A prompt in one chunk: each query sees its own positions and nothing later."""
    state = filled(setting, NUM_TOKENS)
    mask = setting.indexer.seen_mask(setting.queries, 0, state)
    assert mask.shape == (NUM_TOKENS, NUM_TOKENS)
    for position in range(NUM_TOKENS):
        assert_as_defined(setting, position, set(mask[position].nonzero().flatten().tolist()))


def test_mask_in_the_middle(setting: Setting) -> None:
    """Queries of a later chunk, beginning and ending inside a block, see what they see in one go."""
    whole = setting.indexer.seen_mask(setting.queries, 0, filled(setting, NUM_TOKENS))
    state = filled(setting, 77, (1, 1, 10, 31))
    mask = setting.indexer.seen_mask(setting.queries[43:77], 43, state)
    assert torch.equal(mask, whole[43:77, :77])


def test_positions_for_one_query(setting: Setting) -> None:
    """Decoding sees what reading the prompt sees, in rising order."""
    whole = setting.indexer.seen_mask(setting.queries, 0, filled(setting, NUM_TOKENS))
    state = setting.new_state()
    for position in range(NUM_TOKENS):
        # What is taken back is not seen.
        append(setting, 0, min(WINDOW_TOKENS, NUM_TOKENS), state)
        state.roll_back(position)
        append(setting, position, position + 1, state)
        state.roll_back(position)
        query = setting.queries[position : position + 1]
        seen = setting.indexer.seen_positions(query, Span(0, 1, state))
        state.advance(1)
        assert torch.equal(seen, whole[position].nonzero().flatten())


def test_when_blocks_are_dropped(setting: Setting) -> None:
    """Below that position the work of choosing is spared, so it must be exactly the first that matters."""
    mask = setting.indexer.seen_mask(setting.queries, 0, filled(setting, NUM_TOKENS))
    for position in range(NUM_TOKENS):
        sees_everything = bool(mask[position, : position + 1].all())
        assert setting.indexer.drops_blocks(position) == (not sees_everything)
