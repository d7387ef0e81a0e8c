"""How reading prompts shares time with answers that are being written.

A chunk of a prompt takes as long as many tokens of an answer. While answers are written, a chunk is made no
larger than what takes about the longest gap that is allowed between two tokens, and after it comes so much
time for answers alone that prompts have no more than their share.
"""

SMALLEST_BESIDE = 64
"""Tokens of a chunk beside answers, at least: fewer would read nearly as many experts."""
# Of the newest step, in means of times.
_NEWEST_SHARE = 0.3


class PrefillShare:
    """What the last steps have taken, and what the next one may hold."""

    def __init__(self, share: float, longest_gap_s: float) -> None:
        """`share` of the time, above 0 and at most 1, is for prompts while answers are written."""
        self._share = share
        self._longest_gap_s = longest_gap_s
        self._answers_s = 0.0
        self._token_s = 0.0
        # Time that is answers' alone before the next chunk.
        self._owed_s = 0.0

    def note(self, seconds: float, num_prefilled: int, *, has_answers: bool) -> None:
        """A step took so long, with so many tokens of a prompt, and with answers beside or not."""
        if not num_prefilled:
            self._answers_s += _NEWEST_SHARE * (seconds - self._answers_s)
            self._owed_s = max(0.0, self._owed_s - seconds)
            return
        own_s = max(0.0, seconds - self._answers_s) if has_answers else seconds
        found = own_s / num_prefilled
        self._token_s = self._token_s + _NEWEST_SHARE * (found - self._token_s) if self._token_s else found
        if has_answers:
            self._owed_s = own_s * (1 - self._share) / self._share

    def limit(self, *, has_answers: bool) -> int | None:
        """Tokens that the next chunk may have: none where it is answers' turn, None for any number."""
        if not has_answers:
            return None
        if self._owed_s > 0:
            return 0
        if not self._token_s:
            return SMALLEST_BESIDE
        return max(SMALLEST_BESIDE, int(self._longest_gap_s / self._token_s))
