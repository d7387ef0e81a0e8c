"""Experts from a pool smaller than a layer: the same bits as from the mapped file, whatever is read when; and what
the pool knows of its places is true."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_worker.expert_layer import ExpertLayer
from shared.gguf.model import GGUFModel
from shared.native.team import Team
from stager.file_reads import FileRead
from tests.support.expert_pool import pooled
from tests.support.tiny_model import HIDDEN, TinyModel, tiny_model

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(60, method="thread")

Floats = NDArray[np.float32]
Routes = tuple[Floats, NDArray[np.int32], Floats]

NUM_EXPERTS = 24
NUM_USED = 3


def model_with_experts(num_experts: int = NUM_EXPERTS, num_used: int = NUM_USED) -> TinyModel:
    """The tiny model with more experts than the usual eight."""
    model = tiny_model()
    model.set("expert_count", num_experts)
    model.set("expert_used_count", num_used)
    for name, tensor in model.tensors.items():
        if "_exps" in name or name.endswith("ffn_gate_inp.weight"):
            tensor.shape = (num_experts, *tensor.shape[1:])
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_experts().write(tmp_path_factory.mktemp("pool") / "tiny.gguf")


@pytest.fixture(scope="module")
def file(path: Path) -> Iterator[GGUFModel]:
    with GGUFModel(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def routes(num_tokens: int, seed: int, num_experts: int = NUM_EXPERTS) -> Routes:
    """Activations, experts (each at most once a token; some of nobody), weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :NUM_USED].astype(np.int32)
    ids[rng.random(ids.shape) < 0.05] = -1
    return x, ids, rng.random((num_tokens, NUM_USED)).astype(np.float32)


def compute(layer: ExpertLayer, step: Routes, team: Team) -> bytes:
    out = np.full_like(step[0], np.nan)
    layer.compute(*step, out, team)
    return out.tobytes()


def shuffled(reads: list[FileRead]) -> None:
    """Nothing to change: a delay in front of every batch, as long as a layer takes or not at all."""
    threading.Event().wait(random.choice([0, 0, 1e-3]))


@pytest.mark.parametrize("places", [6, 7, 13, NUM_EXPERTS])
def test_the_same_bits_as_mapped(file: GGUFModel, team: Team, places: int) -> None:
    """Steps of all sizes by turns: one token, windows, and prompts that need every expert of a layer, and more
    routes than a wave has. Layers take turns, so that places are reused while others are kept."""
    sizes = [1, 1, 2, 5, 1, 40, 1, 3, 700, 1, 9, 1]
    mapped = [ExpertLayer(file, layer) for layer in range(2)]
    with pooled(file, places) as ours:
        ours.reader.before = shuffled
        for number, size in enumerate(sizes):
            step, layer = routes(size, number), number % 2
            assert compute(ours.layers[layer], step, team) == compute(mapped[layer], step, team)
        assert ours.pool.num_read <= NUM_USED


def test_what_is_in_the_pool_is_not_read_again(file: GGUFModel, team: Team) -> None:
    """A repeat reads nothing; a pool as large as a layer reads each expert once."""
    with pooled(file, NUM_EXPERTS) as ours:
        steps = [routes(size, size) for size in (1, 3, 60)]
        for step in steps:
            compute(ours.layers[0], step, team)
        assert ours.reader.num_reads == 3 * NUM_EXPERTS
        for step in steps:
            compute(ours.layers[0], step, team)
            assert ours.pool.num_read == ours.pool.wait_ns == 0
        assert ours.reader.num_reads == 3 * NUM_EXPERTS


def test_those_in_use_stay(file: GGUFModel, team: Team) -> None:
    """Experts that every other token uses survive a stream of others through the rest of the pool."""
    hot = [1, 5]
    with pooled(file, 6) as ours:
        x = np.ones((1, HIDDEN), np.float32)
        weights = np.ones((1, 2), np.float32)
        cold = [expert for expert in range(NUM_EXPERTS) if expert not in hot]
        num_read = 0
        for number in range(120):
            ids = hot if number % 2 == 0 else [cold[number % len(cold)], cold[(number + 1) % len(cold)]]
            ours.layers[0].compute(x, np.array([ids], np.int32), weights, np.empty_like(x), team)
            num_read += ours.pool.num_read if number % 2 == 0 else 0
        assert num_read == len(hot)
        uses = ours.layers[0].uses
        assert set(np.argsort(uses)[-2:].tolist()) == set(hot)
