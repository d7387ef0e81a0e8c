"""Log lines: one for each record, whatever clients write into it."""

import logging
from collections.abc import Iterator

import pytest

from shared.logs import set_up_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], _ = handlers, root.setLevel(level)


def test_no_client_makes_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "gateway", "abcd")
    hostile = "x\n12:00:00.000 ERROR gateway.abcd: forged\r\x1b[31m\u2028\x85\tend"
    logging.getLogger("gateway.test").info("failed: %s", hostile)
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert text.endswith(r"x\x0a12:00:00.000 ERROR gateway.abcd: forged\x0d\x1b[31m\x2028\x85" + "\tend\n")


def test_a_traceback_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "gateway", "abcd")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("gateway.test").exception("it failed")
    assert "\nTraceback (most recent call last):\n" in capsys.readouterr().err
