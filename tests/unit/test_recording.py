"""Routes are written down as they are, whichever way experts go, and at no cost to what is said."""

from pathlib import Path

import numpy as np
import pytest

from shared.config import GpuWorkerConfig
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement.profile import model_identity
from shared.placement.trace import TraceHeader, TraceReader, TraceWriter
from tests.support.running_engine import running_engine
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

PROMPT = np.random.default_rng(1).integers(0, 256, 21).tolist()
NUM_NEW, NUM_USED, CHUNK = 6, 2, 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model().write(tmp_path / "tiny.gguf")


def writer_for(path: Path, trace: Path) -> TraceWriter:
    with GGUFModel(path) as model:
        config = read_model_config(model)
        return TraceWriter(trace, TraceHeader.of(model_identity(model, config), config.num_experts_used))


@pytest.mark.parametrize("num_slots", [0, 9])
def test_routes_of_a_request(path: Path, tmp_path: Path, num_slots: int) -> None:
    """One record a step, with the tokens of prompts told apart; and the answer is what it is without."""
    trace = tmp_path / "routes.trace"
    settings = GpuWorkerConfig(device="cpu", expert_cache=f"{num_slots}", expert_profile=tmp_path / "none")
    with running_engine(path, prefill=CHUNK) as running:
        running.ask("a", PROMPT, NUM_NEW)
        expected = running.answer("a").token_ids
    with (
        writer_for(path, trace) as writer,
        running_engine(path, prefill=CHUNK, settings=settings, recorder=writer) as running,
    ):
        running.ask("a", PROMPT, NUM_NEW)
        assert running.answer("a").token_ids == expected
        running.wait_idle()
    with TraceReader(trace) as reader:
        steps = list(reader)
    sizes = [(step.num_tokens, step.num_prefill_tokens) for step in steps]
    assert sizes == [(8, 8), (8, 8), (5, 5), *[(1, 0)] * (NUM_NEW - 1)]
    for step in steps:
        assert step.expert_ids.shape == (NUM_LAYERS, step.num_tokens, NUM_USED)
        assert ((step.expert_ids >= 0) & (step.expert_ids < NUM_EXPERTS)).all()
        assert (step.expert_ids[..., 0] != step.expert_ids[..., 1]).all()


def test_a_disk_that_is_full(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trace ends, the answer does not."""
    writer = writer_for(path, Path("/dev/null"))
    writer._file.close()
    writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with writer, running_engine(path, prefill=CHUNK, recorder=writer) as running:
        running.ask("a", PROMPT, NUM_NEW)
        assert len(running.answer("a").token_ids) == NUM_NEW
    assert "routes are not recorded any more" in caplog.text
    assert caplog.text.count("not recorded") == 1
