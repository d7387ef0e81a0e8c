"""How far apart two models are in what they predict."""

import numpy as np
from numpy.typing import NDArray


def divergences(expected: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The Kullback-Leibler divergence KL(expected || logits) at each position, from logits
    [positions, vocabulary]."""
    log_expected, log_given = _log_softmax(expected), _log_softmax(logits)
    result: NDArray[np.float64] = (np.exp(log_expected) * (log_expected - log_given)).sum(-1)
    return result


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
