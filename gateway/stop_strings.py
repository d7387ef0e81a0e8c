"""Finds a request's stop strings in text that arrives in pieces.

Pure text: knows nothing of tokens. The caller has refused empty stop strings.
"""

from collections.abc import Sequence


class StopStrings:
    """Matcher for one stream. `feed` returns the text that is certainly not part of a stop string and, once
    one is found, that string; the stop string itself and all after it are never emitted.

    The stop string that *starts* first wins, as `str.find` on the whole text would have it; of two that start
    together, the shorter. So the outcome does not depend on how the text was cut. The price: where one stop
    string holds another ("abc" and "b"), a match of the inner one waits until the outer one has failed.

    Time is linear in the text and the stop strings, whatever they are (Knuth, Morris and Pratt): a client
    chooses both.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._num_fed = 0
        self._held = ""  # fed but not emitted: the text's last len(_held) characters

    def feed(self, text: str) -> tuple[str, str | None]:
        """The next piece: (text to emit, the stop string found or None). Not called again after a match."""
        for pattern in self._patterns:
            pattern.advance(text, self._num_fed)
        self._num_fed += len(text)
        self._held += text
        undecided = min(
            (self._num_fed - pattern.num_matched for pattern in self._patterns if pattern.found_at is None),
            default=self._num_fed,
        )
        return self._release(undecided)

    def flush(self) -> tuple[str, str | None]:
        """Ends the text: emits what was held back, up to a stop string that was waiting for an outer one."""
        return self._release(self._num_fed)

    def _release(self, undecided: int) -> tuple[str, str | None]:
        """Emits up to the first match, or up to `undecided`, from where on a match may still begin."""
        start = self._num_fed - len(self._held)
        found = [
            (pattern.found_at, len(pattern.stop), pattern.stop)
            for pattern in self._patterns
            if pattern.found_at is not None and pattern.found_at <= undecided
        ]
        if found:
            found_at, _, stop = min(found)
            emit, self._held = self._held[: found_at - start], ""
            return emit, stop
        emit, self._held = self._held[: undecided - start], self._held[undecided - start :]
        return emit, None


class _Pattern:
    """One stop string: how much of it the text ends with, and where it was found first."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.found_at: int | None = None
        self.num_matched = 0
        # _shorter[n]: length of the longest proper prefix of stop[:n] that is also its end.
        self._shorter = [0, 0]
        length = 0
        for character in stop[1:]:
            length = self._step(length, character)
            self._shorter.append(length)

    def _step(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length]
        return length + (self.stop[length] == character)

    def advance(self, text: str, num_before: int) -> None:
        """Takes in `text`, which `num_before` characters precede."""
        if self.found_at is not None:
            return
        for position, character in enumerate(text, num_before + 1):
            self.num_matched = self._step(self.num_matched, character)
            if self.num_matched == len(self.stop):
                self.found_at = position - len(self.stop)
                return
