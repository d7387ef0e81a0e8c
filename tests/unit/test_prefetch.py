"""Prompts whose rows are staged ahead of their turn: order, bounds, and advice that must not hurt."""

import logging
import queue
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.messages import PromptStaged
from stager import prefetch
from stager.ngram_hash import windows_of
from stager.ngram_rows import RowReader
from stager.prefetch import PromptPrefetcher
from stager.read_queue import ReadCounts, ReadQueue
from tests.support.ngram_configs import ngram_config

NO_READS = ReadCounts(0, 0, 0, 0.0, 0.0)


class Queue(ReadQueue):
    """A queue that reads nothing."""

    def __init__(self) -> None:
        self.is_interrupted = False

    @property
    def counts(self) -> ReadCounts:
        return NO_READS

    def interrupt(self) -> None:
        self.is_interrupted = True


class Reader(RowReader):
    """A reader that only notes what it is asked for, and can be held up."""

    def __init__(self) -> None:
        self.num_heads = 4
        self.queue = Queue()
        self.asked: list[list[list[int]]] = []
        self.failures: list[Exception] = []
        self.num_failed = 0
        self._change = threading.Condition()
        self._is_held = False
        self._num_calls = 0

    @property
    def num_rows(self) -> int:
        return sum(len(piece) * self.num_heads for piece in self.asked)

    @property
    def num_hits(self) -> int:
        return 0

    @property
    def num_failures(self) -> int:
        return self.num_failed

    def stage(self, windows: NDArray[np.int32]) -> None:
        assert windows.flags.c_contiguous
        with self._change:
            self._num_calls += 1
            self._change.notify_all()
            self._change.wait_for(lambda: not self._is_held)
            if self.failures:
                raise self.failures.pop()
            self.asked.append(windows.tolist())
            self._change.notify_all()

    def hold(self) -> None:
        """Lets the next call wait."""
        with self._change:
            self._is_held = True

    def let_go(self) -> None:
        with self._change:
            self._is_held = False
            self._change.notify_all()

    def wait_for_call(self) -> None:
        """Waits until the first call has come."""
        with self._change:
            self._change.wait_for(lambda: self._num_calls > 0)

    def wait_for(self, last: list[list[int]]) -> None:
        """Waits until these windows were asked for."""
        with self._change:
            self._change.wait_for(
                lambda: [window for piece in self.asked for window in piece][-len(last) :] == last
            )


CONFIG = ngram_config()


def windows(token_ids: list[int]) -> list[list[int]]:
    found: list[list[int]] = windows_of(np.array(token_ids, np.int32), CONFIG.ngram_size).tolist()
    return found


class Prefetching:
    """A prefetcher, its reader, and what it posts."""

    def __init__(self, num_places: int = 1 << 20) -> None:
        self.reader = Reader()
        self.num_taken = 0
        self.posted: queue.SimpleQueue[PromptStaged] = queue.SimpleQueue()
        self.prefetcher = PromptPrefetcher(
            self.reader, CONFIG, "model.gguf", num_places, lambda: self.num_taken, self.posted.put
        )
        self.stage, self.forget = self.prefetcher.stage, self.prefetcher.forget

    def settle(self) -> None:
        """Waits until everything that was staged before is done."""
        self.stage("end", [1, 2, 3, 4])
        self.reader.wait_for(windows([1, 2, 3, 4]))

    def close(self) -> None:
        self.reader.let_go()
        self.prefetcher.stop()
        assert not self.prefetcher._thread.is_alive()


@pytest.fixture
def made() -> Iterator[Prefetching]:
    """Not held up, unless a test wants it so; ended with its thread after the test."""
    prefetching = Prefetching()
    yield prefetching
    prefetching.close()


def test_the_rows_of_a_prompt(made: Prefetching) -> None:
    """Exactly the windows that the step will ask for, in the order the prompts came; each prompt is reported
    when it is done."""
    made.stage("a", [9, 8, 7])
    made.stage("b", [6])
    made.settle()
    assert made.reader.asked == [windows([9, 8, 7]), windows([6]), windows([1, 2, 3, 4])]
    reports = [made.posted.get(timeout=10) for _ in range(3)]
    assert [(report.request_id, report.num_rows) for report in reports] == [("a", 12), ("b", 4), ("end", 16)]
    assert reports[0].reads.file == "model.gguf"


def test_what_is_staged_stays_behind_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more rows than half of the cache has places waits until steps have taken some."""
    monkeypatch.setattr(prefetch, "TOKENS_PER_PIECE", 2)
    made = Prefetching(num_places=40)
    made.stage("a", list(range(1, 11)))
    made.reader.wait_for(windows(list(range(1, 11)))[:4])
    time.sleep(0.1)
    assert made.reader.num_rows == 16
    made.num_taken = 8
    made.reader.wait_for(windows(list(range(1, 11)))[:6])
    made.num_taken = 40
    made.reader.wait_for(windows(list(range(1, 11))))
    assert made.posted.get(timeout=10).num_rows == 40
    made.close()


def test_forgotten_while_it_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends stops the staging of its prompt, which had to wait, and makes way for the next."""
    monkeypatch.setattr(prefetch, "TOKENS_PER_PIECE", 2)
    made = Prefetching(num_places=16)
    made.stage("a", list(range(1, 11)))
    made.reader.wait_for(windows(list(range(1, 11)))[:2])
    made.forget("a")
    assert made.posted.get(timeout=10).num_rows == 8
    made.num_taken = 8
    made.stage("b", [3])
    made.reader.wait_for(windows([3]))
    made.close()


def test_failed_reads_are_logged(made: Prefetching, caplog: pytest.LogCaptureFixture) -> None:
    """They fail no request: the step that needs the rows tries again."""
    made.reader.hold()
    made.stage("a", [9])
    made.reader.wait_for_call()
    made.reader.num_failed = 3
    made.reader.let_go()
    made.settle()
    assert "3 n-gram rows of a could not be read from model.gguf" in caplog.text


def test_forgotten_while_it_waits(made: Prefetching) -> None:
    """A request that is over costs no reads; one that nobody knows is no error."""
    made.reader.hold()
    made.stage("a", [9])
    made.reader.wait_for_call()
    made.stage("b", [8])
    made.forget("b")
    made.forget("nobody")
    made.reader.let_go()
    made.settle()
    assert made.reader.asked == [windows([9]), windows([1, 2, 3, 4])]


def test_forgotten_while_it_is_read(made: Prefetching, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is worked off in pieces, and left after the piece in which it was forgotten; a later one
    of the same request is read."""
    monkeypatch.setattr(prefetch, "TOKENS_PER_PIECE", 2)
    token_ids = [9, 8, 7, 6, 5]
    made.reader.hold()
    made.stage("a", token_ids)
    made.reader.wait_for_call()
    made.forget("a")
    made.reader.let_go()
    made.stage("a", [4, 3])
    made.settle()
    assert made.reader.asked == [
        windows(token_ids)[:2],
        windows([4, 3]),
        windows([1, 2, 3, 4])[:2],
        windows([1, 2, 3, 4])[2:],
    ]


def test_the_queue_is_bounded(made: Prefetching, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than it keeps: the oldest make room, memory does not grow."""
    monkeypatch.setattr(prefetch, "_MAX_QUEUED_PROMPTS", 3)
    made.reader.hold()
    made.stage("running", [9])
    made.reader.wait_for_call()
    for number in range(6):
        made.stage(str(number), [10 + number])
    made.reader.let_go()
    made.reader.wait_for(windows([15]))
    assert made.reader.asked == [windows([9]), windows([13]), windows([14]), windows([15])]


def test_failing_advice(made: Prefetching, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt whose rows cannot be brought near, or that has no tokens, is logged or passed over; the next
    one still gets its own."""
    made.reader.failures = [OSError("Input/output error")]
    with caplog.at_level(logging.ERROR):
        made.stage("a", [9])
        made.stage("b", [])
        made.settle()
    assert "the n-gram rows of a were not staged" in caplog.text
    assert "Input/output error" in caplog.text
    assert made.reader.asked == [windows([1, 2, 3, 4])]


def test_stop_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends does not first read the rest of a prompt, nor the prompts that wait."""
    monkeypatch.setattr(prefetch, "TOKENS_PER_PIECE", 1)
    made = Prefetching()
    made.reader.hold()
    made.stage("a", [9, 8, 7])
    made.stage("b", [6])
    made.reader.wait_for_call()
    stopping = threading.Thread(target=made.prefetcher.stop)
    stopping.start()
    while not made.prefetcher._is_stopped:
        pass
    made.reader.let_go()
    stopping.join()
    assert made.reader.asked == [windows([9, 8, 7])[:1]]
