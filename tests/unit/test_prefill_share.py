"""Prompts and answers share the time as they are told to."""

import pytest

from gpu_worker.prefill_share import SMALLEST_BESIDE, PrefillShare

ANSWER_S, TOKEN_S = 0.02, 0.001


def simulated(share: PrefillShare, seconds: float) -> tuple[float, list[float], int]:
    """The part of so much time that a prompt without end had beside an answer, the gaps between the answer's
    tokens, and the tokens of the last chunk."""
    gaps: list[float] = []
    prompts_s, size = 0.0, 0
    while sum(gaps) < seconds:
        limit = share.limit(has_answers=True)
        num_tokens = 100_000 if limit is None else min(limit, 100_000)
        own_s = num_tokens * TOKEN_S
        prompts_s += own_s
        size = num_tokens or size
        gaps.append(ANSWER_S + own_s)
        share.note(gaps[-1], num_tokens, has_answers=True)
    return prompts_s / sum(gaps), gaps, size


@pytest.mark.parametrize("part", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("gap_s", [0.1, 1.0])
def test_prompts_have_their_share(part: float, gap_s: float) -> None:
    """And no more, whatever the longest gap; few gaps are long."""
    found, gaps, size = simulated(PrefillShare(part, gap_s), 300.0)
    # Whole steps of answers make up for a chunk.
    assert 0.7 * part <= found <= part + 0.05
    assert max(gaps) <= 1.3 * max(gap_s, SMALLEST_BESIDE * TOKEN_S) + ANSWER_S
    assert size == pytest.approx(max(SMALLEST_BESIDE, gap_s / TOKEN_S), rel=0.3)


def test_all_of_the_time() -> None:
    """A chunk in every step, if that is wanted."""
    share = PrefillShare(1.0, 0.5)
    for _ in range(20):
        assert share.limit(has_answers=True)
        share.note(0.6, 500, has_answers=True)


def test_prompts_alone_have_no_limit() -> None:
    """Nobody waits for them, and nothing is owed for it afterwards."""
    share = PrefillShare(0.5, 0.1)
    assert share.limit(has_answers=False) is None
    share.note(5.0, 5000, has_answers=False)
    assert share.limit(has_answers=False) is None
    assert share.limit(has_answers=True) == 100


def test_the_first_chunk_beside_an_answer_is_small() -> None:
    """Nothing is known of what it takes."""
    assert PrefillShare(0.5, 10.0).limit(has_answers=True) == SMALLEST_BESIDE
