"""Progress of long work: one line that is rewritten on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

_MIN_INTERVAL_S = 1.0


class ProgressLine:
    """Shows what is being done and how far it is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = self._held_back = ""
        self._shown_at = 0.0

    def update(self, activity: str, fraction: float) -> None:
        """Shows how much is done, and what is being done."""
        self.show(f"{100 * fraction:3.0f} %  {activity}")

    def show(self, text: str) -> None:
        """Shows a state; on a file or pipe at most once a second, and only what is new."""
        self._held_back = ""
        if text == self._shown:
            return
        if self._is_terminal:
            # The escape sequence clears what a longer line left behind.
            self._stream.write(f"\r{text}\x1b[K")
        elif time.monotonic() - self._shown_at < _MIN_INTERVAL_S:
            self._held_back = text
            return
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self._shown, self._shown_at = text, time.monotonic()

    def done(self) -> None:
        """Removes the line from a terminal; a file or pipe gets the last state, if it came too soon to be
        shown."""
        if self._is_terminal and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        elif self._held_back:
            self._stream.write(self._held_back + "\n")
            self._stream.flush()
        self._shown = self._held_back = ""
