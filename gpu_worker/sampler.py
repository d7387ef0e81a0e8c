"""Chooses the next token from logits.

Order: temperature, top-k, top-p, min-p, then a draw by the request's own seeded generator. Temperature 0
takes the likeliest token. The draw inverts the cumulative distribution of the kept tokens, sorted by falling
probability (ties by id), so a seed gives the same token whatever ran beside the request.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelOutputError
from shared.messages import Sampling

# Tokens that are sorted at first, and how many times as many if that does not decide.
_FIRST_SORTED = 512
_GROWTH = 16
_GROUPS_PER_TOKEN = 4


class Sampler:
    """The sampling of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """A token id from logits [vocabulary]. Raises ModelOutputError where they are not finite."""
        likeliest = int(logits.argmax())
        # argmax finds NaN and infinity, if there are any; only the other infinity is left to look for.
        if not (math.isfinite(logits[likeliest]) and math.isfinite(logits.min())):
            num_bad = np.count_nonzero(~np.isfinite(logits))
            raise ModelOutputError(f"the model produced {num_bad} logits that are not finite numbers")
        if self._sampling.temperature == 0:
            return likeliest
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

    top-p keeps the smallest set of the likeliest tokens whose probability among the top-k reaches it; min-p
    then drops what is less likely than that share of the likeliest. At least one token is kept.
    """
    *_, kept = (kept for kept in _growing(logits, sampling) if kept.is_complete)
    return kept.token_ids, kept.probabilities


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
    has_limits = sampling.top_p < 1 or sampling.min_p > 0
    num_sorted = min(top_k, _FIRST_SORTED)
    total = 0.0
    while True:
        token_ids = _likeliest(logits, num_sorted)
        scaled = logits[token_ids].astype(np.float64) / sampling.temperature
        weights = np.exp(scaled - scaled[0])
        if num_sorted == top_k:
            total = weights.sum()
        elif not total:
            total = _sum_of_weights(logits, sampling.temperature, top_k)
        probabilities = weights / total
        before = np.concatenate([[0.0], probabilities.cumsum()[:-1]])
        is_kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
        is_kept[0] = True
        # Both limits drop whatever comes after a token that they drop.
        if num_sorted == top_k or not is_kept[-1]:
            yield _Kept(token_ids[is_kept], probabilities[is_kept], True)
            return
        if not has_limits:
            yield _Kept(token_ids, probabilities, False)
        num_sorted = min(top_k, num_sorted * _GROWTH)


def _sum_of_weights(logits: NDArray[np.float32], temperature: float, top_k: int) -> float:
    """The sum of exp((logit - largest) / temperature) over the `top_k` largest."""
    chosen = logits if top_k == len(logits) else logits[_likeliest(logits, top_k)]
    scaled = (chosen - chosen.max()) / np.float32(temperature)
    return float(np.exp(scaled, out=scaled).sum(dtype=np.float64))


def _likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
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
