"""Tokens that are taken back leave no trace: what follows is computed as if they had never been there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.in_process import InProcessModel
from shared.window import WINDOW_TOKENS
from tests.support.model_cases import CASES
from tests.support.prepared import Prepared

TOLERANCE = 1e-4
NUM_PROMPT = 37


def with_drafts(model: InProcessModel, token_ids: list[int], seed: int) -> NDArray[np.float32]:
    """The logits of these tokens, after a prompt taken in windows of random length, of which some of the
    first are right and stay; the others are any tokens."""
    rng = np.random.default_rng(seed)
    sequence, other = model.new_sequence(), model.new_sequence()
    logits = [*model.step([(sequence, token_ids[:NUM_PROMPT])])]
    at = NUM_PROMPT
    while at < len(token_ids):
        num_tokens = int(rng.integers(1, WINDOW_TOKENS + 1))
        num_right = min(int(rng.integers(0, num_tokens + 1)), len(token_ids) - at)
        wrong = rng.integers(0, model.config.vocab_size, num_tokens - num_right).tolist()
        window = (sequence, [*token_ids[at : at + num_right], *wrong])
        # A second sequence in the same step, which is taken back to its begin now and then.
        beside = (other, rng.integers(0, 100, int(rng.integers(1, 4))).tolist())
        of_window, _ = model.step([window, beside])
        logits.append(of_window[:num_right])
        at += num_right
        sequence.roll_back(at)
        if rng.random() < 0.5:
            other.roll_back(len(other.token_ids) - len(beside[1]))
    return np.concatenate(logits)


@pytest.mark.parametrize("prepared", CASES, indirect=True)
@pytest.mark.parametrize("seed", [0, 1])
def test_in_machine_code(prepared: Prepared, seed: int) -> None:
    """Delta nets, convolutions, n-grams, attention with dropped blocks, and the indexer."""
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(90)]
    got = with_drafts(prepared.model, token_ids, seed)
    assert np.abs(got - prepared.model.logits(token_ids)).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "one-block-of-eight", "dense", "no-ngrams-equal-heads"])
def test_in_torch(prepare: Callable[[str], Prepared], name: str) -> None:
    """Likewise."""
    path: Path = prepare(name).reference.path
    model = InProcessModel(path, torch.device("cpu"))
    token_ids = [*prepare(name).prompt_with_ends, *prepare(name).prompt(60)]
    got = with_drafts(model, token_ids, 2)
    assert np.abs(got - model.logits(token_ids)).max() <= TOLERANCE
