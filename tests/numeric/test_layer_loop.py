"""Whole steps as one native call: equal to the way layer by layer, and what ends its waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.in_process import InProcessModel
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.model.batch import Batch
from gpu_worker.ngram_way import StagedFeatures
from shared import demo_model
from shared.errors import GenerationError, StepStalledError, WorkerFailedError
from shared.gguf.model import GGUFModel
from shared.ring import RingClient, SlotError
from shared.work_slots import expert_ring, ngram_ring
from tests.support.expert_ring import CPU, cpu_way, open_ring, served, served_experts, served_features
from tests.support.model_cases import CASES
from tests.support.prepared import Prepared

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

DEMO = Path(demo_model.__file__).parent / "strata-demo.gguf"
MAX_TOKENS = 512


class WithRings:
    """A model whose experts, and n-gram features, are behind rings."""

    def __init__(self, path: Path, *, natively: bool) -> None:
        self._stack = ExitStack()
        self.model, file = InProcessModel(path), GGUFModel(path)
        self.experts = self._stack.enter_context(served_experts(file, MAX_TOKENS, natively=natively))
        self.model.experts = self.experts  # type: ignore[assignment]
        if self.model.features is not None:
            staged = self._stack.enter_context(served_features(file, MAX_TOKENS, natively=natively))
            forward = self.model.model.forward

            def submit_first(batch: Batch, experts: CpuExperts, features: object) -> object:
                assert self.model.features is not None
                staged.submit(self.model.features.windows)
                return forward(batch, experts, staged)

            self.model.model.forward = submit_first  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        self._stack.close()
        self.model.device.close()


@pytest.fixture
def with_rings() -> Iterator[Callable[[Path, bool], WithRings]]:
    """Makes such models, and ends them."""
    made: list[WithRings] = []

    def make(path: Path, natively: bool) -> WithRings:
        made.append(WithRings(path, natively=natively))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.mark.parametrize("natively", [False, True], ids=["python", "native"])
@pytest.mark.parametrize("prepared", CASES, indirect=True)
def test_one_call_computes_the_same(
    prepared: Prepared, natively: bool, with_rings: Callable[[Path, bool], WithRings]
) -> None:
    """To the bit, whoever serves the rings: prompts, single tokens, positions where blocks are chosen."""
    token_ids = [*prepared.prompt_with_ends, *prepared.prompt(60)]
    chunks = [20, 1, 1, 30, 1, 5, 1, 1, 8, 1, 1, 1]
    model = with_rings(prepared.reference.path, natively).model
    got = model.logits(token_ids, chunks)
    assert np.array_equal(got, prepared.model.logits(token_ids, chunks))


def test_demo_model(with_rings: Callable[[Path, bool], WithRings]) -> None:
    """Also to the bit; its indexer begins to choose at 1024 tokens, in the middle of a chunk."""
    token_ids = [int(token_id) for token_id in np.random.default_rng(1).integers(0, 4000, 1100)]
    chunks = [400, 1, 1, 500, 180, *[1] * 5]
    alone = InProcessModel(DEMO)
    assert np.array_equal(
        with_rings(DEMO, True).model.logits(token_ids, chunks), alone.logits(token_ids, chunks)
    )
    alone.device.close()


def test_several_sequences(
    prepare: Callable[[str], Prepared], with_rings: Callable[[Path, bool], WithRings]
) -> None:
    """In one step, with a prompt among them, and steps of other ways in between on the same model."""
    prepared = prepare("plain")
    prompts = [prepared.prompt(4 + 9 * number, seed=number) for number in range(6)]
    ringed = with_rings(prepared.reference.path, True)
    local = prepared.model.experts

    def run(model: InProcessModel) -> list[NDArray[np.float32]]:
        sequences = [model.new_sequence() for _ in prompts]
        results = []
        for place in range(-3, 0):
            pieces = [
                (sequence, prompt[:place] if place == -3 else [prompt[place]])
                for sequence, prompt in zip(sequences, prompts, strict=True)
            ]
            results += model.step(pieces)
            if model is ringed.model:
                model.experts = local if place == -3 else ringed.experts  # type: ignore[assignment]
        return results

    for got, expected in zip(run(ringed.model), run(prepared.model), strict=True):
        assert np.array_equal(got, expected)


@pytest.fixture
def waiting(prepare: Callable[[str], Prepared]) -> Iterator[tuple[InProcessModel, RingClient]]:
    """A model, and a ring of experts that nobody serves."""
    prepared = prepare("no-ngrams-equal-heads")
    model = InProcessModel(prepared.reference.path)
    with open_ring(expert_ring(model.config, MAX_TOKENS)) as ring:
        yield model, ring
    model.device.close()


def step(model: InProcessModel, ring: RingClient, timeout_s: float) -> CpuExperts:
    """A step of three tokens, whose experts are behind the ring."""
    experts = cpu_way(ring, model.file, timeout_s)
    model.experts = experts  # type: ignore[assignment]
    model.step([(model.new_sequence(), [1, 2, 3])])
    return experts


def test_silence_is_a_stall(waiting: tuple[InProcessModel, RingClient]) -> None:
    """With the words of the way in Python; the time counts as waited for."""
    model, ring = waiting
    experts = cpu_way(ring, model.file, 0.05)
    model.experts = experts  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises(
        StepStalledError, match=r"^the cpu_worker has not answered for 0\.05 s; raise --watchdog-s if"
    ):
        model.step([(model.new_sequence(), [1, 2, 3])])
    assert 0.05 <= experts.waited_s <= time.monotonic() - started


def test_loss_of_the_worker_ends_the_wait(waiting: tuple[InProcessModel, RingClient]) -> None:
    """At once, though the time-out is long; and so does every later step, at its first wait."""
    model, ring = waiting
    failure = WorkerFailedError("the cpu_worker is lost: its process died")
    failed_at: list[float] = []

    def fail() -> None:
        while not is_asleep(ring):
            time.sleep(1e-3)
        failed_at.append(time.monotonic())
        ring.fail(failure)

    thread = threading.Thread(target=fail)
    thread.start()
    for number in range(3):
        with pytest.raises(WorkerFailedError) as caught:
            step(model, ring, 1000)
        assert (str(caught.value), caught.value.code) == (str(failure), failure.code)
        assert caught.value is not failure, "it would keep the frames of the step"
        if number == 0:
            assert time.monotonic() - failed_at[0] < 0.5
    thread.join()


def is_asleep(ring: RingClient) -> bool:
    """Whether the client's thread says so in the ring."""
    return bool(ring._segment.arrays["client_sleeps"][0])


def test_a_failed_slot_fails_the_step(waiting: tuple[InProcessModel, RingClient]) -> None:
    """With the worker's words; the next step is computed as if nothing had been."""
    model, ring = waiting
    calls: list[int] = []

    def work(slot: dict[str, NDArray[np.generic]]) -> None:
        calls.append(int(slot["header"][0]))
        if len(calls) == 2:
            raise RuntimeError("no such luck")
        slot["outputs"][:] = 0

    with served(ring, work, None):
        with pytest.raises(SlotError, match=r"^RuntimeError: no such luck$") as caught:
            step(model, ring, 60)
        assert isinstance(caught.value, GenerationError)
        assert calls == [0, 1]
        calls[:] = [9, 9]
        experts = step(model, ring, 60)
        assert calls[2:] == list(range(model.config.num_layers))
        assert experts.waited_s > 0


def test_after_a_stall_the_ring_goes_on(waiting: tuple[InProcessModel, RingClient]) -> None:
    """Slots that a late worker still holds are waited for before they are filled again."""
    model, ring = waiting
    for _ in range(3):
        with pytest.raises(StepStalledError):
            step(model, ring, 0.02)

    def work(slot: dict[str, NDArray[np.generic]]) -> None:
        slot["outputs"][:] = 0

    with served(ring, work, None):
        step(model, ring, 60)


@pytest.mark.parametrize("natively", [False, True], ids=["python", "native"])
def test_waiting_for_a_free_slot_counts(waiting: tuple[InProcessModel, RingClient], natively: bool) -> None:
    """As waiting for experts, whether one becomes free or not."""
    model, ring = waiting
    for _ in range(ring.shape.num_slots):
        ring.next_slot(1, "cpu_worker")
        ring.submit()

    def compute(experts: CpuExperts) -> None:
        if natively:
            model.experts = experts  # type: ignore[assignment]
            model.step([(model.new_sequence(), [1, 2, 3])])
        else:
            x, routes = torch.ones((3, model.config.hidden)), (3, model.config.num_experts_used)
            experts.submit(0, x, torch.zeros(routes, dtype=torch.int32), torch.zeros(routes))

    impatient, patient = cpu_way(ring, model.file, 0.05), cpu_way(ring, model.file, 60)
    with pytest.raises(StepStalledError):
        compute(impatient)
    assert impatient.waited_s >= 0.05
    begin = threading.Event()

    def work(slot: dict[str, NDArray[np.generic]]) -> None:
        begin.wait(10)
        slot["outputs"][:] = 0

    with served(ring, work, None):
        threading.Timer(0.2, begin.set).start()
        compute(patient)
    assert patient.waited_s >= 0.1


def test_waiting_for_features_counts(prepare: Callable[[str], Prepared]) -> None:
    """Also where none come."""
    prepared = prepare("plain")
    model = InProcessModel(prepared.reference.path)
    ngram = model.config.ngram
    assert ngram is not None
    with open_ring(ngram_ring(ngram, 4)) as ring:
        features = StagedFeatures(ring, CPU, 0.05, "file", len(ngram.head_vocab_sizes))
        features.submit(np.zeros((1, ngram.ngram_size), np.int32))
        with pytest.raises(StepStalledError):
            features.collect()
        assert features.waited_s >= 0.05
    model.device.close()
