"""A sequence that goes on from a checkpoint computes what it would have computed by itself, to the bit.

Steps are of the same size on both sides, since kernels add up in another order in large steps.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from benchmarks.in_process import InProcessModel, RunningSequence
from gpu_worker.state.checkpoint import Checkpoint
from tests.support.model_cases import CASES
from tests.support.prepared import Prepared

# Within and at the end of pages of 64, blocks and chunks; far from the step's begin and near it.
CUTS = (1, 9, 64, 65, 70, 127, 128)
NUM_PROMPT = 150


def end_of(sequence: RunningSequence, model: InProcessModel, token_ids: Sequence[int]) -> np.ndarray:
    """The last logits after more tokens, all but three of them in one step, then one by one."""
    rest = list(token_ids[len(sequence.token_ids) :])
    model.step([(sequence, rest[:-3])])
    for token_id in rest[-3:]:
        (logits,) = model.step([(sequence, [token_id])])
    return logits[-1]


def with_snapshots(
    model: InProcessModel, token_ids: list[int], cuts: Sequence[int]
) -> tuple[RunningSequence, list[Checkpoint]]:
    """A sequence that has read these tokens in one step, and what it left on the way."""
    sequence = model.new_sequence()
    snapshots = [Checkpoint(sequence.state, cut) for cut in cuts]
    model.step([(sequence, token_ids)], snapshots)
    for snapshot in snapshots:
        snapshot.keep_pages(sequence.state)
    return sequence, snapshots


def check_snapshots(model: InProcessModel, token_ids: list[int], other_ids: list[int]) -> None:
    _, snapshots = with_snapshots(model, token_ids, CUTS)
    for cut, snapshot in zip(CUTS, snapshots, strict=True):
        straight = model.new_sequence()
        model.step([(straight, token_ids[:cut])])
        # Whoever goes on with other tokens, twice, leaves the checkpoint as it is.
        for ending in (other_ids, token_ids, token_ids[:cut] + other_ids[cut:]):
            whole = token_ids[:cut] + ending[cut:]
            expected = model.new_sequence()
            model.step([(expected, whole[:cut])])
            want = end_of(expected, model, whole)
            got = end_of(model.restored(snapshot, token_ids), model, whole)
            assert np.abs(got - want).max() <= 1e-4


@pytest.mark.parametrize("prepared", CASES, indirect=True)
def test_on_the_way(prepared: Prepared) -> None:
    """Snapshots of a step in machine code."""
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(NUM_PROMPT - 40)]
    check_snapshots(prepared.model, token_ids, prepared.prompt(NUM_PROMPT, seed=9))


@pytest.mark.parametrize("name", ["plain", "one-block-of-eight", "dense", "no-ngrams-equal-heads"])
def test_on_the_way_in_torch(prepare: Callable[[str], Prepared], name: str) -> None:
    """Snapshots of a step in torch operations."""
    prepared = prepare(name)
    model = InProcessModel(prepared.reference.path, torch.device("cpu"))
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(NUM_PROMPT - 40)]
    check_snapshots(model, token_ids, prepared.prompt(NUM_PROMPT, seed=9))


@pytest.mark.parametrize("prepared", CASES, indirect=True)
def test_between_steps(prepared: Prepared) -> None:
    """Of a state with none, one, and several tokens pending. It goes on itself, and others go on from where
    it was, in turns, each to the bit as if it were alone."""
    model = prepared.model
    token_ids, other_ids = prepared.prompt(NUM_PROMPT), prepared.prompt(NUM_PROMPT, seed=9)
    for num_read, num_window, num_kept in ((64, 0, 0), (70, 5, 3), (63, 1, 1), (100, 8, 0)):
        sequence = model.new_sequence()
        model.step([(sequence, token_ids[:num_read])])
        if num_window:
            model.step([(sequence, token_ids[num_read : num_read + num_window])])
            sequence.roll_back(num_read + num_kept)
        checkpoint = Checkpoint.of(sequence.state)
        position = checkpoint.position
        assert position == num_read + num_kept
        others = [model.restored(checkpoint, token_ids) for _ in range(2)]
        num_pages = model.model.pages.num_pages
        assert num_pages <= 3 * (NUM_PROMPT // 64 + 1)
        for at in range(position, position + 20):
            (own,) = model.step([(sequence, [token_ids[at]])])
            (other,) = model.step([(others[0], [other_ids[at]])])
            (same,) = model.step([(others[1], [token_ids[at]])])
            assert np.array_equal(own, same)
            assert not np.array_equal(own, other)
        late = model.restored(checkpoint, token_ids)
        for at in range(position, position + 20):
            (logits,) = model.step([(late, [other_ids[at]])])
        assert np.array_equal(logits, other)


def test_pages_are_shared(prepare: Callable[[str], Prepared]) -> None:
    """But for the last one, which is copied."""
    prepared = prepare("plain")
    model = prepared.model
    token_ids = prepared.prompt(150)
    sequence = model.new_sequence()
    model.step([(sequence, token_ids)])
    checkpoint = Checkpoint.of(sequence.state)
    before = model.model.pages.num_pages
    restored = [model.restored(checkpoint, token_ids) for _ in range(3)]
    assert model.model.pages.num_pages == before + 3
    for other in restored:
        assert [page is own for page, own in zip(other.state.pages, sequence.state.pages, strict=True)] == [
            True,
            True,
            False,
        ]
    del sequence, restored, other
    assert model.model.pages.num_pages == before
    del checkpoint
    assert model.model.pages.num_pages == before - 3
