"""Logits of whole models in float32 against transformers, and of the same tokens taken in other steps.

Logits spread by 2 to 5. Against the reference, where the order of all additions differs, errors of up to 4e-5
were observed, between ways of taking the same tokens up to 6e-5.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.model_cases import CASES
from tests.support.prepared import Prepared

TO_REFERENCE = 2e-4
TO_ITSELF = 1e-4

all_cases = pytest.mark.parametrize("prepared", CASES, indirect=True)


def assert_close(got: NDArray[np.float32], want: NDArray[np.float32], tolerance: float) -> None:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance


@all_cases
def test_prompt(prepared: Prepared) -> None:
    """Long enough that the indexer drops blocks and the delta net takes several chunks."""
    token_ids = prepared.prompt(150)
    assert_close(prepared.model.logits(token_ids), prepared.expected(token_ids), TO_REFERENCE)


@all_cases
def test_ends_of_text_in_the_prompt(prepared: Prepared) -> None:
    """They cut n-grams, but neither convolutions nor attention."""
    token_ids = prepared.prompt_with_ends
    assert_close(prepared.model.logits(token_ids), prepared.expected(token_ids), TO_REFERENCE)


@all_cases
def test_prompt_of_one_token(prepared: Prepared) -> None:
    """No block is complete, no history is there."""
    assert_close(prepared.model.logits([7]), prepared.expected([7]), TO_REFERENCE)


@all_cases
def test_greedy_tokens(prepared: Prepared) -> None:
    """The reference, given what was generated, would have generated the same."""
    prompt = prepared.prompt(60, seed=2)
    output = prepared.model.greedy(prompt, 16)
    expected = prepared.expected([*prompt, *output])
    assert output == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@all_cases
def test_token_by_token(prepared: Prepared) -> None:
    """Decoding computes what reading a prompt does."""
    token_ids = prepared.prompt(90)
    by_token = prepared.model.logits(token_ids, [1] * 90)
    assert_close(by_token, prepared.model.logits(token_ids), TO_ITSELF)


@all_cases
@pytest.mark.parametrize("sizes", [(1, 2, 3, 5, 7, 11, 13, 40), (64, 65, 1), (63, 2)], ids=str)
def test_in_chunks(prepared: Prepared, sizes: tuple[int, ...]) -> None:
    """Borders within and between n-grams, convolution kernels, indexer blocks and chunks of the delta net."""
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(110)]
    assert_close(prepared.model.logits(token_ids, sizes), prepared.model.logits(token_ids), TO_ITSELF)


@all_cases
def test_sequences_in_one_batch(prepared: Prepared) -> None:
    """One reads its prompt, one goes on reading, one decodes: each as if it were alone."""
    model = prepared.model
    reading, going_on, decoding = prepared.prompt(70, seed=3), prepared.prompt_with_ends, prepared.prompt(50)
    first, second, third = (model.new_sequence() for _ in range(3))
    model.step([(third, decoding[:48])])
    (early,) = model.step([(second, going_on[:17])])
    steps = [
        model.step([(first, reading[:69]), (second, going_on[17:39]), (third, decoding[48:49])]),
        model.step([(third, decoding[49:]), (first, reading[69:]), (second, going_on[39:])]),
    ]
    assert_close(np.concatenate([steps[0][0], steps[1][1]]), model.logits(reading), TO_ITSELF)
    assert_close(np.concatenate([early, steps[0][1], steps[1][2]]), model.logits(going_on), TO_ITSELF)
    assert_close(np.concatenate([steps[0][2], steps[1][0]]), model.logits(decoding)[48:], TO_ITSELF)


def test_sequences_do_not_share_state(prepare: Callable[[str], Prepared]) -> None:
    """A second sequence, begun in the middle of the first, changes nothing in it."""
    prepared = prepare("plain")
    token_ids = prepared.prompt(40)
    sequence, other = prepared.model.new_sequence(), prepared.model.new_sequence()
    parts = prepared.model.step([(sequence, token_ids[:20])])
    prepared.model.step([(other, prepared.prompt(30, seed=9))])
    parts += prepared.model.step([(sequence, token_ids[20:])])
    assert_close(np.concatenate(parts), prepared.model.logits(token_ids), TO_ITSELF)
