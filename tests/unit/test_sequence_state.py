"""What a sequence keeps between steps: that it grows when it has to, and by what."""

from pathlib import Path

import pytest
import torch

from gpu_worker.state.growing import STEP_ROWS, GrowingRows, capacity_of
from gpu_worker.state.sequence_state import SequenceState, storage_bytes
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from tests.support.tiny_model import tiny_model

CPU = torch.device("cpu")


def test_rows_of_any_number_and_size() -> None:
    """Nothing that was appended is lost when the storage moves."""
    rows, expected = GrowingRows((2, 3), CPU), []
    assert rows.rows.shape == (0, 2, 3)
    for size in (1, 0, 5, 300, 1, 700, 2):
        added = torch.randn(size, 2, 3)
        expected.append(added)
        assert torch.equal(rows.append(added), torch.cat(expected))
        assert torch.equal(rows.rows, torch.cat(expected))
        assert rows.length == sum(map(len, expected))
        assert rows.num_bytes >= rows.length * 2 * 3 * 4


def test_storage_moves_seldom() -> None:
    """Appending token by token costs the same on average, however long the sequence."""
    rows, storages = GrowingRows((1,), CPU), set()
    for _ in range(5000):
        rows.append(torch.zeros(1, 1))
        storages.add(rows.rows.data_ptr())
    assert len(storages) <= 6


def test_a_long_context_takes_one_step_more_than_it_needs() -> None:
    """It would else take twice the memory of the device that it needs."""
    rows = GrowingRows((4,), CPU)
    for length in (256, 257, 8192, 8193, 16384, 16385, 40000):
        rows.reserve(length)
        assert rows.num_bytes == capacity_of(length) * 16
        assert length <= capacity_of(length) < max(2 * length, length + STEP_ROWS)
    assert [capacity_of(length) for length in (1, 256, 257, 8192, 8193)] == [256, 256, 512, 8192, 16384]
    assert capacity_of(3, first_rows=3) == 3


@pytest.mark.parametrize("ratio", [4, 0])
def test_bytes_of_a_context(ratio: int, tmp_path: Path) -> None:
    """What is planned with is what a sequence takes, in the prediction block too."""
    description = tiny_model(has_prediction=True)
    description.set("attention.compress_ratios", [0, 0, 0, 4, ratio])
    config = read_model_config(GGUFModel(description.write(tmp_path / "tiny.gguf")))
    assert storage_bytes(config, 0) == 0
    for length in (1, 300, 9000):
        state, taken = SequenceState(config, CPU), 0
        for layer, attention in state.attention.items():
            attention.keys.reserve(length)
            attention.values.reserve(length)
            ratio = config.compress_ratios[layer]
            if ratio and length >= ratio:
                attention.block_keys.reserve(length // ratio)
            taken += sum(rows.num_bytes for rows in (attention.keys, attention.values, attention.block_keys))
        assert taken == storage_bytes(config, length)


@pytest.mark.parametrize("has_ngrams", [True, False])
def test_new_state(has_ngrams: bool, tmp_path: Path) -> None:
    """Everything before the start counts as zero."""
    description = tiny_model(has_prediction=True)
    if not has_ngrams:
        description.drop_ngrams()
    config = read_model_config(GGUFModel(description.write(tmp_path / "tiny.gguf")))
    state = SequenceState(config, CPU)
    assert state.position == state.predicted == 0
    assert set(state.delta) | set(state.attention) == set(range(config.num_layers + 1))
    for layer, delta in state.delta.items():
        assert config.is_recurrent[layer]
        dim = config.delta_head_dim
        assert torch.equal(delta.matrices, torch.zeros(config.num_delta_value_heads, dim, dim))
        assert torch.equal(delta.conv_inputs, torch.zeros(config.conv_kernel - 1, config.delta_channels))
    for layer, attention in state.attention.items():
        assert not config.is_recurrent[layer]
        assert attention.keys.length == attention.values.length == attention.block_keys.length == 0
        assert attention.open_keys.rows.shape == (0, config.indexer.head_dim)
    if config.ngram is None:
        assert state.ngram_conv_inputs is None
    else:
        expected = torch.zeros(config.ngram.history_length, config.stream_width)
        assert state.ngram_conv_inputs is not None
        assert torch.equal(state.ngram_conv_inputs, expected)
