"""From token ids to rows of the n-gram table: the hash of the `qwen4exp` architecture, exactly.

For n from 2 to the n-gram size, the ids of a token and of the n-1 before it are multiplied by fixed 64-bit
numbers and combined by exclusive or; each head of that order takes the result modulo its own prime. An id
before the start of the sequence counts as end-of-text, and so does every id at or before the nearest earlier
end-of-text: no n-gram reaches across one. A token that is end-of-text itself cuts nothing.
"""

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.model_config import NgramConfig
from shared.native.memory import ids_at, integers_at
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import INTEGER, compile_kernel, jitable

HASH = fields(
    "multipliers",  # i64 [ngram_size]
    "sizes",  # i64 [num_heads]
    "offsets",  # i64 [num_heads]
    "ngram_size",
    "heads_per_ngram",
    "eos_token_id",
    "num_heads",
)
_hash_at = reader(HASH)


@jitable
def hash_windows(hash_address: int, windows: int, num_tokens: int, rows: int) -> None:
    """Native: the rows i64 [num_tokens, num_heads] of windows i32 [num_tokens, ngram_size], both at these
    addresses; see `NgramHash.rows`."""
    step = _hash_at(hash_address)
    multipliers = integers_at(step.multipliers)
    sizes, offsets = integers_at(step.sizes), integers_at(step.offsets)
    for token in range(num_tokens):
        window = ids_at(windows + token * step.ngram_size * 4)
        written = integers_at(rows + token * step.num_heads * 8)
        # The reader of the metadata has made sure that no product overflows 63 bits: all may be signed.
        mixed, is_cut, head = window[0] * multipliers[0], False, 0
        for place in range(1, step.ngram_size):
            token_id = window[place]
            is_cut = is_cut or token_id < 0 or token_id == step.eos_token_id
            mixed ^= (step.eos_token_id if is_cut else token_id) * multipliers[place]
            for _ in range(step.heads_per_ngram):
                written[head] = mixed % sizes[head] + offsets[head]
                head += 1


def _hash(hash_address: int, windows: int, num_tokens: int, rows: int) -> None:
    hash_windows(hash_address, windows, num_tokens, rows)


@functools.cache
def _hash_kernel() -> Callable[[int, int, int, int], None]:
    return compile_kernel(_hash, "hash_ngrams", *4 * (INTEGER,))


class NgramHash:
    """The hash of one model."""

    def __init__(self, config: NgramConfig) -> None:
        self.num_heads = len(config.head_vocab_sizes)
        self.ngram_size = config.ngram_size
        self._numbers = [
            np.array(values, np.int64)
            for values in (config.multipliers, config.head_vocab_sizes, config.head_offsets)
        ]
        multipliers, sizes, offsets = self._numbers
        self._record = record(
            HASH,
            multipliers=multipliers,
            sizes=sizes,
            offsets=offsets,
            ngram_size=config.ngram_size,
            heads_per_ngram=config.heads_per_ngram,
            eos_token_id=config.eos_token_id,
            num_heads=self.num_heads,
        )
        self.address = address_of(self._record)
        """Of its HASH, for native code."""

    def rows(self, windows: NDArray[np.int32]) -> NDArray[np.int64]:
        """The rows of each token, int64 [num_tokens, num_heads].

        `windows` is int32 [num_tokens, ngram_size]: the token's own id, then the ids before it, nearest
        first; negative where the sequence had not begun.
        """
        windows = np.ascontiguousarray(windows)
        rows = np.empty((len(windows), self.num_heads), np.int64)
        _hash_kernel()(self.address, address_of(windows), len(windows), address_of(rows))
        return rows


def windows_of(token_ids: NDArray[np.int32], ngram_size: int) -> NDArray[np.int32]:
    """The windows of a whole sequence from its start, int32 [num_tokens, ngram_size]."""
    if not len(token_ids):
        return np.empty((0, ngram_size), np.int32)
    padded = np.concatenate([np.full(ngram_size - 1, -1, np.int32), token_ids])
    return np.lib.stride_tricks.sliding_window_view(padded, ngram_size)[:, ::-1]
