"""The experts of a model behind a real ring, served in a thread of this process."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.native_slots import NativeExperts
from cpu_worker.worker import ExpertService
from gpu_worker.experts.counts import ExpertCounts, ExpertFiles
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.ngram_way import StagedFeatures
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.native.team import Team
from shared.ring import Arrays, NativeWork, RingClient, RingServer, RingShape
from shared.work_slots import expert_ring, ngram_ring
from stager.native_slots import NativeNgrams
from stager.ngram_rows import open_rows
from stager.worker import NgramSlots

CPU = torch.device("cpu")


@contextmanager
def open_ring(shape: RingShape) -> Iterator[RingClient]:
    """A ring that nobody serves yet, whose Python way does not spin."""
    client = RingClient(shape, "test", secrets.token_hex(8), spin_s=0)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def served(
    client: RingClient, work: Callable[[Arrays], None], native: NativeWork | None
) -> Iterator[RingServer]:
    """A server in a thread."""
    server = RingServer(client.shape, client.descriptor, spin_s=0)
    thread = threading.Thread(target=server.serve, args=(work, native))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


def cpu_way(client: RingClient, file: GGUFModel, timeout_s: float) -> CpuExperts:
    """The way to a cpu_worker through its ring, with counts for the tokens that fit into it."""
    _, (max_tokens, _) = client.shape.arrays["activations"]
    num_layers = read_model_config(file).num_expert_layers
    return CpuExperts(client, CPU, timeout_s, ExpertCounts(ExpertFiles.of(file, num_layers), max_tokens))


@contextmanager
def served_experts(file: GGUFModel, max_tokens: int, *, natively: bool) -> Iterator[CpuExperts]:
    """The way to a cpu_worker that computes all layers of a model."""
    config = read_model_config(file)
    layers, team = [ExpertLayer(file, layer) for layer in range(config.num_expert_layers)], Team(1)
    with open_ring(expert_ring(config, max_tokens)) as client:
        native = NativeExperts(layers, team) if natively else None
        with served(client, ExpertService(layers, team), native):
            yield cpu_way(client, file, 60)


@contextmanager
def served_features(file: GGUFModel, max_tokens: int, *, natively: bool) -> Iterator[StagedFeatures]:
    """The way to a stager that reads a model's table."""
    ngram = read_model_config(file).ngram
    assert ngram is not None
    rows = open_rows(file, ngram)
    with open_ring(ngram_ring(ngram, max_tokens)) as client:
        native = NativeNgrams(rows, ngram.ngram_size) if natively else None
        with served(client, NgramSlots(rows), native):
            yield StagedFeatures(client, CPU, 60, file.path.name, len(ngram.head_vocab_sizes))
    rows.close()
