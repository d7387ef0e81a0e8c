"""How many tokens to draft, of costs and drafts that are known."""

import random

import pytest

from gpu_worker.speculation.payoff import Payoff

NAME = "block"


def learned(step_s: dict[int, float], draft_s: float, shares: list[float], rounds: int = 600) -> Payoff:
    """After many windows of as many drafts as there are shares."""
    payoff, rng = Payoff(), random.Random(0)
    for _ in range(rounds):
        for num_tokens, seconds in step_s.items():
            payoff.note_step(num_tokens, seconds)
        payoff.note_drafts(NAME, 1, draft_s)
        accepted = 0
        while accepted < len(shares) and rng.random() < shares[accepted]:
            accepted += 1
        payoff.note_verified(NAME, len(shares), accepted)
    return payoff


def usual(payoff: Payoff, num_sequences: int = 1, most: int = 4) -> int:
    """What is answered most of the time."""
    answers = [payoff.how_many(NAME, num_sequences, most) for _ in range(400)]
    return max(set(answers), key=answers.count)


def test_all_where_windows_are_cheap() -> None:
    """Steps that cost the same whatever their size."""
    payoff = learned({1: 1.0, 5: 1.05}, 0.02, [0.9, 0.9, 0.9, 0.9])
    assert usual(payoff) == 4
    assert payoff.is_worth(NAME, 4)


def test_none_where_they_do_not_pay() -> None:
    """Steps that cost by the token, or drafts that are hardly ever right."""
    assert usual(learned({1: 1.0, 2: 2.0, 5: 5.0}, 0.1, [0.9] * 4)) == 0
    wrong = learned({1: 1.0, 5: 1.2}, 0.1, [0.05] * 4)
    assert usual(wrong) == 0
    assert not wrong.is_worth(NAME, 4)


def test_as_many_as_pay() -> None:
    """The first draft is nearly always right, the second hardly ever."""
    assert usual(learned({1: 1.0, 2: 1.1, 5: 1.4}, 0.1, [0.95, 0.1, 0.5, 0.5])) == 1


def test_by_the_number_of_sequences() -> None:
    """Where many run at once, what a window has more is no longer for nothing."""
    payoff = learned({1: 1.0, 5: 1.1, 8: 1.3, 40: 8.0}, 0.05, [0.7] * 4)
    assert usual(payoff, 1) == 4
    assert usual(payoff, 8) < 4


@pytest.mark.parametrize("shares", [[0.9] * 4, [0.02] * 4])
def test_it_keeps_trying(shares: list[float]) -> None:
    """What is not done is done now and then, so that a change is noticed; ever more seldom."""
    payoff = learned({1: 1.0, 5: 1.2}, 0.01, shares)
    best = usual(payoff)
    early = sum(payoff.how_many(NAME, 1, 4) != best for _ in range(500))
    late = sum(payoff.how_many(NAME, 1, 4) != best for _ in range(5000)) / 10
    assert 0 < late <= early < 50


def test_it_changes_its_mind() -> None:
    """After texts whose drafts are right came others, and the other way round."""
    payoff = learned({1: 1.0, 5: 1.5}, 0.05, [0.95] * 4)
    assert usual(payoff) == 4
    for _ in range(300):
        payoff.note_verified(NAME, 4, 0)
    assert usual(payoff) == 0
    for _ in range(300):
        payoff.note_verified(NAME, 4, 4)
    assert usual(payoff) == 4


def test_before_anything_is_known() -> None:
    """It begins with drafts."""
    assert Payoff().how_many(NAME, 1, 4) == 4
    assert Payoff().how_many(NAME, 1, 0) == 0


def test_a_step_that_was_held_up() -> None:
    """Counts for little."""
    payoff = learned({1: 1.0, 5: 1.1}, 0.01, [0.9] * 4)
    payoff.note_step(5, 1000.0)
    assert usual(payoff) == 4
