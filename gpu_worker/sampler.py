"""Chooses the next token from logits.

Order: bias and penalties (`gpu_worker.penalties`), temperature, top-k, typical-p, top-p, min-p, then a draw
by the request's own seeded generator. Temperature 0 takes the likeliest token after bias and penalties. The
draw inverts the cumulative distribution of the kept tokens, sorted by falling probability (ties by id), so a
seed gives the same token whatever ran beside the request.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_worker.penalties import LogitEdits
from shared.errors import ModelOutputError
from shared.messages import Sampling, TokenLogprobs

# Temperatures below are 0, as in vLLM: dividing by them leaves nothing but the likeliest.
_GREEDY_BELOW = 1e-5
# Tokens that are sorted at first, and how many times as many if that does not decide.
_FIRST_SORTED = 512
_GROWTH = 16
_GROUPS_PER_TOKEN = 4


class Choice(NamedTuple):
    """A chosen token, and its log-probabilities where the request wants them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    """The sampling of one request.

    What is chosen depends on nothing but the logits, the tokens chosen before, and one draw for each token
    (none at temperature 0). So whoever calls `choose` for one position after the other must emit every token
    that it returns; the logits of a position that is not reached are not given to it.
    """

    def __init__(
        self, sampling: Sampling, prompt_token_ids: Sequence[int] = (), end_token_ids: Iterable[int] = ()
    ) -> None:
        """`prompt_token_ids` is what the repetition penalty counts before the first token, `end_token_ids`
        are those that may not come before `sampling.min_tokens` others."""
        self._sampling = sampling
        self._edits = LogitEdits(sampling, prompt_token_ids, end_token_ids)
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def choose(self, logits: NDArray[np.float32]) -> Choice:
        """A token from logits [vocabulary], which are the caller's to give away: bias and penalties change
        them in place. Raises ModelOutputError where they are not finite."""
        likeliest = _finite_argmax(logits)
        num_top = self._sampling.num_top_logprobs
        as_computed = logits
        if self._edits.has_any:
            if num_top is not None:
                as_computed = logits.copy()
            self._edits.apply(logits)
            likeliest = int(logits.argmax())
        token_id = likeliest if self._sampling.temperature < _GREEDY_BELOW else self._draw(logits)
        self._edits.note(token_id)
        return Choice(token_id, None if num_top is None else _logprobs(as_computed, token_id, num_top))

    def _draw(self, logits: NDArray[np.float32]) -> int:
        drawn = self._random.random()
        for kept in _growing(logits, self._sampling):
            cumulative = kept.probabilities.cumsum()
            if kept.is_complete:
                drawn *= cumulative[-1]
            elif drawn >= cumulative[-1]:
                continue
            place = int(np.searchsorted(cumulative, drawn, side="right"))
            return int(kept.token_ids[min(place, len(kept.token_ids) - 1)])
        raise AssertionError("the last are complete")


def likeliest_tokens(logits: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Of logits [n, vocabulary] the likeliest token of each row, and its probability [n]; NaN where a row is
    not finite."""
    token_ids = logits.argmax(-1)
    largest = np.take_along_axis(logits, token_ids[:, None], -1)
    probabilities: NDArray[np.float32] = 1 / np.exp(logits - largest).sum(-1)
    return token_ids, probabilities


def kept_tokens(
    logits: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The tokens that may be drawn and their probabilities before renormalising, likeliest first.

    typical-p keeps, of the top-k, the smallest set of those whose surprise is nearest to the expected one
    (Meister et al., arXiv 2202.00666) whose probability reaches it. Of these top-p keeps the smallest set of
    the likeliest whose probability reaches it; min-p then drops what is less likely than that share of the
    likeliest. At least one token is kept, and none of probability 0.
    """
    *_, kept = (kept for kept in _growing(logits, sampling) if kept.is_complete)
    return kept.token_ids, kept.probabilities


def _finite_argmax(logits: NDArray[np.float32]) -> int:
    likeliest = int(logits.argmax())
    # argmax finds NaN and infinity, if there are any; only the other infinity is left to look for.
    if not (math.isfinite(logits[likeliest]) and math.isfinite(logits.min())):
        num_bad = np.count_nonzero(~np.isfinite(logits))
        raise ModelOutputError(f"the model produced {num_bad} logits that are not finite numbers")
    return likeliest


def _logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Of the model's distribution as it is, without bias, penalties and temperature."""
    largest = float(logits.max())
    log_total = largest + math.log(_sum_of_weights(logits, 1.0, len(logits)))
    top_ids = _likeliest(logits, num_top) if num_top else np.zeros(0, np.intp)
    return TokenLogprobs(
        logprob=float(logits[token_id]) - log_total,
        top_token_ids=top_ids.tolist(),
        top_logprobs=(logits[top_ids].astype(np.float64) - log_total).tolist(),
    )


class _Kept(NamedTuple):
    """The likeliest of the kept tokens, or all of them. In the former case nothing is dropped at all, so that
    their probabilities are those they are drawn with."""

    token_ids: NDArray[np.intp]
    probabilities: NDArray[np.float64]
    is_complete: bool


def _growing(logits: NDArray[np.float32], sampling: Sampling) -> Iterator[_Kept]:
    """The kept tokens, found by sorting more and more of the likeliest until the limits drop some.

    Sorting a vocabulary of 248 320 takes 25 ms, finding and sorting its likeliest thousand less than one.
    """
    top_k = sampling.top_k if 0 < sampling.top_k < len(logits) else len(logits)
    if sampling.typical_p == 1:
        yield from _growing_by_probability(logits, sampling, top_k)
        return
    typical_ids = _typical(logits, sampling, top_k)
    for kept in _growing_by_probability(logits[typical_ids], sampling, len(typical_ids)):
        yield kept._replace(token_ids=typical_ids[kept.token_ids])


def _growing_by_probability(logits: NDArray[np.float32], sampling: Sampling, top_k: int) -> Iterator[_Kept]:
    has_limits = sampling.top_p < 1 or sampling.min_p > 0
    num_sorted = min(top_k, _FIRST_SORTED)
    total = 0.0
    while True:
        token_ids = _likeliest(logits, num_sorted)
        weights = _weights(logits[token_ids], sampling.temperature)
        if num_sorted == top_k:
            total = weights.sum()
        elif not total:
            total = _sum_of_weights(logits, sampling.temperature, top_k)
        probabilities = weights / total
        before = np.concatenate([[0.0], probabilities.cumsum()[:-1]])
        is_kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
        is_kept &= probabilities > 0
        is_kept[0] = True
        # All these limits drop whatever comes after a token that they drop.
        if num_sorted == top_k or not is_kept[-1]:
            yield _Kept(token_ids[is_kept], probabilities[is_kept], True)
            return
        if not has_limits:
            yield _Kept(token_ids, probabilities, False)
        num_sorted = min(top_k, num_sorted * _GROWTH)


def _typical(logits: NDArray[np.float32], sampling: Sampling, top_k: int) -> NDArray[np.intp]:
    """The ids, rising, that typical-p keeps of the `top_k` likeliest."""
    candidates = np.arange(len(logits)) if top_k == len(logits) else np.sort(_likeliest(logits, top_k))
    weights = _weights(logits[candidates], sampling.temperature)
    probabilities = weights / weights.sum()
    is_possible = probabilities > 0
    candidates, probabilities = candidates[is_possible], probabilities[is_possible]
    surprises = -np.log(probabilities)
    nearness = -np.abs(surprises - (probabilities * surprises).sum())
    num_sorted = min(len(candidates), _FIRST_SORTED)
    while True:
        places = _likeliest(nearness, num_sorted)
        cumulative = probabilities[places].cumsum()
        num_kept = int(np.searchsorted(cumulative, sampling.typical_p)) + 1
        if num_kept <= num_sorted or num_sorted == len(candidates):
            return np.sort(candidates[places[:num_kept]])
        num_sorted = min(len(candidates), num_sorted * _GROWTH)


def _weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """exp((logit - largest) / temperature)."""
    exact = logits.astype(np.float64)
    weights: NDArray[np.float64] = np.exp((exact - exact.max()) / temperature)
    return weights


def _sum_of_weights(logits: NDArray[np.float32], temperature: float, top_k: int) -> float:
    """The sum of exp((logit - largest) / temperature) over the `top_k` largest."""
    chosen = logits if top_k == len(logits) else logits[_likeliest(logits, top_k)]
    scaled = (chosen - chosen.max()) / np.float32(temperature)
    return float(np.exp(scaled, out=scaled).sum(dtype=np.float64))


def _likeliest(logits: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest logits, largest first, equal ones by rising id."""
    num_groups = _GROUPS_PER_TOKEN * count
    if num_groups < len(logits):
        # Of any groups, the `count` with the largest maxima have so many logits that are not below the least
        # of these. Comparing all with that is a fifth of the cost of a partition, and leaves few.
        num_rows = len(logits) // num_groups
        maxima = logits[: num_rows * num_groups].reshape(num_rows, num_groups).max(0)
        candidates = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    else:
        candidates = np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]
