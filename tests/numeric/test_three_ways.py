"""Whichever way experts are computed, the model says the same.

A float32 model answers prompts with its experts divided between device, transfers and CPU in many ways, in
real rings with a real stager; its logits are held against a run whose experts the CPU computes.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.experts.interface import ExpertsWay
from gpu_worker.experts.placement import ExpertPlacement
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures
from shared.config import GpuWorkerConfig
from shared.gguf.model import GGUFModel
from shared.messages import RequestFinished, RequestTimings
from shared.model_config import read_model_config
from shared.placement.profile import model_identity
from shared.placement.swaps import Swap
from shared.placement.table import NO_SLOT, ResidencyTable, SlotState
from shared.placement.trace import TraceHeader, TraceReader, TraceWriter
from tests.support.running_engine import TIMEOUT_S, RunningEngine, running_engine
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

TOLERANCE = 1e-4
NUM_NEW = 24
NUM_USED = 2
ALL = NUM_LAYERS * NUM_EXPERTS
ROUTES = np.random.default_rng(5)
PROMPTS = [ROUTES.integers(0, 256, length).tolist() for length in (70, 9, 33)]
DEVICES = [pytest.param(None, id="native"), pytest.param(torch.device("cpu"), id="torch")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model."""
    return tiny_model().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@dataclass(slots=True)
class Run:
    """What a model has said to all prompts: tokens, the logits that each was chosen by, and timings."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    timings: list[RequestTimings] = field(default_factory=list)


def answers(running: RunningEngine, num_new: int = NUM_NEW) -> Run:
    """Asks one prompt after the other, greedily."""
    run = Run()
    compute = running.model.logits

    def keep(streams: torch.Tensor) -> torch.Tensor:
        logits = compute(streams)
        run.logits.append(logits.numpy().copy())
        return logits

    running.model.logits = keep  # type: ignore[method-assign]
    try:
        for number, prompt in enumerate(PROMPTS):
            running.ask(f"{number}", prompt, num_new)
            answer = running.answer(f"{number}")
            assert isinstance(answer.end, RequestFinished), answer.end
            run.tokens.append(answer.token_ids)
            run.timings.append(answer.end.timings)
    finally:
        running.model.logits = compute  # type: ignore[method-assign]
    return run


@pytest.fixture(scope="module")
def expected(path: Path) -> Run:
    """With all experts computed by the CPU."""
    with running_engine(path, prefill=32) as running:
        return answers(running)


def check(run: Run, expected: Run) -> None:
    """The same tokens by the same logits; and every route is accounted for."""
    assert run.tokens == expected.tokens
    for ours, theirs in zip(run.logits, expected.logits, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    for prompt, timings in zip(PROMPTS, run.timings, strict=True):
        routes = timings.routes
        num_routes = (len(prompt) + NUM_NEW - 1) * NUM_LAYERS * NUM_USED
        assert routes.device + routes.ram + routes.transferred + routes.disk + routes.skipped == num_routes
        assert (routes.device > 0) == (timings.expert_bytes.device > 0)
        assert (routes.ram + routes.disk > 0) == (timings.expert_bytes.ram > 0)
        assert routes.transferred == 0 or timings.expert_bytes.transferred > 0


def settings(num_slots: int, **changes: Any) -> GpuWorkerConfig:
    """Those of a gpu_worker with so many slots, and none of its user's profile."""
    return GpuWorkerConfig(
        **{"device": "cpu", "expert_cache": f"{num_slots}", "expert_profile": Path("/proc/nowhere")} | changes
    )


def wait_until_loaded(running: RunningEngine) -> ExpertPlacement:
    """Returns when every slot has its expert."""
    placement = running.placement
    assert placement is not None
    deadline = time.monotonic() + TIMEOUT_S
    while placement.cache.table.num_resident < placement.cache.table.num_slots:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return placement


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device | None:
    """Layers in machine code, and in torch operations."""
    chosen: torch.device | None = request.param
    return chosen


def test_all_on_the_device(path: Path, expected: Run, device: torch.device | None) -> None:
    """Nothing is left to the other ways."""
    with running_engine(path, prefill=32, torch_device=device, settings=settings(ALL)) as running:
        wait_until_loaded(running)
        run = answers(running)
    check(run, expected)
    for timings in run.timings:
        assert timings.routes.ram == timings.routes.transferred == timings.routes.skipped == 0
        assert timings.device_wait_s > 0


def test_all_transferred(path: Path, expected: Run, device: torch.device | None) -> None:
    """With one slot and a share of 1, nearly all is transferred, windows and chunks alike."""
    chosen = settings(1, pcie_frac=1.0, expert_policy="static")
    with running_engine(path, prefill=32, torch_device=device, settings=chosen) as running:
        wait_until_loaded(running)
        run = answers(running)
    check(run, expected)
    for timings in run.timings:
        assert timings.routes.ram == 0
        assert timings.routes.transferred > timings.routes.device
        assert timings.transfer_wait_s > 0


def test_one_slot_and_the_cpu(path: Path, expected: Run, device: torch.device | None) -> None:
    """The smallest cache there is."""
    chosen = settings(1, pcie_frac=0.0, expert_policy="static")
    with running_engine(path, prefill=32, torch_device=device, settings=chosen) as running:
        wait_until_loaded(running)
        run = answers(running)
    check(run, expected)
    assert all(timings.routes.transferred == 0 for timings in run.timings)
    assert sum(timings.routes.device for timings in run.timings) > 0


class RandomSwaps:
    """A policy that exchanges anything with anything after every window."""

    def __init__(self, num_swaps: int) -> None:
        self._rng = np.random.default_rng(3)
        self._num_swaps = num_swaps
        self.num_proposed = 0

    def after_window(self, table: ResidencyTable) -> list[Swap]:
        swaps = []
        for slot in self._rng.permutation(table.num_slots)[: self._num_swaps].tolist():
            layer = int(table.slot_layers[slot])
            outside = np.flatnonzero((table.slot_of[layer] == NO_SLOT) & ~table.is_loading[layer])
            if table.state(slot) in (SlotState.RESIDENT, SlotState.EMPTY) and len(outside):
                expert = int(table.expert_of[slot])
                swaps.append(Swap(layer, slot, expert, int(self._rng.choice(outside)), 1.0))
        self.num_proposed += len(swaps)
        return swaps


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_swaps_after_every_window(
    path: Path, expected: Run, device: torch.device | None, share: float
) -> None:
    """Experts come and go while tokens are computed: random mixes of all ways."""
    chosen = settings(ALL // 2, pcie_frac=share)
    with running_engine(path, prefill=32, torch_device=device, settings=chosen) as running:
        placement = wait_until_loaded(running)
        policy = placement.policy = RandomSwaps(6)
        run = answers(running)
        running.wait_idle()
        assert placement.cache.counts.num_swaps > NUM_NEW
        assert policy.num_proposed >= placement.cache.counts.num_swaps
    check(run, expected)
    routes = [timings.routes for timings in run.timings]
    assert all(each.device > 0 for each in routes)
    assert all((each.ram > 0) == (share < 1) for each in routes)
    assert all((each.transferred > 0) == (share > 0) for each in routes)


@pytest.mark.parametrize("policy", ["adaptive", "lru", "static"])
def test_policies(path: Path, expected: Run, policy: str) -> None:
    """What is exchanged never changes what is said, and the routes find more and more on the device."""
    chosen = settings(ALL // 2, expert_policy=policy, adapt_every=1)
    with running_engine(path, prefill=32, settings=chosen) as running:
        placement = wait_until_loaded(running)
        run = answers(running)
        assert (placement.cache.counts.num_swaps > 0) == (policy != "static")
    check(run, expected)


@pytest.mark.parametrize("borrows", [True, False])
@pytest.mark.parametrize("num_slots", [1, ALL // 2, ALL])
def test_streamed_prompts(
    path: Path, expected: Run, device: torch.device | None, num_slots: int, borrows: bool
) -> None:
    """Chunks stream all experts through the device that are not on it; slots are lent meanwhile, and come
    back."""
    chosen = settings(num_slots, prefill_stream_min=8, prefill_borrow=borrows, pcie_frac=0.5)
    with running_engine(path, prefill=32, torch_device=device, settings=chosen) as running:
        placement = wait_until_loaded(running)
        lent: list[int] = []
        claim = placement.cache.claim

        def watch(name: str, num_bytes: int) -> int:
            lent.append(claim(name, num_bytes))
            return lent[-1]

        placement.cache.claim = watch  # type: ignore[method-assign]
        run = answers(running)
        running.wait_idle()
        wait_until_loaded(running)
        assert (max(lent, default=0) > 0) == borrows
        assert placement.cache.lent_bytes == 0
    check(run, expected)


def test_lent_experts_are_kept_in_ram(path: Path, expected: Run) -> None:
    """With experts in a pool, none is read from the disk again because its slot was lent."""
    chosen = settings(ALL, prefill_stream_min=8, pcie_frac=0.5)
    with running_engine(path, prefill=32, places_per_layer=4, settings=chosen) as running:
        placement = wait_until_loaded(running)
        placement.cache.keeps_lent = True
        run = answers(running)
        running.wait_idle()
        wait_until_loaded(running)
        assert placement.cache.num_kept == 0
    check(run, expected)
    assert not any(timings.disk for timings in run.timings)


def test_context_takes_slots(path: Path, expected: Run) -> None:
    """As the context grows it takes memory of slots, in the middle of an answer; the next one starts with
    all of them."""
    with running_engine(path, prefill=32, settings=settings(ALL, kv_grow=True)) as running:
        placement = wait_until_loaded(running)
        quarter = placement.cache.num_bytes // 4
        pages, claimed = running.model.pages, []

        def grown(num_more: int) -> int:
            claimed.append(pages.num_pages + num_more)
            return (0, quarter // 2, quarter)[claimed[-1]]

        pages.bytes_with = grown  # type: ignore[method-assign]
        placement.rules = replace(placement.rules, set_aside_bytes=quarter // 4)
        run = answers(running)
        assert set(claimed) == {1, 2}
        running.wait_idle()
        wait_until_loaded(running)
    check(run, expected)
    assert run.timings[0].routes.ram + run.timings[0].routes.transferred > 0


@dataclass(slots=True)
class Predictions:
    """What the prediction block of a running engine's model makes of each step, beside what it answers."""

    running: RunningEngine
    streams: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        forward = self.running.model.forward

        def then_predict(batch: Batch, experts: ExpertsWay, ngram: NgramFeatures | None) -> torch.Tensor:
            streams = forward(batch, experts, ngram)
            # Of the steps' own tokens instead of those behind them, which are not known here.
            self.streams.append(self.running.model.predict(batch, streams, experts).numpy().copy())
            return streams

        self.running.model.forward = then_predict  # type: ignore[method-assign, assignment]


def test_prediction_block(tmp_path: Path, device: torch.device | None) -> None:
    """The CPU computes its experts in every step, streamed ones too, whatever slots the others have; and it
    is in no trace."""
    path = tiny_model(has_prediction=True).write(tmp_path / "predicting.gguf")
    with running_engine(path, prefill=32) as running:
        plain = Predictions(running)
        expected = answers(running)
    trace = tmp_path / "routes.trace"
    with GGUFModel(path) as file:
        identity = model_identity(file, read_model_config(file))
    with (
        TraceWriter(trace, TraceHeader.of(identity, NUM_USED)) as recorder,
        running_engine(
            path,
            prefill=32,
            torch_device=device,
            settings=settings(9, prefill_stream_min=20, pcie_frac=0.5),
            recorder=recorder,
        ) as running,
    ):
        predictions = Predictions(running)
        check(answers(running), expected)
        assert running.placement is not None
        assert running.placement.cache.table.num_layers == NUM_LAYERS
    for ours, theirs in zip(predictions.streams, plain.streams, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    with TraceReader(trace) as reader:
        assert {step.expert_ids.shape[0] for step in reader} == {NUM_LAYERS}


def test_prediction_block_from_a_pool(tmp_path: Path) -> None:
    """Its experts have places there as others have, and are read when they are needed."""
    path = tiny_model(has_prediction=True).write(tmp_path / "predicting.gguf")
    streams = []
    for places_per_layer in (0, 4):
        with running_engine(path, prefill=32, places_per_layer=places_per_layer) as running:
            predictions = Predictions(running)
            answers(running)
            streams.append(np.concatenate(predictions.streams))
    assert np.array_equal(*streams)
