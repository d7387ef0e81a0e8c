"""The prediction block against its formulas, as torch operations and as tasks: prompts, drafts, batches.

Logits spread by 2 to 5, as those of the trunk do; errors of up to 3e-5 were observed.
"""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.in_process import InProcessModel, RunningSequence
from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.worker import ExpertService
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.interface import RoutedExperts
from gpu_worker.sampler import likeliest_tokens
from shared.demo_model import DEMO_MODEL_PATH
from shared.errors import DiskError
from shared.gguf.model import GGUFModel
from shared.native.team import Team
from shared.ring import Arrays
from shared.work_slots import ExpertHeader, expert_ring
from tests.numeric.test_native_step import with_torch_layers
from tests.support.draft_models import split_draft
from tests.support.expert_ring import cpu_way, open_ring, served, served_experts
from tests.support.model_cases import PREDICTION_CASES
from tests.support.prepared import Prepared
from tests.support.reference_prediction import ReferencePrediction
from tools.demo_model.conversations import held_out_prompts
from tools.demo_model.evaluate import encode
from tools.demo_model.to_transformers import load_checkpoint

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

TOLERANCE = 2e-4
NUM_DRAFTS = 4

all_cases = pytest.mark.parametrize("prepared", PREDICTION_CASES, indirect=True)
both_ways = pytest.mark.parametrize("way", ["torch", "tasks"])


class Drafting:
    """One sequence of a model whose trunk has read it, and what the prediction block makes of it."""

    def __init__(
        self, model: InProcessModel, token_ids: Sequence[int], experts: RoutedExperts | None = None
    ) -> None:
        """`experts` computes those of the block; the model's own does otherwise."""
        self.model = model
        self.token_ids = list(token_ids)
        self._experts = experts or model.experts
        self.sequence = RunningSequence(model.model.new_state())
        self.trunk_streams = streams_of(model, self.sequence, self.token_ids)

    def span(self, start: int, num_tokens: int) -> Span:
        """The next tokens as a span of a batch."""
        return Span(start, start + num_tokens, self.sequence.state)

    def predict(self, token_ids: Sequence[int], streams: Tensor) -> Tensor:
        """The block's streams for the positions that come next."""
        positions = self.sequence.state.predicted + torch.arange(len(token_ids))
        batch = Batch(torch.tensor(token_ids), positions, [self.span(0, len(token_ids))])
        return self.model.model.predict(batch, streams, self._experts)

    def read(self, chunk_sizes: Sequence[int] = ()) -> NDArray[np.float32]:
        """The block's streams [tokens, streams, hidden] for all positions but the last, in such chunks."""
        parts, at, last = [], 0, len(self.token_ids) - 1
        for size in [*chunk_sizes, last]:
            if stop := min(at + size, last) * (at < last):
                predicted = self.predict(self.token_ids[at + 1 : stop + 1], self.trunk_streams[at:stop])
                parts.append(predicted.numpy().copy())
                at = stop
        return np.concatenate(parts)

    def draft(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """From the last position on, the tokens after it given; the first is predicted from the trunk's
        streams, the others from the block's own, where they are."""
        parts, streams = [], self.trunk_streams[-1:]
        for token_id in token_ids:
            streams = self.predict([token_id], streams)
            parts.append(streams.numpy().copy())
        return np.concatenate(parts)


def streams_of(model: InProcessModel, sequence: RunningSequence, token_ids: Sequence[int]) -> Tensor:
    """The trunk's streams of tokens that are appended to a sequence, in memory of their own."""
    seen: list[Tensor] = []
    logits = model.model.logits

    def watch(streams: Tensor) -> Tensor:
        seen.append(streams.clone())
        return logits(streams)

    model.model.logits = watch  # type: ignore[method-assign]
    try:
        model.step([(sequence, token_ids)])
    finally:
        del model.model.logits
    return seen[0]


@pytest.fixture
def way_of() -> Iterator[Callable[[Path, str], InProcessModel]]:
    """Opens a file to be computed in one way or the other."""
    made: list[InProcessModel] = []

    def make(path: Path, way: str) -> InProcessModel:
        made.append(with_torch_layers(path) if way == "torch" else InProcessModel(path))
        return made[-1]

    yield make
    for model in made:
        model.device.close()


def assert_close(got: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE


@both_ways
@all_cases
@pytest.mark.parametrize("chunks", [(), (1, 2, 3, 17, 1, 30, 1, 1)], ids=["whole", "chunks"])
def test_prompt_and_drafts(
    prepared: Prepared, way: str, chunks: tuple[int, ...], way_of: Callable[[Path, str], InProcessModel]
) -> None:
    """Beyond where blocks are dropped; then drafts of which each is made from the streams of the one
    before."""
    reference = ReferencePrediction(prepared.reference.path)
    model = way_of(prepared.reference.path, way)
    token_ids, more = prepared.prompt(75), prepared.prompt(NUM_DRAFTS, seed=7)
    drafting = Drafting(model, token_ids)
    got = np.concatenate([drafting.read(chunks), drafting.draft(more)])

    inputs = drafting.trunk_streams.numpy()
    for number in range(NUM_DRAFTS):
        expected = reference.streams([*token_ids[1:], *more[: number + 1]], inputs)
        inputs = np.concatenate([inputs, expected[-1:].astype(np.float32)])
    assert_close(got, expected)
    assert_close(model.model.prediction_logits(torch.from_numpy(got)).numpy(), reference.logits(expected))
    state = drafting.sequence.state
    assert (state.position, state.predicted) == (75, 74 + NUM_DRAFTS)


@all_cases
def test_in_one_call_behind_a_ring(prepared: Prepared, way_of: Callable[[Path, str], InProcessModel]) -> None:
    """To the bit what program by program gives, and booked as experts of the block's layer."""
    path = prepared.reference.path
    token_ids, more = prepared.prompt(60), prepared.prompt(NUM_DRAFTS, seed=7)
    model = way_of(path, "tasks")

    def run(experts: RoutedExperts | None) -> NDArray[np.float32]:
        drafting = Drafting(model, token_ids, experts)
        return np.concatenate([drafting.read((20, 1, 1)), drafting.draft(more)])

    with GGUFModel(path) as file, served_experts(file, 64, natively=True) as experts:
        experts.begin_step([60], 0)
        assert np.array_equal(run(experts), run(None))
        assert experts.counts.expert_bytes.sum() > 0


def test_an_expert_that_is_lost(
    prepare: Callable[[str], Prepared], way_of: Callable[[Path, str], InProcessModel]
) -> None:
    """Costs the sequence that needs it, by the block's layer; the others have what they would have."""
    path = prepare("prediction").reference.path
    model = way_of(path, "tasks")
    token_ids = prepare("prediction").prompt(30)
    block = model.config.num_layers
    file = GGUFModel(path)
    with open_ring(expert_ring(model.config, 64)) as client:
        layers, team = [ExpertLayer(file, layer) for layer in range(block + 1)], Team(1)
        service, is_bad = ExpertService(layers, team), threading.Event()

        def serve(slot: Arrays) -> None:
            service(slot)
            if is_bad.is_set():
                slot["header"][ExpertHeader.NUM_LOST] = 1
                slot["failures"][0] = errno.EIO, 5

        with served(client, serve, None):
            experts = cpu_way(client, file, 60)
            results = []
            for _ in range(2):
                both = [Drafting(model, token_ids), Drafting(model, token_ids[:20])]
                spans = [drafting.span(number, 1) for number, drafting in enumerate(both)]
                streams = torch.cat([drafting.trunk_streams[:1] for drafting in both])
                batch = Batch(torch.tensor([token_ids[1]] * 2), torch.zeros(2, dtype=torch.int64), spans)
                experts.begin_step([1, 2], 0)
                results.append(model.model.predict(batch, streams, experts).numpy().copy())
                is_bad.set()
            failure = experts.counts.failure(0, 1)
            assert failure is not None
            assert f"expert 5 of layer {block}" in str(failure)
            assert experts.counts.failure(1, 2) is None
            assert np.array_equal(*results)
            # Nobody is left who could go on.
            experts.begin_step([2], 0)
            with pytest.raises(DiskError, match=f"expert 5 of layer {block}"):
                model.model.predict(batch, streams, experts)
        team.close()


@both_ways
def test_the_trunk_is_left_alone(
    prepare: Callable[[str], Prepared], way: str, way_of: Callable[[Path, str], InProcessModel]
) -> None:
    """Its streams stay valid while the block computes more tokens than they are, and its state is what it is
    without."""
    prepared = prepare("prediction")
    model = way_of(prepared.reference.path, way)
    token_ids = prepared.prompt(60)
    expected = model.logits(token_ids, [50])[50:]
    long, short = Drafting(model, prepared.prompt(40, seed=3)), Drafting(model, token_ids[:50])
    short.read()
    model_forward, seen = model.model.forward, []

    def keep(*arguments: object) -> Tensor:
        seen.append(model_forward(*arguments))  # type: ignore[arg-type]
        before = seen[0].clone()
        long.read((20,))
        short.draft(token_ids[50:53])
        assert torch.equal(seen[0], before)
        return seen[0]

    model.model.forward = keep  # type: ignore[method-assign, assignment]
    (got,) = model.step([(short.sequence, token_ids[50:])])
    assert np.array_equal(got, expected)


@both_ways
@pytest.mark.parametrize("num_sequences", [3, 20])
def test_sequences_in_one_batch(
    prepare: Callable[[str], Prepared],
    way: str,
    num_sequences: int,
    way_of: Callable[[Path, str], InProcessModel],
) -> None:
    """At positions of their own, which are not the trunk's: each as if it were alone, but for the order of
    additions."""
    prepared = prepare("prediction")
    model = way_of(prepared.reference.path, way)
    lengths = [5 + 13 * (number % 5) for number in range(num_sequences)]
    prompts = [prepared.prompt(length, seed=length) for length in lengths]
    alone = [Drafting(model, prompt).read() for prompt in prompts]
    together = [Drafting(model, prompt) for prompt in prompts]
    token_ids: list[int] = []
    positions: list[int] = []
    spans, streams = [], []
    for number, drafting in enumerate(together):
        # What is left differs from one to the next.
        num_left = 1 + number % 3
        last = len(drafting.token_ids) - 1
        drafting.predict(
            drafting.token_ids[1 : last - num_left + 1], drafting.trunk_streams[: last - num_left]
        )
        spans.append(drafting.span(len(token_ids), num_left))
        token_ids += drafting.token_ids[last - num_left + 1 :]
        positions += range(last - num_left, last)
        streams.append(drafting.trunk_streams[last - num_left : last])
    batch = Batch(torch.tensor(token_ids), torch.tensor(positions), spans)
    got = model.model.predict(batch, torch.cat(streams), model.experts).numpy()
    for span, expected in zip(spans, alone, strict=True):
        assert np.abs(got[span.start : span.stop] - expected[-span.num_tokens :]).max() <= TOLERANCE


def test_without_a_block(prepare: Callable[[str], Prepared]) -> None:
    """A model without one says so."""
    assert not prepare("plain").model.model.has_prediction
    assert prepare("prediction").model.model.has_prediction


def test_demo_model_drafts_what_it_says(way_of: Callable[[Path, str], InProcessModel]) -> None:
    """The block was trained to: nearly all first drafts are what the trunk goes on to write."""
    model = way_of(DEMO_MODEL_PATH, "tasks")
    checkpoint = load_checkpoint(DEMO_MODEL_PATH)
    examples = encode(held_out_prompts()[::40], checkpoint.tokenizer)
    are_right: list[bool] = []
    for example in examples:
        token_ids, start = [*example.prompt_ids, *example.answer_ids], len(example.prompt_ids)
        drafting = Drafting(model, token_ids)
        chosen = model.model.logits(drafting.trunk_streams).numpy().argmax(-1)
        drafted, probabilities = likeliest_tokens(
            model.model.prediction_logits(torch.from_numpy(drafting.read())).numpy()
        )
        assert ((probabilities > 0) & (probabilities <= 1)).all()
        # Streams at p with the token at p + 1 are for the one at p + 2, which the trunk chooses at p + 1.
        are_right += (drafted[start - 1 :] == chosen[start:]).tolist()
    assert len(are_right) > 200
    assert np.mean(are_right) >= 0.85


def test_block_in_a_file_of_its_own(tmp_path: Path) -> None:
    """To the bit what the one file gives, behind rings too."""
    token_ids = [int(token_id) for token_id in np.random.default_rng(2).integers(0, 4000, 40)]
    main_path, draft_path = split_draft(DEMO_MODEL_PATH, tmp_path)
    results = []
    for path, draft in ((DEMO_MODEL_PATH, None), (main_path, draft_path)):
        model = InProcessModel(path, draft_path=draft)
        with served_experts(model.file, 64, natively=True) as experts:
            drafting = Drafting(model, token_ids, experts)
            results.append(np.concatenate([drafting.read(), drafting.draft(token_ids[:NUM_DRAFTS])]))
        model.device.close()
    assert np.array_equal(*results)
