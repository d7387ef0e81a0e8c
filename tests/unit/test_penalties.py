"""Bias and penalties against their formulas, token by token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_worker.penalties import LogitEdits
from gpu_worker.sampler import Sampler
from shared.messages import Sampling

VOCABULARY = 12


def sampling(**fields: Any) -> Sampling:
    return Sampling(**{"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0} | fields)


def by_definition(
    logits: NDArray[np.float32], chosen: Sampling, prompt: list[int], generated: list[int]
) -> NDArray[np.float32]:
    edited = [float(logit) for logit in logits]
    both = [(token, False) for token in prompt] + [(token, True) for token in generated]
    last_n = chosen.repeat_last_n
    window = both if last_n < 0 else both[len(both) - last_n :] if last_n < len(both) else both
    for token in range(len(edited)):
        edited[token] += dict(chosen.logit_bias).get(token, 0.0)
        if any(token == other for other, _ in window):
            penalty = chosen.repetition_penalty
            edited[token] *= penalty if edited[token] <= 0 else 1 / penalty
        count = window.count((token, True))
        edited[token] -= chosen.frequency_penalty * count + chosen.presence_penalty * (count > 0)
    return np.array(edited, np.float32)


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


@given(
    prompt=tokens,
    generated=tokens,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    last_n=st.integers(-1, 40),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
)
def test_edits(
    prompt: list[int],
    generated: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    last_n: int,
    bias: dict[int, float],
) -> None:
    """After every token of an answer, whatever the window has let go by then."""
    chosen = sampling(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repeat_last_n=last_n,
        logit_bias=list(bias.items()),
    )
    logits = np.random.default_rng(len(prompt)).normal(0, 5, VOCABULARY).astype(np.float32)
    edits = LogitEdits(chosen, prompt, ())
    for length in range(len(generated) + 1):
        edited = logits.copy()
        if edits.has_any:
            edits.apply(edited)
        np.testing.assert_allclose(
            edited, by_definition(logits, chosen, prompt, generated[:length]), rtol=1e-5, atol=1e-5
        )
        if length < len(generated):
            edits.note(generated[length])


def test_a_large_vocabulary_and_a_long_answer() -> None:
    """Many more tokens than there was room for at first."""
    random = np.random.default_rng(1)
    logits = random.normal(0, 5, 40_000).astype(np.float32)
    prompt, generated = random.integers(0, 40_000, 3000).tolist(), random.integers(0, 40_000, 1000).tolist()
    chosen = sampling(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, repeat_last_n=2500
    )
    edits = LogitEdits(chosen, prompt, ())
    for token in generated:
        edits.note(token)
    edited = logits.copy()
    edits.apply(edited)
    both = [*prompt, *generated][-2500:]
    expected = logits.copy()
    for token in set(both):
        expected[token] *= 1 / 1.2 if expected[token] > 0 else 1.2
    for token in set(generated):
        expected[token] -= 0.25 * generated.count(token) + 0.5
    np.testing.assert_allclose(edited, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{}, {"repetition_penalty": 2.0, "repeat_last_n": 0}, {"presence_penalty": 1.0, "repeat_last_n": 0}],
)
def test_nothing_to_do(fields: dict[str, Any]) -> None:
    """Then nothing is paid for either."""
    assert not LogitEdits(sampling(**fields), [1, 2], [3]).has_any


def test_an_end_that_may_come_is_no_edit() -> None:
    edits = LogitEdits(sampling(min_tokens=2), [], [3])
    for _ in range(2):
        assert edits.has_any
        edits.note(0)
    assert not edits.has_any
    assert not LogitEdits(sampling(min_tokens=2), [], []).has_any


def test_huge_logits_stay_finite() -> None:
    """A model may be broken in this way too; the answer is then wrong, but the draw goes on."""
    logits = np.array([3e38, -3e38, 0], np.float32)
    LogitEdits(sampling(repetition_penalty=0.01), [0], ()).apply(logits)
    assert np.isfinite(logits).all()
    LogitEdits(sampling(repetition_penalty=10.0), [1], ()).apply(logits)
    assert np.isfinite(logits).all()


def test_penalties_turn_a_greedy_answer_away_from_itself() -> None:
    """Penalties count before the likeliest is looked for."""
    logits = np.array([1.0, 0.9, 0.8], np.float32)
    sampler = Sampler(sampling(presence_penalty=2.0))
    assert [sampler.choose(logits.copy()).token_id for _ in range(3)] == [0, 1, 2]
    sampler = Sampler(sampling(repetition_penalty=2.0), [0])
    assert sampler.choose(logits.copy()).token_id == 1
    sampler = Sampler(sampling(presence_penalty=2.0), [0])
    assert sampler.choose(logits.copy()).token_id == 0


def test_bias_forces_and_bans() -> None:
    logits = np.array([30, 0, -30], np.float32)
    for temperature in (0, 1.0):
        forced = Sampler(sampling(temperature=temperature, logit_bias=[(2, 100.0)]))
        assert {forced.choose(logits.copy()).token_id for _ in range(20)} == {2}
        banned = Sampler(sampling(temperature=temperature, logit_bias=[(0, -100.0)]))
        assert 0 not in {banned.choose(logits.copy()).token_id for _ in range(20)}
