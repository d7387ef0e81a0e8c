"""What a sequence keeps between steps, and what it gives up."""

from pathlib import Path

import pytest
import torch

from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState, num_kept
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.window import WINDOW_TOKENS
from tests.support.tiny_model import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_ngrams", [True, False])
def test_new_state(has_ngrams: bool, tmp_path: Path) -> None:
    """Everything before the start counts as zero."""
    description = tiny_model(has_prediction=True)
    if not has_ngrams:
        description.drop_ngrams()
    config = read_model_config(GGUFModel(description.write(tmp_path / "tiny.gguf")))
    state = SequenceState(config, PagePool(config, CPU))
    assert state.position == state.num_pending == state.predicted == 0
    assert set(state.delta) | set(state.attention) == set(range(config.num_layers + 1))
    for layer, delta in state.delta.items():
        assert config.is_recurrent[layer]
        dim = config.delta_head_dim
        assert torch.equal(delta.matrices, torch.zeros(config.num_delta_value_heads, dim, dim))
        inputs = torch.zeros(WINDOW_TOKENS + config.conv_kernel - 1, config.delta_channels)
        assert torch.equal(delta.conv_inputs, inputs)
    for layer in state.attention:
        assert not config.is_recurrent[layer]
    assert state.pages == []
    if config.ngram is None:
        assert state.ngram_inputs is None
    else:
        expected = torch.zeros(WINDOW_TOKENS + config.ngram.history_length, config.stream_width)
        assert state.ngram_inputs is not None
        assert torch.equal(state.ngram_inputs, expected)


def test_rows_of_positions(tmp_path: Path) -> None:
    """Each position has a row of its own, in the pages that the sequence has; they stay where they are."""
    config = read_model_config(GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")))
    pool = PagePool(config, CPU)
    states = [SequenceState(config, pool) for _ in range(3)]
    for length in (1, 60, 70, 500):
        for state in states:
            before = state.rows(min(length, len(state.pages) * pool.page_tokens)).clone()
            state.reserve(length)
            assert torch.equal(state.rows(len(before)), before)
            assert state.num_pages_for(length) == 0
    taken = [row for state in states for row in state.rows(500).tolist()]
    assert len(set(taken)) == len(taken)
    assert [page.number for page in states[0].pages] == states[0].page_numbers[
        : len(states[0].pages)
    ].tolist()


def test_what_can_be_taken_back(tmp_path: Path) -> None:
    """The tokens of a window, and no others."""
    config = read_model_config(GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")))
    state = SequenceState(config, PagePool(config, CPU))
    state.advance(100)
    assert (state.position, state.num_pending) == (100, 1)
    state.advance(5)
    state.roll_back(102)
    assert (state.position, state.num_pending) == (102, 2)
    state.roll_back(100)
    assert (state.position, state.num_pending) == (100, 0)
    with pytest.raises(AssertionError, match="1 of 0 pending"):
        state.roll_back(99)
    assert [num_kept(n) for n in (1, WINDOW_TOKENS, WINDOW_TOKENS + 1)] == [1, WINDOW_TOKENS, 1]
