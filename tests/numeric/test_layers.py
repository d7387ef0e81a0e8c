"""Parts of the forward pass, each against its formula in float64 or against transformers' own."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding

from gpu_worker.model.attention import masked_attention, one_query_attention
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.hyper_connection import StreamMixer, StreamReader, rms_norm, write
from gpu_worker.model.moe import MixtureOfExperts
from gpu_worker.model.ngram_embedding import NgramEmbedding
from gpu_worker.model.rotary import Rotary
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.model_config import Qwen4ExpConfig
from shared.rope_scaling import RopeScaling, ScalingType
from tests.support.prepared import Prepared
from tests.support.tensor_device import TensorDevice

CPU = torch.device("cpu")
NUM_TOKENS = 25
Exact = NDArray[np.float64]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random inputs in any order of tests."""
    torch.manual_seed(0)


def exact(tensor: Tensor) -> Exact:
    return tensor.double().numpy()


def sigmoid(x: Exact) -> Exact:
    return np.asarray(1 / (1 + np.exp(-x)))


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def grouped_norm(x: Exact, weight: Exact, epsilon: float) -> Exact:
    """x [streams, hidden], each stream by its own mean square."""
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight.reshape(x.shape))


@pytest.fixture
def config(prepare: Callable[[str], Prepared]) -> Qwen4ExpConfig:
    return prepare("plain").model.config


def random_streams(config: Qwen4ExpConfig) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(NUM_TOKENS, config.num_streams, config.hidden, generator=generator) * 3


def test_norm_of_zeros() -> None:
    """Epsilon keeps it from dividing by nothing."""
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_rotation() -> None:
    """Pairs are half the rotary width apart; what lies beyond passes through."""
    positions = torch.tensor([0, 1, 2, 63])
    x = torch.randn(4, 3, 20)
    rotated = Rotary(12, 1e4, RopeScaling(ScalingType.NONE, 64), CPU).at(positions)(x)
    for row, position in enumerate(positions.tolist()):
        for pair in range(6):
            turn = np.exp(1j * position * 1e4 ** (-2 * pair / 12))
            expected = (exact(x[row, :, pair]) + 1j * exact(x[row, :, pair + 6])) * turn
            np.testing.assert_allclose(rotated[row, :, pair], expected.real, atol=1e-5)
            np.testing.assert_allclose(rotated[row, :, pair + 6], expected.imag, atol=1e-5)
    assert torch.equal(rotated[:, :, 12:], x[:, :, 12:])


def test_rotation_far_from_the_start(prepare: Callable[[str], Prepared]) -> None:
    """At a position of six digits the angle's rounding shows, so it has to be the reference's rounding."""
    prepared = prepare("plain")
    positions = torch.tensor([5, 40_000, 262_143])
    cos, sin = Qwen4ExpTextRotaryEmbedding(prepared.reference.model.config)(
        torch.empty(0), positions[None, None].expand(3, -1, -1)
    )
    config = prepared.model.config
    half = config.rope_dim // 2
    x = torch.randn(3, 1, config.head_dim)
    rotated = Rotary(config.rope_dim, config.rope_base, config.rope_scaling, CPU).at(positions)(x)[:, 0]
    first, second = x[:, 0, :half], x[:, 0, half : 2 * half]
    expected = first * cos[0, :, :half] - second * sin[0, :, :half]
    assert (rotated[:, :half] - expected).abs().max() <= 1e-6


def test_reading_from_and_writing_to_streams(config: Qwen4ExpConfig) -> None:
    """The gated mean of the normalised streams, and what each of them gains."""
    width, rank, count = config.stream_width, config.stream_rank, config.num_streams
    weights = random_weights(
        {
            "norm.weight": (width,),
            "down.weight": (rank, width),
            "up.weight": (width, rank),
            "inject.weight": (count, width),
        }
    )
    streams = random_streams(config)
    device = TensorDevice(weights)
    x, gains = StreamMixer(device, "", config).read_with_gains(streams)
    assert torch.equal(StreamReader(device, "", config).read(streams), x)
    output = torch.randn(NUM_TOKENS, config.hidden)
    written = write(streams, gains, output)
    norm, down, up, inject = (exact(weight) for weight in weights.values())
    for token in range(NUM_TOKENS):
        before = exact(streams[token])
        normalised = grouped_norm(before, norm, config.rms_epsilon)
        low = down @ normalised.reshape(-1) / count
        gate = sigmoid(up @ (low * sigmoid(low))).reshape(normalised.shape)
        np.testing.assert_allclose(x[token], (gate * normalised).mean(0), atol=1e-5)
        gain = 2 * sigmoid(inject @ normalised.reshape(-1) / count)
        np.testing.assert_allclose(written[token], before + gain[:, None] * exact(output[token]), atol=1e-5)


def ngram_weights(config: Qwen4ExpConfig) -> dict[str, Tensor]:
    assert config.ngram is not None
    width, features = config.stream_width, config.ngram.feature_width
    shapes = {
        "key.weight": (width, features),
        "value.weight": (config.hidden, features),
        "norm_key.weight": (width,),
        "norm_query.weight": (width,),
        "norm_conv.weight": (width,),
        "conv1d.weight": (width, config.ngram.conv_kernel),
    }
    return random_weights({f"blk.{config.ngram.layer}.ple_{name}": shape for name, shape in shapes.items()})


def test_ngram_embedding(config: Qwen4ExpConfig) -> None:
    """Gate, value and the convolution whose taps are one n-gram apart."""
    ngram = config.ngram
    assert ngram is not None
    weights = ngram_weights(config)
    streams, features = random_streams(config), torch.randn(NUM_TOKENS, ngram.feature_width)
    # A stream of zeros matches nothing: the gate's argument is exactly zero, whose sign counts as none.
    streams[4, 1] = 0
    state = SequenceState(config, PagePool(config, CPU))
    positions = torch.arange(NUM_TOKENS)
    batch = Batch(positions, positions, [Span(0, NUM_TOKENS, state)])
    got = NgramEmbedding(TensorDevice(weights), config, ngram)(streams, features, batch)

    key, value, key_norm, query_norm, conv_norm, kernel = (exact(weight) for weight in weights.values())
    conv_inputs: list[Exact] = []
    for token in range(NUM_TOKENS):
        before, feature = exact(streams[token]), exact(features[token])
        keys = grouped_norm((key @ feature).reshape(before.shape), key_norm, config.rms_epsilon)
        match = (keys * grouped_norm(before, query_norm, config.rms_epsilon)).sum(-1) / config.hidden**0.5
        gate = sigmoid(np.sign(match) * np.sqrt(np.maximum(np.abs(match), 1e-6)))
        gated = gate[:, None] * (value @ feature)
        conv_inputs.append(grouped_norm(gated, conv_norm, config.rms_epsilon).reshape(-1))
        total = np.zeros(config.stream_width)
        for tap in range(ngram.conv_kernel):
            source = token - (ngram.conv_kernel - 1 - tap) * ngram.ngram_size
            if source >= 0:
                total += kernel[:, tap] * conv_inputs[source]
        expected = before + gated + (total * sigmoid(total)).reshape(before.shape)
        np.testing.assert_allclose(got[token], expected, atol=2e-5)


class _Recorder:
    """Experts that note what they are asked and answer with something known."""

    def __init__(self, answer: Tensor) -> None:
        self._answer = answer
        self.asked: tuple[Tensor, Tensor, Tensor] | None = None

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        self.asked = x, expert_ids, weights
        return 5

    def collect(self, ticket: int) -> Tensor:
        assert ticket == 5
        return self._answer


def test_routing_and_shared_expert(config: Qwen4ExpConfig) -> None:
    """The chosen probabilities, renormalised and scaled; the shared expert with its own gate on top."""
    config = replace(config, num_experts_used=3, expert_weights_scale=1.5)
    hidden, experts, width = config.hidden, config.num_experts, 24
    weights = random_weights(
        {
            "blk.0.ffn_gate_inp.weight": (experts, hidden),
            "blk.0.ffn_gate_inp_shexp.weight": (hidden,),
            "blk.0.ffn_gate_shexp.weight": (width, hidden),
            "blk.0.ffn_up_shexp.weight": (width, hidden),
            "blk.0.ffn_down_shexp.weight": (hidden, width),
        }
    )
    x, routed = torch.randn(NUM_TOKENS, hidden), torch.randn(NUM_TOKENS, hidden)
    recorder = _Recorder(routed)
    got = MixtureOfExperts(TensorDevice(weights), 0, config)(x, recorder)
    assert recorder.asked is not None
    _, expert_ids, route_weights = recorder.asked
    router, own_gate, gate, up, down = (exact(weight) for weight in weights.values())
    for token in range(NUM_TOKENS):
        row = exact(x[token])
        probabilities = np.exp(router @ row) / np.exp(router @ row).sum()
        best = np.argsort(-probabilities)[:3]
        assert expert_ids[token].tolist() == best.tolist()
        np.testing.assert_allclose(
            route_weights[token], 1.5 * probabilities[best] / probabilities[best].sum(), atol=1e-5
        )
        inner = gate @ row
        shared = down @ (inner * sigmoid(inner) * (up @ row))
        expected = exact(routed[token]) + sigmoid(own_gate @ row) * shared
        np.testing.assert_allclose(got[token], expected, atol=2e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_of_one_query(heads: int, kv_heads: int) -> None:
    """What decoding computes is what a prompt computes, and both are softmax attention by head groups."""
    query, keys, values = torch.randn(1, heads, 8), torch.randn(31, kv_heads, 8), torch.randn(31, kv_heads, 8)
    seen = torch.ones(1, 31, dtype=torch.bool)
    for got in (one_query_attention(query, keys, values), masked_attention(query, keys, values, seen)):
        assert got.shape == (1, heads, 8)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = exact(keys[:, kv_head]) @ exact(query[0, head]) / 8**0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ exact(values[:, kv_head]) / weights.sum()
            np.testing.assert_allclose(got[0, head], expected, atol=1e-5)
