"""From token ids to rows of the n-gram table: the hash of the `qwen4exp` architecture, exactly.

For n from 2 to the n-gram size, the ids of a token and of the n-1 before it are multiplied by fixed 64-bit
numbers and combined by exclusive or; each head of that order takes the result modulo its own prime. An id
before the start of the sequence counts as end-of-text, and so does every id at or before the nearest earlier
end-of-text: no n-gram reaches across one. A token that is end-of-text itself cuts nothing.
"""

import numpy as np
from numpy.typing import NDArray

from shared.model_config import NgramConfig


class NgramHash:
    """The hash of one model."""

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._multipliers = np.array(config.multipliers, np.uint64)
        self._sizes = np.array(config.head_vocab_sizes, np.uint64)
        self._offsets = np.array(config.head_offsets, np.int64)

    def rows(self, windows: NDArray[np.int32]) -> NDArray[np.int64]:
        """The rows of each token, int64 [num_tokens, num_heads].

        `windows` is int32 [num_tokens, ngram_size]: the token's own id, then the ids before it, nearest
        first; negative where the sequence had not begun.
        """
        config = self._config
        is_cut = (windows[:, 1:] < 0) | (windows[:, 1:] == config.eos_token_id)
        is_beyond_cut = np.logical_or.accumulate(is_cut, axis=1)
        ids = windows.astype(np.uint64)
        ids[:, 1:][is_beyond_cut] = config.eos_token_id
        # The reader of the metadata has made sure that no product overflows 63 bits.
        products = ids * self._multipliers
        mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
        per_head = np.repeat(mixed, config.heads_per_ngram, axis=1)
        return (per_head % self._sizes).astype(np.int64) + self._offsets


def windows_of(token_ids: NDArray[np.int32], ngram_size: int) -> NDArray[np.int32]:
    """The windows of a whole sequence from its start, int32 [num_tokens, ngram_size]."""
    if not len(token_ids):
        return np.empty((0, ngram_size), np.int32)
    padded = np.concatenate([np.full(ngram_size - 1, -1, np.int32), token_ids])
    return np.lib.stride_tricks.sliding_window_view(padded, ngram_size)[:, ::-1]
