"""How much of a prompt has been read, and how long the rest may take.

Knows neither clocks nor messages: the times at which news came are handed in.
"""

from collections import deque

# Pieces of the prompt whose pace counts. The first is often the slowest, since files and caches are cold, and
# the last are slower than the first, since attention looks back further.
_NUM_RECENT = 8


class PromptProgress:
    """One prompt on its way through the model."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_read = 0
        # When it was heard that so many tokens had been read.
        self._news: deque[tuple[float, int]] = deque(maxlen=_NUM_RECENT + 1)

    def note(self, num_read: int, heard_at: float) -> None:
        """So many tokens have been read. What was known already says nothing about the pace."""
        if num_read > self.num_read:
            self.num_read = num_read
            self._news.append((heard_at, num_read))

    def rest_s(self, now: float) -> float | None:
        """Seconds until all of it is read, as the recent pace has it: never negative, None before a pace is
        known. From the moment when the next news is overdue it grows as fast as time passes, because what
        is late is best expected to be late by as much again."""
        if len(self._news) < 2:
            return None
        (began_at, num_before), (heard_at, num_read) = self._news[0], self._news[-1]
        if heard_at <= began_at:
            return None
        token_s = (heard_at - began_at) / (num_read - num_before)
        num_left = max(0, self.num_tokens - num_read)
        num_next = min(num_left, (num_read - num_before) / (len(self._news) - 1))
        silent_s = max(0.0, now - heard_at)
        on_time_s = min(silent_s, token_s * num_next)
        return token_s * num_left - on_time_s + (silent_s - on_time_s)
