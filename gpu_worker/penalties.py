"""What a request's bias and penalties do to logits, before anything is chosen from them.

First `logit_bias` is added. Then the logit of every token that the window holds is divided by the repetition
penalty where it is positive, and multiplied where it is not; after that, for tokens that were generated, the
frequency penalty is subtracted once for each time, and the presence penalty once. Last, tokens that would end
the answer too early get -inf. vLLM and llama.cpp have the same formulas in the same order.

The window is the last `repeat_last_n` tokens of prompt and answer together. The repetition penalty looks at
all of it; the other two at what of it was generated, as vLLM does: llama.cpp counts the prompt for them too.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shared.messages import Sampling

_LARGEST = float(np.finfo(np.float32).max)
_FIRST_CAPACITY = 64


class LogitEdits:
    """The edits of one request. Only tokens that are concerned are touched, so that what chooses from a large
    vocabulary stays as fast as without."""

    def __init__(
        self, sampling: Sampling, prompt_token_ids: Sequence[int], end_token_ids: Iterable[int]
    ) -> None:
        """`end_token_ids` are those that may not be chosen before `sampling.min_tokens` others were."""
        self._bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float64)
        self._penalties = _Penalties(sampling, prompt_token_ids) if _has_penalties(sampling) else None
        self._end_ids = np.array(sorted(set(end_token_ids)), np.int64)
        self._num_until_end = sampling.min_tokens if len(self._end_ids) else 0

    @property
    def has_any(self) -> bool:
        """Whether `apply` would do anything now."""
        return bool(self._penalties is not None or len(self._bias_ids) or self._num_until_end > 0)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Changes logits [vocabulary] in place. They are finite before; after, some may be -inf."""
        if len(self._bias_ids):
            _change(logits, self._bias_ids, logits[self._bias_ids].astype(np.float64) + self._bias)
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._num_until_end > 0:
            # Ids that are set by hand may lie beyond what the model has.
            logits[self._end_ids[self._end_ids < len(logits)]] = -np.inf

    def note(self, token_id: int) -> None:
        """The token was chosen."""
        self._num_until_end -= 1
        if self._penalties is not None:
            self._penalties.note(token_id)


def _has_penalties(sampling: Sampling) -> bool:
    is_off = sampling.repetition_penalty == 1 and not (
        sampling.presence_penalty or sampling.frequency_penalty
    )
    return not is_off and sampling.repeat_last_n != 0


def _change(logits: NDArray[np.float32], ids: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    """Sets logits to what was computed of them, which must not overflow."""
    logits[ids] = values.clip(-_LARGEST, _LARGEST)


class _Penalties:
    """How often the window holds each token, kept as arrays that are applied at once."""

    def __init__(self, sampling: Sampling, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._size = sampling.repeat_last_n if sampling.repeat_last_n > 0 else None
        start = 0 if self._size is None else max(0, len(prompt_token_ids) - self._size)
        prompt = np.array(list(islice(prompt_token_ids, start, None)), np.int64)
        ids, counts = np.unique(prompt, return_counts=True)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        capacity = len(ids) + _FIRST_CAPACITY
        self._ids = np.zeros(capacity, np.int64)
        # How often they are in the window, and how many of these times they were generated.
        self._in_window = np.zeros(capacity, np.int64)
        self._generated = np.zeros(capacity, np.int64)
        self._ids[: len(ids)] = ids
        self._in_window[: len(ids)] = counts
        # The tokens of the window, oldest first; needed only where it has an end.
        self._window = deque(prompt.tolist() if self._size is not None else ())
        self._num_prompt_in_window = len(self._window)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Changes logits [vocabulary] in place."""
        num_places = len(self._places)
        ids, generated = self._ids[:num_places], self._generated[:num_places]
        values = logits[ids].astype(np.float64)
        repeated = np.where(values > 0, values / self._repetition, values * self._repetition)
        values = np.where(self._in_window[:num_places] > 0, repeated, values)
        values -= self._frequency * generated + self._presence * (generated > 0)
        _change(logits, ids, values)

    def note(self, token_id: int) -> None:
        """The token is part of the window now."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._grow()
        self._ids[place] = token_id
        self._in_window[place] += 1
        self._generated[place] += 1
        if self._size is None:
            return
        self._window.append(token_id)
        if len(self._window) > self._size:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        place = self._places[self._window.popleft()]
        self._in_window[place] -= 1
        if self._num_prompt_in_window:
            self._num_prompt_in_window -= 1
        else:
            self._generated[place] -= 1

    def _grow(self) -> None:
        self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._in_window = np.concatenate([self._in_window, np.zeros_like(self._in_window)])
        self._generated = np.concatenate([self._generated, np.zeros_like(self._generated)])
