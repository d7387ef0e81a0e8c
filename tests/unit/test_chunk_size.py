"""Steps that shrink where the disk is slow, and grow again."""

import pytest

from gpu_worker.chunk_size import SMALLEST, ChunkSize


def after(chunk: ChunkSize, wait_s_a_token: float, num_steps: int = 20) -> int:
    """Its size after so many steps on a disk of that speed."""
    for _ in range(num_steps):
        chunk.note(chunk.tokens, wait_s_a_token * chunk.tokens)
    return chunk.tokens


def test_a_fast_disk_changes_nothing() -> None:
    assert after(ChunkSize(512), 0.0) == 512
    assert after(ChunkSize(512), 10.0 / 513) == 512


@pytest.mark.parametrize("wait_s_a_token", [0.025, 0.1, 0.5])
def test_a_step_waits_ten_seconds_at_most(wait_s_a_token: float) -> None:
    """Whatever it was before."""
    tokens = after(ChunkSize(4096), wait_s_a_token)
    assert 9 <= tokens * wait_s_a_token <= 10.1


def test_it_does_not_vanish() -> None:
    """However slow, a step takes some tokens; no more than were asked for."""
    assert after(ChunkSize(512), 60.0) == SMALLEST
    assert after(ChunkSize(4), 60.0) == 4


def test_a_short_rest_of_a_prompt_says_nothing() -> None:
    """One read that takes long would otherwise be taken for that of every token."""
    chunk = ChunkSize(512)
    chunk.note(1, 0.5)
    assert chunk.tokens == 512


def test_it_recovers() -> None:
    """A disk that was busy with something else for a while does not make prompts slow for ever."""
    chunk = ChunkSize(512)
    assert after(chunk, 1.0) < 512
    assert after(chunk, 0.0) == 512
