"""The devices agree with each other, and code for a device of its own touches no memory of another."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import gpu_worker.device.torch_device
from benchmarks.in_process import InProcessModel
from gpu_worker.device.cpu import CpuDevice
from gpu_worker.device.torch_device import TorchDevice
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.qwen4exp import Qwen4Exp
from shared.expert_blobs import expert_tensor
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.work_slots import PARTS
from tests.support.divergence import divergences
from tests.support.expert_ring import served_experts
from tests.support.kernels import using_kernels
from tests.support.model_cases import CASES
from tests.support.prepared import Prepared
from tests.support.running_engine import running_engine
from tests.support.type_profiles import PROFILES

DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("torch_device", DEVICES)
def test_torch_device(prepare: Callable[[str], Prepared], name: str, torch_device: str) -> None:
    """Files of float types: what the CpuDevice computes, in one chunk and with a few tokens decoded."""
    prepared = prepare(name)
    token_ids = prepared.prompt(80)
    model = InProcessModel(prepared.reference.path, torch.device(torch_device))
    logits = model.logits(token_ids, [70, *[1] * 5])
    assert np.abs(logits - prepared.model.logits(token_ids)).max() <= 1e-4


@pytest.mark.parametrize("prepared", PROFILES, indirect=True)
@pytest.mark.parametrize("torch_device", DEVICES)
def test_torch_device_with_quantised_weights(prepared: Prepared, torch_device: str) -> None:
    """Kept as float16, which moves the choice of experts and blocks where it is close: up to 2.5e-4 was
    observed on average, nearly all of it at one position."""
    token_ids = prepared.prompt(120)
    with using_kernels("portable"):
        model = InProcessModel(prepared.reference.path, torch.device(torch_device))
        divergence = divergences(prepared.expected(token_ids), model.logits(token_ids))
    assert divergence.mean() <= 1e-3
    assert np.median(divergence) <= 1e-5


@pytest.mark.parametrize("torch_device", DEVICES)
def test_matrices_that_are_widened_in_pieces(
    prepare: Callable[[str], Prepared], torch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that the rows do not come out even with, or a row is larger than: the same products."""
    file = GGUFModel(prepare("ista-iq2xs").reference.path)
    linear = TorchDevice(file, torch.device(torch_device)).linear("output.weight")
    num_rows, width = file.info("output.weight").shape
    x = torch.randn(3, width, device=torch_device)
    whole = linear(x)
    assert whole.shape == (3, num_rows)
    for widened_bytes in (num_rows * width * 4 - 1, 7 * width * 4, 1):
        monkeypatch.setattr(gpu_worker.device.torch_device, "WIDENED_BYTES", widened_bytes)
        assert torch.allclose(linear(x), whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize("torch_device", DEVICES)
def test_experts_and_their_memory(prepare: Callable[[str], Prepared], torch_device: str) -> None:
    """Every device has both, for the layers of its model."""
    file = GGUFModel(prepare("plain").reference.path)
    config = read_model_config(file)
    for device in (TorchDevice(file, torch.device(torch_device)), CpuDevice(file, 1)):
        experts, memory = device.experts(config), device.memory(1 << 20)
        slot = memory.allocate(experts.slot_bytes(config.num_layers - 1))
        assert slot.device.type == device.torch_device.type
        memory.release(slot)
        memory.close()
        device.close()


def test_experts_in_slots_and_in_ram(prepare: Callable[[str], Prepared]) -> None:
    """Experts with even numbers from slots of the device, the others by the cpu_worker, which sees routes of
    none for them: together what the cpu_worker makes of all."""
    file = GGUFModel(prepare("plain").reference.path)
    config = read_model_config(file)
    device, rng = CpuDevice(file, 1), np.random.default_rng(0)
    experts, memory, layer = device.experts(config), device.memory(1 << 24), config.num_layers - 1
    x = torch.from_numpy(rng.normal(size=(9, config.hidden)).astype(np.float32))
    ids = np.argsort(rng.random((9, config.num_experts)), axis=1)[:, : config.num_experts_used]
    weights = rng.random(ids.shape).astype(np.float32)
    is_on_device = ids % 2 == 0
    with served_experts(file, 9, natively=False) as cpu_worker:
        whole = cpu_worker.collect(
            cpu_worker.submit(layer, x, torch.from_numpy(ids), torch.from_numpy(weights))
        ).clone()
        left = torch.from_numpy(np.where(is_on_device, -1, ids).astype(np.int32))
        out = cpu_worker.collect(cpu_worker.submit(layer, x, left, torch.from_numpy(weights))).clone()
    assert not torch.equal(out, whole)
    routes = np.flatnonzero(is_on_device)
    routes = routes[np.argsort(ids.reshape(-1)[routes], kind="stable")]
    chosen, starts = np.unique(ids.reshape(-1)[routes], return_index=True)
    slots = [memory.allocate(experts.slot_bytes(layer)) for _ in chosen]
    for expert, slot in zip(chosen, slots, strict=True):
        parts = [file.rows(expert_tensor(layer, part))[expert].reshape(-1) for part in PARTS]
        copied = memory.copy_in(parts, slot, experts.part_offsets(layer))
        memory.compute_waits_for(copied)
    tokens = (routes // ids.shape[1]).astype(np.int32)
    experts.compute(
        layer, slots, [*starts.tolist(), len(routes)], tokens, weights.reshape(-1)[routes], x, out
    )
    assert torch.allclose(out, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    memory.close()
    device.close()


@pytest.mark.parametrize("torch_device", DEVICES)
def test_engine_on_a_torch_device(prepare: Callable[[str], Prepared], torch_device: str) -> None:
    """Activations, routes and features cross between the device and the rings of the other processes."""
    prepared = prepare("plain")
    prompt = prepared.prompt(70)
    with running_engine(prepared.reference.path, torch_device=torch.device(torch_device)) as running:
        running.ask("a", prompt, 8)
        running.ask("b", prompt[:9], 8)
        assert running.answer("a").token_ids == prepared.model.greedy(prompt, 8)
        assert running.answer("b").token_ids == prepared.model.greedy(prompt[:9], 8)


def test_cpu_device_with_threads(prepare: Callable[[str], Prepared]) -> None:
    """Large products are divided among threads, row by row."""
    prepared = prepare("ista-iq2xs")
    token_ids = prepared.prompt(120)
    divided = InProcessModel(prepared.reference.path, num_threads=3)
    try:
        assert np.abs(divided.logits(token_ids) - prepared.model.logits(token_ids)).max() <= 1e-4
    finally:
        divided.device.close()


class _NowhereExperts:
    """Answers with tensors that have no values."""

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        self._x = x
        return 0

    def collect(self, ticket: int) -> Tensor:
        return torch.empty_like(self._x)


class _NowhereFeatures:
    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def collect(self) -> Tensor:
        return torch.empty(self._shape, device="meta")


@pytest.mark.parametrize("name", ["plain", "no-ngrams-equal-heads", "blocks-of-one", "dense", "tied-head"])
def test_nothing_leaves_the_device(prepare: Callable[[str], Prepared], name: str) -> None:
    """On the device `meta` tensors have shapes but no values: an operation with a tensor of the CPU fails
    there, as it would on a graphics card, and so does reading values back, which would stop its queue."""
    nowhere = torch.device("meta")
    file = GGUFModel(prepare(name).reference.path)
    config = read_model_config(file)
    device = TorchDevice(file, nowhere)
    has_own_head = "output.weight" in file
    model = Qwen4Exp(device, config, has_own_head=has_own_head, report=lambda activity, progress: None)
    reading, decoding = model.new_state(), model.new_state()
    experts = _NowhereExperts()
    for sizes in ((70, 40), (31, 1), (1, 1)):
        spans, at = [], 0
        for size, state in zip(sizes, (reading, decoding), strict=True):
            spans.append(Span(at, at + size, state))
            at += size
        features = _NowhereFeatures((at, config.ngram.feature_width)) if config.ngram is not None else None
        ids = torch.zeros(at, dtype=torch.int64, device=nowhere)
        streams = model.forward(Batch(ids, ids, spans), experts, features)
        assert model.logits(streams).shape == (at, config.vocab_size)
