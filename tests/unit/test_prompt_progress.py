"""How long a prompt will take: no guesses before there is a pace, none below zero, none that flatter."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt_progress import _NUM_RECENT, PromptProgress

pauses = st.floats(0, 1e4)
sizes = st.integers(0, 5000)


def read(num_tokens: int, *news: tuple[float, int]) -> PromptProgress:
    progress = PromptProgress(num_tokens)
    for heard_at, num_read in news:
        progress.note(num_read, heard_at)
    return progress


def test_before_two_pieces_there_is_no_pace() -> None:
    for progress in (read(100), read(100, (1, 10)), read(100, (1, 10), (2, 10)), read(100, (1, 10), (1, 20))):
        assert progress.rest_s(5) is None


def test_at_an_even_pace_the_estimate_is_the_truth_at_any_time() -> None:
    """Also between two pieces, where what is known stays the same and the time passes."""
    progress = PromptProgress(1000)
    progress.note(100, 2.0)
    for piece in range(2, 10):
        progress.note(100 * piece, 2.0 * piece)
        for later in (0, 0.5, 1.9):
            assert progress.rest_s(2.0 * piece + later) == pytest.approx(20 - 2 * piece - later)


def test_a_short_last_piece_is_due_earlier() -> None:
    progress = read(250, (1, 100), (2, 200))
    assert progress.rest_s(2.5) == pytest.approx(0)
    assert progress.rest_s(3.5) == pytest.approx(1)


def test_a_stalled_prompt_takes_longer_and_longer() -> None:
    progress = read(400, (1, 100), (2, 200))
    assert [progress.rest_s(now) for now in (2, 3, 5, 100)] == [2, 1, 3, 98]


def test_only_the_recent_pace_counts() -> None:
    """A slow start, from a cold disk perhaps, is forgotten."""
    news = [(0.0, 10), (1000.0, 20), *((1000.0 + number, 20 + 10 * number) for number in range(1, 9))]
    assert len(news) == _NUM_RECENT + 2
    assert read(200, *news).rest_s(1008) == pytest.approx(10)


def test_what_is_not_new_changes_nothing() -> None:
    progress = read(100, (1, 10), (2, 20), (50, 20), (60, 15))
    assert (progress.num_read, progress.rest_s(2)) == (20, pytest.approx(8))


@given(st.integers(0, 20_000), st.lists(st.tuples(pauses, sizes), max_size=20), st.lists(pauses, min_size=2))
def test_never_negative_and_never_falling_faster_than_time(
    num_tokens: int, steps: list[tuple[float, int]], looks: list[float]
) -> None:
    """Whatever comes and whenever it is asked; in silence it falls by the time that passes, and then rises by
    it."""
    progress, now, num_read = PromptProgress(num_tokens), 0.0, 0
    for pause, size in steps:
        now, num_read = now + pause, num_read + size
        progress.note(num_read, now)
        rest_s = progress.rest_s(now)
        assert rest_s is None or rest_s >= 0
    estimates = [(now + after, progress.rest_s(now + after)) for after in sorted(looks)]
    if estimates[0][1] is None:
        assert all(estimate is None for _, estimate in estimates)
        return
    is_rising = False
    for (before, old), (after, new) in pairwise(estimates):
        assert old is not None
        assert new is not None
        assert new >= 0
        assert abs(new - old) <= (after - before) + 1e-6 * (1 + old)
        is_rising |= new > old + 1e-6 * (1 + old)
        if is_rising:
            assert new >= old - 1e-6 * (1 + old)
