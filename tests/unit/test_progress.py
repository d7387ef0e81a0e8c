"""The progress line: rewritten on a terminal, sparing elsewhere."""

import io

import pytest

from shared.cli import progress
from shared.cli.progress import ProgressLine


class Terminal(io.StringIO):
    """A stream that is shown to somebody."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_terminal() -> None:
    """Every change is shown at once, on one line, without rests of a longer one; the end removes it."""
    stream = Terminal()
    line = ProgressLine(stream)
    line.update("reading weights", 0.5)
    line.update("reading weights", 0.5)
    line.update("serving", 1.0)
    line.done()
    line.done()
    assert stream.getvalue() == "\r 50 %  reading weights\x1b[K\r100 %  serving\x1b[K\r\x1b[K"


def test_file(clock: list[float]) -> None:
    """A log gets plain lines, at most one a second, and none twice."""
    stream = io.StringIO()
    line = ProgressLine(stream)
    for now, activity, fraction in (
        (100.0, "reading", 0.0),
        (100.5, "reading", 0.1),
        (101.0, "reading", 0.2),
        (103.0, "reading", 0.2),
        (103.5, "serving", 1.0),
    ):
        clock[0] = now
        line.update(activity, fraction)
    line.done()
    assert stream.getvalue() == "  0 %  reading\n 20 %  reading\n100 %  serving\n"


def test_nothing_shown_nothing_removed() -> None:
    """A command that is done at once leaves the terminal alone."""
    stream = Terminal()
    ProgressLine(stream).done()
    assert stream.getvalue() == ""


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is for results."""
    ProgressLine().update("reading", 0.25)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", " 25 %  reading\n")


def test_the_last_state_is_not_held_back(clock: list[float]) -> None:
    """A log that ends at 43 % reads as if the work had been given up."""
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.update("replaying", 0.43)
    clock[0] += 0.5
    line.update("replaying", 1.0)
    line.done()
    line.done()
    assert stream.getvalue() == " 43 %  replaying\n100 %  replaying\n"
