"""Chooses the next token from logits.

Order: temperature, top-k, top-p, min-p, then a draw by the request's own seeded generator. Temperature 0
takes the likeliest token. The draw inverts the cumulative distribution of the kept tokens, sorted by falling
probability (ties by id), so a seed gives the same token whatever ran beside the request.
"""

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelOutputError
from shared.messages import Sampling


class Sampler:
    """The sampling of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """A token id from logits [vocabulary]. Raises ModelOutputError where they are not finite."""
        if not np.isfinite(logits).all():
            num_bad = np.count_nonzero(~np.isfinite(logits))
            raise ModelOutputError(f"the model produced {num_bad} logits that are not finite numbers")
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        token_ids, probabilities = kept_tokens(logits, self._sampling)
        drawn = self._random.random() * probabilities.sum()
        place = int(np.searchsorted(probabilities.cumsum(), drawn, side="right"))
        return int(token_ids[min(place, len(token_ids) - 1)])


def kept_tokens(
    logits: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The tokens that may be drawn and their probabilities before renormalising, likeliest first.

    top-p keeps the smallest set of the likeliest tokens whose probability among the top-k reaches it; min-p
    then drops what is less likely than that share of the likeliest. At least one token is kept.
    """
    token_ids = _by_falling_logit(logits, sampling.top_k)
    scaled = logits[token_ids].astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled[0])
    probabilities /= probabilities.sum()
    before = np.concatenate([[0.0], probabilities.cumsum()[:-1]])
    is_kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
    is_kept[0] = True
    return token_ids[is_kept], probabilities[is_kept]


def _by_falling_logit(logits: NDArray[np.float32], top_k: int) -> NDArray[np.intp]:
    """The ids of the `top_k` largest logits (all for 0), largest first, equal ones by rising id."""
    if 0 < top_k < len(logits):
        smallest_kept = np.partition(logits, -top_k)[-top_k]
        candidates = np.flatnonzero(logits >= smallest_kept)
    else:
        top_k, candidates = len(logits), np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:top_k]
