"""Drafts from what was said before: where the latest tokens have come once already, what followed then.

It costs next to nothing, and answers that quote their prompt, tables and code repeat long stretches.
(Saxena, "Prompt Lookup Decoding", 2023; the longest match rather than the first.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 3
"""Tokens that have to be alike."""
# More than that says no more.
_MAX_MATCH = 32
# Of the places where they are alike, so many of the last ones are looked at.
_NUM_CANDIDATES = 16


class Found(NamedTuple):
    """Tokens that followed before, after so many that are alike."""

    token_ids: list[int]
    num_alike: int


class SuffixLookup:
    """The tokens of one sequence, to be searched."""

    def __init__(self) -> None:
        self._ids: NDArray[np.int32] = np.empty(256, np.int32)
        self._length = 0

    def find(self, token_ids: Sequence[int], most: int) -> Found:
        """Up to `most` tokens that followed where the last ones of `token_ids` came before; these only ever
        grow from call to call."""
        self._take(token_ids)
        ids, length = self._ids[: self._length], self._length
        if length <= MIN_MATCH or most <= 0:
            return Found([], 0)
        is_alike = ids[MIN_MATCH - 1 : length - 1] == ids[-1]
        for back in range(1, MIN_MATCH):
            is_alike &= ids[MIN_MATCH - 1 - back : length - 1 - back] == ids[-1 - back]
        # Where what followed begins, the last places first.
        places = np.flatnonzero(is_alike)[: -_NUM_CANDIDATES - 1 : -1] + MIN_MATCH
        best, num_alike = 0, 0
        for place in places.tolist():
            alike = self._num_alike(place)
            if alike > num_alike:
                best, num_alike = place, alike
        return Found(ids[best : best + most].tolist() if num_alike else [], num_alike)

    def _num_alike(self, place: int) -> int:
        """How many tokens before a place are those before the end."""
        most = min(place, _MAX_MATCH)
        before, last = (
            self._ids[place - most : place][::-1],
            self._ids[self._length - most : self._length][::-1],
        )
        differs = np.flatnonzero(before != last)
        return int(differs[0]) if len(differs) else most

    def _take(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) > len(self._ids):
            self._ids = np.resize(self._ids, 2 * len(token_ids))
        self._ids[self._length : len(token_ids)] = token_ids[self._length :]
        self._length = len(token_ids)
