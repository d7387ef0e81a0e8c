"""Which tokens may be drawn, with which probability, and that a seed decides which is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_worker.sampler import Sampler, kept_tokens, likeliest_tokens
from shared.errors import ModelOutputError
from shared.messages import Sampling

Logits = NDArray[np.float32]


def sampling(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    **others: Any,
) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, **others)


def random_logits(size: int, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)


def softmax(exact: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(exact - exact.max())
    return weights / weights.sum()


def probabilities_by_definition(logits: Logits, chosen: Sampling) -> dict[int, float]:
    """Token by token, as the settings are described: temperature, top-k, typical-p, top-p, min-p."""
    exact = logits.astype(np.float64) / chosen.temperature
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: chosen.top_k or None]
    if chosen.typical_p < 1:
        surprises = -np.log(softmax(exact[ranked]))
        distances = np.abs(surprises - (softmax(exact[ranked]) * surprises).sum())
        order = np.argsort(distances, kind="stable")
        before = softmax(exact[ranked])[order].cumsum() - softmax(exact[ranked])[order]
        typical = {ranked[place] for place in order[before < chosen.typical_p]}
        ranked = [token for token in ranked if token in typical]
    shares = softmax(exact[ranked])
    kept, total = [], 0.0
    for token, share in zip(ranked, shares, strict=True):
        if total >= chosen.top_p:
            break
        kept.append((token, share))
        total += share
    kept = [(token, share) for token, share in kept if share >= chosen.min_p * kept[0][1]]
    sum_kept = sum(share for _, share in kept)
    return {token: share / sum_kept for token, share in kept}


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 50),
    top_p=st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_kept_tokens(values: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Any combination of limits; ties in plenty."""
    logits = np.array(values, np.float32)
    chosen = sampling(temperature, top_k, top_p, min_p)
    expected = probabilities_by_definition(logits, chosen)
    token_ids, probabilities = kept_tokens(logits, chosen)
    shares = dict(zip(token_ids.tolist(), (probabilities / probabilities.sum()).tolist(), strict=True))
    # A sum that meets top_p but for rounding may take one token more or less.
    if shares.keys() == expected.keys():
        assert shares == pytest.approx(expected)
    else:
        assert len(shares.keys() ^ expected.keys()) == 1


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(
    "chosen",
    [
        sampling(),
        sampling(top_k=700),
        sampling(0.7, top_p=0.97),
        sampling(0.7, 30_000, 0.5),
        sampling(min_p=0.2),
        sampling(2.0, 0, 0.9, 0.001),
        sampling(typical_p=0.3),
        sampling(0.7, typical_p=0.95, top_p=0.8, min_p=0.01),
        sampling(1.5, 3000, typical_p=0.6),
    ],
    ids=str,
)
def test_large_vocabulary(spread: float, chosen: Sampling) -> None:
    """Of which only the likeliest are sorted, and more where that does not decide; rounded, so that many are
    equal. With typical-p that are those of the same surprise."""
    logits = np.round(np.random.default_rng(1).normal(0, spread, 40_000), 2).astype(np.float32)
    expected = probabilities_by_definition(logits, chosen)
    token_ids, probabilities = kept_tokens(logits, chosen)
    # A sum that meets top_p but for rounding may take one token more or less.
    assert abs(len(token_ids) - len(expected)) <= 1
    num_alike = min(len(token_ids), len(expected))
    assert token_ids[:num_alike].tolist() == list(expected)[:num_alike]
    shares = probabilities / probabilities.sum()
    np.testing.assert_allclose(shares[:num_alike], list(expected.values())[:num_alike], rtol=1e-3)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_draws_from_a_large_vocabulary(spread: float) -> None:
    """What is drawn is what would be drawn if all were sorted, whether it is among the likeliest or not."""
    logits = np.random.default_rng(2).normal(0, spread, 40_000).astype(np.float32)
    token_ids, probabilities = kept_tokens(logits, sampling())
    assert len(token_ids) == len(logits)
    sampler, random = Sampler(sampling(seed=9)), np.random.Generator(np.random.PCG64(9))
    for _ in range(40):
        place = np.searchsorted(probabilities.cumsum(), random.random() * probabilities.sum(), side="right")
        assert sampler.choose(logits).token_id == token_ids[place]


def test_limits_one_by_one() -> None:
    """On a distribution with round numbers."""
    logits = np.log(np.array([0.05, 0.5, 0.25, 0.2], np.float32))
    assert kept_tokens(logits, sampling(top_k=2))[0].tolist() == [1, 2]
    assert kept_tokens(logits, sampling(top_p=0.6))[0].tolist() == [1, 2]
    assert kept_tokens(logits, sampling(min_p=0.45))[0].tolist() == [1, 2]
    assert kept_tokens(logits, sampling(top_p=0.0001))[0].tolist() == [1]
    assert kept_tokens(logits, sampling(min_p=1.0))[0].tolist() == [1]
    assert kept_tokens(logits, sampling(top_k=100))[0].tolist() == [1, 2, 3, 0]


def test_equal_logits_are_kept_in_the_order_of_their_ids() -> None:
    """Otherwise a seed would not decide which is drawn."""
    logits = np.zeros(1000, np.float32)
    assert kept_tokens(logits, sampling(top_k=5))[0].tolist() == [0, 1, 2, 3, 4]


def test_greedy() -> None:
    """Whatever else is set; the first of equals."""
    logits = np.array([1, 3, 3, 2], np.float32)
    assert Sampler(sampling(temperature=0, top_k=1, top_p=0.1, min_p=1.0)).choose(logits).token_id == 1


def test_small_temperature_is_nearly_greedy() -> None:
    """And overflows nothing."""
    logits = random_logits(1000) * 1000
    assert Sampler(sampling(temperature=1e-4)).choose(logits).token_id == logits.argmax()


def test_same_seed_same_tokens() -> None:
    """The generator is the request's own and goes on from token to token."""
    rows = [random_logits(300, seed) for seed in range(30)]
    first, second, other = (Sampler(sampling(seed=seed)) for seed in (7, 7, 8))
    drawn = [first.choose(row).token_id for row in rows]
    assert drawn == [second.choose(row).token_id for row in rows]
    assert drawn != [other.choose(row).token_id for row in rows]


@pytest.mark.parametrize(
    "chosen",
    [
        sampling(),
        sampling(temperature=0.5),
        sampling(top_k=7),
        sampling(2.0, 20, 0.8, 0.05),
        sampling(typical_p=0.6),
        sampling(1.5, 25, 0.9, 0.02, typical_p=0.8),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(chosen: Sampling) -> None:
    """A chi-square test with 20 000 draws: 5 standard deviations above its mean would be a fault."""
    logits, num_draws = random_logits(30), 20_000
    expected = probabilities_by_definition(logits, chosen)
    sampler = Sampler(chosen)
    counts = np.bincount([sampler.choose(logits).token_id for _ in range(num_draws)], minlength=len(logits))
    assert set(np.flatnonzero(counts)) <= expected.keys()
    wanted = np.array([expected.get(token, 0.0) for token in range(len(logits))]) * num_draws
    is_common = wanted >= 5
    chi_square = ((counts - wanted)[is_common] ** 2 / wanted[is_common]).sum()
    freedom = is_common.sum() - 1
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(bad: float, temperature: float) -> None:
    """A broken model is told from one that likes a token."""
    logits = random_logits(50)
    logits[[3, 4]] = bad
    with pytest.raises(ModelOutputError, match="2 logits that are not finite"):
        Sampler(sampling(temperature=temperature)).choose(logits)


def test_likeliest_tokens() -> None:
    """Of each row the token and its probability; NaN where there is none."""
    logits = np.random.default_rng(4).normal(0, 3, (5, 1000)).astype(np.float32)
    logits[3] += 1e4
    logits[4, 7] = np.nan
    token_ids, probabilities = likeliest_tokens(logits)
    for row in range(4):
        shares = np.exp(logits[row].astype(np.float64) - logits[row].max())
        assert token_ids[row] == shares.argmax()
        assert probabilities[row] == pytest.approx(shares.max() / shares.sum(), rel=1e-5)
    assert np.isnan(probabilities[4])


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, 50),
    typical_p=st.sampled_from([0.001, 0.2, 0.6, 0.95]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_typical_tokens(
    values: list[float], temperature: float, top_k: int, typical_p: float, top_p: float
) -> None:
    """On a set that is then limited further: no token that another set would not have, but for one that
    rounding decides about."""
    logits = np.array(values, np.float32)
    chosen = sampling(temperature, top_k, top_p, typical_p=typical_p)
    expected = probabilities_by_definition(logits, chosen)
    token_ids, probabilities = kept_tokens(logits, chosen)
    assert (np.diff(probabilities) <= 0).all()
    if set(token_ids.tolist()) == expected.keys():
        shares = (probabilities / probabilities.sum()).tolist()
        assert dict(zip(token_ids.tolist(), shares, strict=True)) == pytest.approx(expected)
    else:
        assert len(set(token_ids.tolist()) ^ expected.keys()) <= 2


def test_typical_p_may_drop_the_likeliest() -> None:
    """Four of a kind share 0.6: each of them is about as surprising as is to be expected."""
    logits = np.log(np.array([0.4, 0.15, 0.15, 0.15, 0.15], np.float32))
    assert kept_tokens(logits, sampling(typical_p=0.5))[0].tolist() == [1, 2, 3, 4]
    assert 0 in kept_tokens(logits, sampling(typical_p=0.9))[0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 9e-6])
def test_temperatures_that_leave_nothing_else_are_zero(temperature: float) -> None:
    logits = random_logits(1000)
    assert Sampler(sampling(temperature)).choose(logits).token_id == logits.argmax()


def test_what_is_impossible_is_never_kept() -> None:
    """A banned token does not fill up the top-k of a small vocabulary."""
    logits = np.array([1, 2, 3, 4], np.float32)
    logits[[0, 3]] = -np.inf
    assert kept_tokens(logits, sampling(top_k=3))[0].tolist() == [2, 1]
    assert kept_tokens(logits, sampling(typical_p=0.999))[0].tolist() == [2, 1]


# Log-probabilities.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("size", [25, 40_000])
def test_logprobs_are_of_the_model_whatever_is_done_to_its_logits(
    temperature: float, num_top: int, size: int
) -> None:
    """Not of what bias, penalties and temperature make of them; the chosen token need not be among the
    likeliest."""
    logits = random_logits(size)
    expected = np.log(softmax(logits.astype(np.float64)))
    ranked = np.argsort(-logits, kind="stable")
    least = int(ranked[-1])
    forced = sampling(
        temperature, logit_bias=[(least, 100.0), (int(ranked[0]), -100.0)], num_top_logprobs=num_top
    )
    sampler = Sampler(forced)
    choice = sampler.choose(logits)
    assert choice.token_id == least
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(expected[least], abs=1e-4)
    assert choice.logprobs.top_token_ids == ranked[:num_top].tolist()
    assert choice.logprobs.top_logprobs == pytest.approx(expected[ranked[:num_top]], abs=1e-4)


def test_without_being_asked_for_there_are_no_logprobs() -> None:
    assert Sampler(sampling()).choose(random_logits(10)).logprobs is None


def test_asking_for_logprobs_changes_nothing() -> None:
    rows = [random_logits(300, seed) for seed in range(20)]
    plain, asked = Sampler(sampling(seed=3)), Sampler(sampling(seed=3, num_top_logprobs=2))
    for row in rows:
        assert plain.choose(row.copy()).token_id == asked.choose(row.copy()).token_id


# With edits, in the whole.


def test_a_token_costs_one_draw_whatever_is_asked_for() -> None:
    """So a request that is verified token by token draws what it would have drawn anyway."""
    busy = sampling(
        seed=5, presence_penalty=1.0, logit_bias=[(3, 1.0)], min_tokens=4, num_top_logprobs=3, typical_p=0.9
    )
    sampler, random = Sampler(busy, [1, 2], [7]), np.random.Generator(np.random.PCG64(5))
    for seed in range(10):
        sampler.choose(random_logits(50, seed))
        random.random()
    assert sampler._random.random() == random.random()


def test_no_end_before_its_time() -> None:
    """However likely it is; ids that the model does not have are no matter."""
    logits = np.array([0, 50, 0, 60], np.float32)
    for temperature in (0.0, 1.0):
        sampler = Sampler(sampling(temperature, min_tokens=3), [], [1, 3, 1_000_000])
        drawn = [sampler.choose(logits.copy()).token_id for _ in range(5)]
        assert set(drawn[:3]) <= {0, 2}
        assert set(drawn[3:]) <= {1, 3}
