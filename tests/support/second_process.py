"""A second Python process, for what two threads of one process cannot show: locks, memory, sudden death."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])


class SecondProcess:
    """A running program; talk to it by lines. The time limit of the test is the limit for every wait."""

    def __init__(self, source: str, arguments: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            env=os.environ | {"PYTHONPATH": _ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def line(self) -> str:
        """The next line it prints; fails where it ended instead."""
        line = self._output.readline()
        assert line, f"the second process ended with {self._process.wait()} before it said anything"
        return line.removesuffix("\n")

    def say(self, line: str) -> None:
        """Gives it a line to read."""
        self._input.write(line + "\n")
        self._input.flush()

    def kill(self) -> None:
        """Ends it as `kill -9` does, and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def finish(self) -> list[str]:
        """Closes its input, waits for its end, which must be a good one, and returns what it still said."""
        self._input.close()
        rest = self._output.read().splitlines()
        assert self._process.wait() == 0
        return rest

    def close(self) -> None:
        """Leaves nothing behind."""
        self.kill()
        self._input.close()
        self._output.close()


@contextmanager
def second_process(source: str, *arguments: str) -> Iterator[SecondProcess]:
    """Runs `source` with `arguments` in sys.argv[1:] until the context is left."""
    process = SecondProcess(source, arguments)
    try:
        yield process
    finally:
        process.close()
