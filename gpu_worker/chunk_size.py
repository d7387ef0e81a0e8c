"""How many tokens of a prompt one step takes, so that no step waits for the disk for minutes.

Cancelling, progress and other streams come between two steps. A step that reads everything from a slow disk
is therefore made smaller, by what the last ones have waited for n-gram rows; as large as was asked for where
none waits. Experts are left out of this: a step of some dozen tokens needs nearly all of them, so that
smaller steps would read the same again and again.
"""

SMALLEST = 16
"""Below this a step's other costs are larger than what it waits for."""
_LONGEST_WAIT_S = 10.0
# Of the newest step's rate, in the mean over steps.
_NEWEST_SHARE = 0.5


class ChunkSize:
    """The size of the next chunk, in tokens."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._wait_s_a_token = 0.0
        self.tokens = largest

    def note(self, num_tokens: int, row_wait_s: float) -> None:
        """A step of so many tokens of a prompt has waited so long for rows."""
        if num_tokens < SMALLEST:
            # The end of a prompt: what it waits for says nothing of more tokens.
            return
        found = row_wait_s / num_tokens
        self._wait_s_a_token += _NEWEST_SHARE * (found - self._wait_s_a_token)
        if self._wait_s_a_token * self._largest <= _LONGEST_WAIT_S:
            self.tokens = self._largest
        else:
            fitting = int(_LONGEST_WAIT_S / self._wait_s_a_token)
            self.tokens = max(min(SMALLEST, self._largest), fitting)
