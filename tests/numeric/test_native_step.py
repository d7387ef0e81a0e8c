"""Whole steps as tasks in machine code: state shared with torch's layers, batches, and the demo model.

That float32 files give what transformers and torch's layers give is shown by `test_forward_pass` and
`test_devices`, whose CpuDevice computes with tasks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.in_process import InProcessModel
from gpu_worker.device.cpu import CpuDevice
from gpu_worker.model.interface import ProgressReport, Trunk
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.model.trunk import TorchTrunk
from shared import demo_model
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig
from tests.support.divergence import divergences
from tests.support.model_cases import CASES
from tests.support.prepared import Prepared

TOLERANCE = 1e-4
# Activations are rounded for the products, which makes tiny differences larger, and random tokens leave the
# choice of experts close: a single position may choose otherwise.
QUANTISED_DIVERGENCE = 2e-3
DEMO = Path(demo_model.__file__).parent / "strata-demo.gguf"


class TorchOnTheCpu(CpuDevice):
    """The CPU's weights and products, under layers in torch operations."""

    def trunk(self, config: Qwen4ExpConfig, head_name: str, report: ProgressReport) -> Trunk:
        """The layers of other devices."""
        return TorchTrunk(self, config, head_name, report)


def with_torch_layers(path: Path) -> InProcessModel:
    """A model whose layers are torch operations, with the same products as the tasks have."""
    model, file = InProcessModel(path), GGUFModel(path)
    model.device.close()
    model.device = TorchOnTheCpu(file, 1)
    model.model = Qwen4Exp(
        model.device,
        model.config,
        has_own_head="output.weight" in file,
        report=lambda activity, progress: None,
    )
    return model


@pytest.mark.parametrize("prepared", CASES, indirect=True)
def test_state_is_exchanged(prepared: Prepared) -> None:
    """One sequence, whose steps are computed by turns in both ways, as if there were one."""
    ways = [with_torch_layers(prepared.reference.path), prepared.model]
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(90)]
    sequence = ways[0].new_sequence()
    parts, at = [], 0
    for number, size in enumerate([20, 1, 1, 1, 2, 30, 1, 5, 9, 1, 1, 8, 20, 1, 1, 1, 25, 2]):
        parts += ways[number % 2].step([(sequence, token_ids[at : at + size])])
        at += size
    assert at == len(token_ids)
    assert np.abs(np.concatenate(parts) - prepared.expected(token_ids)).max() <= 2 * TOLERANCE


@pytest.mark.parametrize("num_sequences", [2, 16, 17, 40])
def test_many_sequences_decode_in_one_step(prepare: Callable[[str], Prepared], num_sequences: int) -> None:
    """At positions of their own, some beyond where blocks are dropped: each as if it were alone. Up to 16
    tokens have their contexts divided; the largest steps make the workspace grow."""
    prepared = prepare("plain")
    model = InProcessModel(prepared.reference.path, num_threads=2)
    prompts = [prepared.prompt(4 + 7 * (number % 12), seed=number) for number in range(num_sequences)]
    sequences = [model.new_sequence() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        model.step([(sequence, prompt[:-3])])
    for place in (-3, -2, -1):
        logits = model.step(
            [(sequence, [prompt[place]]) for sequence, prompt in zip(sequences, prompts, strict=True)]
        )
    model.device.close()
    for got, prompt in zip(logits, prompts, strict=True):
        assert np.abs(got - prepared.model.logits(prompt)[-1]).max() <= TOLERANCE


def test_results_do_not_depend_on_threads(prepare: Callable[[str], Prepared]) -> None:
    """Items are divided otherwise, but each is computed in the same way: equal to the bit."""
    prepared = prepare("plain")
    token_ids = prepared.prompt(100)
    model = InProcessModel(prepared.reference.path, num_threads=3)
    try:
        assert np.array_equal(
            model.logits(token_ids, [60, *[1] * 6]), prepared.model.logits(token_ids, [60, *[1] * 6])
        )
    finally:
        model.device.close()


@pytest.fixture(scope="module")
def demo_ways() -> Iterator[tuple[InProcessModel, InProcessModel]]:
    """The demo model with torch's layers and with tasks."""
    ways = with_torch_layers(DEMO), InProcessModel(DEMO, num_threads=2)
    yield ways
    for way in ways:
        way.device.close()


def test_demo_model(demo_ways: tuple[InProcessModel, InProcessModel]) -> None:
    """A prompt and single tokens."""
    token_ids = [int(token_id) for token_id in np.random.default_rng(0).integers(0, 4000, 120)]
    expected, got = (way.logits(token_ids, [100, *[1] * 20]) for way in demo_ways)
    assert divergences(expected, got).mean() <= QUANTISED_DIVERGENCE


def test_demo_model_beyond_its_blocks(demo_ways: tuple[InProcessModel, InProcessModel]) -> None:
    """Its indexer keeps 256 blocks of 4; a long prompt and what follows it have more."""
    token_ids = [int(token_id) for token_id in np.random.default_rng(1).integers(0, 4000, 1300)]
    expected, got = (way.logits(token_ids, [700, 500, *[1] * 5]) for way in demo_ways)
    assert divergences(expected, got).mean() <= QUANTISED_DIVERGENCE
