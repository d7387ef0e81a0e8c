"""Prompts whose rows are brought near ahead of their turn: order, bounds, and advice that must not hurt."""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.model_config import NgramConfig
from stager import prefetch
from stager.ngram_hash import NgramHash, windows_of
from stager.ngram_table import NgramTable
from stager.prefetch import PromptPrefetcher
from tests.support.ngram_configs import ngram_config


class Table(NgramTable):
    """A table that only notes what it is asked for, and can be held up."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        self.failures: list[Exception] = []
        self._change = threading.Condition()
        self._is_held = False
        self._num_calls = 0

    def bring_near(self, rows: NDArray[np.int64]) -> int:
        with self._change:
            self._num_calls += 1
            self._change.notify_all()
            self._change.wait_for(lambda: not self._is_held)
            if self.failures:
                raise self.failures.pop()
            self.asked.append(rows.tolist())
            self._change.notify_all()
        return len(rows)

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

    def wait_for_rows(self, last: list[list[int]]) -> None:
        """Waits until these were asked for."""
        with self._change:
            self._change.wait_for(
                lambda: [row for piece in self.asked for row in piece][-len(last) :] == last
            )


CONFIG = ngram_config()


def rows_of(token_ids: list[int], config: NgramConfig = CONFIG) -> list[list[int]]:
    rows: list[list[int]] = (
        NgramHash(config).rows(windows_of(np.array(token_ids, np.int32), config.ngram_size)).tolist()
    )
    return rows


@pytest.fixture
def table() -> Table:
    """Not held up, unless a test wants it so."""
    return Table()


@pytest.fixture
def prefetcher(table: Table) -> Iterator[PromptPrefetcher]:
    """Ended with its thread after the test."""
    made = PromptPrefetcher(table, NgramHash(CONFIG), CONFIG)
    yield made
    table.let_go()
    made.stop()
    assert not made._thread.is_alive()


def settle(prefetcher: PromptPrefetcher, table: Table) -> None:
    """Waits until everything that was staged before is done."""
    prefetcher.stage("end", [1, 2, 3, 4])
    table.wait_for_rows(rows_of([1, 2, 3, 4]))


def test_the_rows_of_a_prompt(prefetcher: PromptPrefetcher, table: Table) -> None:
    """Exactly the rows that the step will ask for, in the order the prompts came."""
    prefetcher.stage("a", [9, 8, 7])
    prefetcher.stage("b", [6])
    settle(prefetcher, table)
    assert table.asked == [rows_of([9, 8, 7]), rows_of([6]), rows_of([1, 2, 3, 4])]


def test_forgotten_while_it_waits(prefetcher: PromptPrefetcher, table: Table) -> None:
    """A request that is over costs no reads; one that nobody knows is no error."""
    table.hold()
    prefetcher.stage("a", [9])
    table.wait_for_call()
    prefetcher.stage("b", [8])
    prefetcher.forget("b")
    prefetcher.forget("nobody")
    table.let_go()
    settle(prefetcher, table)
    assert table.asked == [rows_of([9]), rows_of([1, 2, 3, 4])]


def test_forgotten_while_it_is_read(
    prefetcher: PromptPrefetcher, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is worked off in pieces, and left after the piece in which it was forgotten; a later one
    of the same request is read."""
    monkeypatch.setattr(prefetch, "_TOKENS_PER_PIECE", 2)
    token_ids = [9, 8, 7, 6, 5]
    table.hold()
    prefetcher.stage("a", token_ids)
    table.wait_for_call()
    prefetcher.forget("a")
    table.let_go()
    prefetcher.stage("a", [4, 3])
    settle(prefetcher, table)
    assert table.asked == [
        rows_of(token_ids)[:2],
        rows_of([4, 3]),
        rows_of([1, 2, 3, 4])[:2],
        rows_of([1, 2, 3, 4])[2:],
    ]


def test_the_queue_is_bounded(
    prefetcher: PromptPrefetcher, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than it keeps: the oldest make room, memory does not grow."""
    monkeypatch.setattr(prefetch, "_MAX_QUEUED_PROMPTS", 3)
    table.hold()
    prefetcher.stage("running", [9])
    table.wait_for_call()
    for number in range(6):
        prefetcher.stage(str(number), [10 + number])
    table.let_go()
    table.wait_for_rows(rows_of([15]))
    assert table.asked == [rows_of([9]), rows_of([13]), rows_of([14]), rows_of([15])]


def test_failing_advice(prefetcher: PromptPrefetcher, table: Table, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt whose rows cannot be brought near, or that has no tokens, is logged or passed over; the next
    one still gets its own."""
    table.failures = [OSError("Input/output error")]
    with caplog.at_level(logging.ERROR):
        prefetcher.stage("a", [9])
        prefetcher.stage("b", [])
        settle(prefetcher, table)
    assert "the n-gram rows of a were not brought near" in caplog.text
    assert "Input/output error" in caplog.text
    assert table.asked == [rows_of([1, 2, 3, 4])]


def test_stop_in_the_middle(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends does not first read the rest of a prompt, nor the prompts that wait."""
    monkeypatch.setattr(prefetch, "_TOKENS_PER_PIECE", 1)
    prefetcher = PromptPrefetcher(table, NgramHash(CONFIG), CONFIG)
    table.hold()
    prefetcher.stage("a", [9, 8, 7])
    prefetcher.stage("b", [6])
    table.wait_for_call()
    stopping = threading.Thread(target=prefetcher.stop)
    stopping.start()
    while not prefetcher._is_stopped:
        pass
    table.let_go()
    stopping.join()
    assert table.asked == [rows_of([9, 8, 7])[:1]]
