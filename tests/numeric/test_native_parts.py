"""Every part of a layer as tasks in machine code, against the same part in torch operations.

Both get the same random float32 weights. Sums are taken in other orders, so results differ by rounding: by
2e-6 of the largest value as observed; 1e-5 is allowed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.interface import RowTable
from gpu_worker.model.attention import Attention
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.delta_net import DeltaNet
from gpu_worker.model.hyper_connection import StreamMixer, write
from gpu_worker.model.moe import MixtureOfExperts
from gpu_worker.model.ngram_embedding import NgramEmbedding
from gpu_worker.model.rotary import Rotary
from gpu_worker.native.attention import Attention as NativeAttention
from gpu_worker.native.delta_net import DeltaNet as NativeDeltaNet
from gpu_worker.native.moe import MixtureOfExperts as NativeMixtureOfExperts
from gpu_worker.native.ngram_embedding import NgramEmbedding as NativeNgramEmbedding
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script, Sizes
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.streams import StreamReader as NativeStreamReader
from gpu_worker.native.streams import Written, emit_write
from gpu_worker.native.workspace import Matrix, Workspace
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared import quants
from shared.gguf.types import tensor_type_named
from shared.kv_format import kv_format
from shared.model_config import IndexerConfig, Qwen4ExpConfig
from shared.native.team import Team
from shared.rope_scaling import RopeScaling, ScalingType
from tests.support.prepared import Prepared
from tests.support.tensor_device import TensorDevice

CPU = torch.device("cpu")
TOLERANCE = 1e-5
# Spans of one token, of a few, and of many, not in the order of their sizes; two steps one after the other.
STEPS = ((1, 20, 3, 1), (5, 1, 1, 30))


class ArrayWeights:
    """The weights of a TensorDevice, for tasks."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._format = quants.block_format(tensor_type_named("F32").type_id)

    def matrix(self, name: str) -> Matrix:
        """Rows of float32."""
        floats = self.floats(name)
        return Matrix(floats.reshape(-1, floats.shape[-1]).view(np.uint8), self._format)

    def floats(self, name: str) -> NDArray[np.float32]:
        """As they are."""
        return np.ascontiguousarray(self._tensors[name].numpy())

    def row_table(self, name: str) -> RowTable:
        """Rows of float32."""
        return lambda rows: self._tensors[name][rows]


class Runner:
    """A workspace, and a team that runs scripts in it."""

    def __init__(self, team: Team, capacity: int) -> None:
        self.workspace = Workspace(capacity)
        self.spans = StepSpans(capacity)
        self._team = team

    def begin(self, spans: Sequence[Span], num_tokens: int) -> Sizes:
        """Sets the size of the next step."""
        self.workspace.set_num_tokens(num_tokens)
        return self.spans.begin(spans, num_tokens)

    def run(self, emit: Callable[[Script], object], sizes: Sizes) -> None:
        """Runs what `emit` appends."""
        script = Script()
        emit(script)
        self._team.run(script.resize(sizes))


@pytest.fixture(scope="module", params=[1, 3], ids=["alone", "three threads"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(request.param)
    yield made
    made.close()


@pytest.fixture
def config(prepare: Callable[[str], Prepared]) -> Qwen4ExpConfig:
    return prepare("plain").model.config


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }


def random_values(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: NDArray[np.float32], want: Tensor, tolerance: float = TOLERANCE) -> None:
    """Within `tolerance` of the largest value; NaN where and only where NaN is wanted."""
    expected = want.numpy().reshape(got.shape)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    size = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    assert np.nanmax(np.abs(got - expected), initial=0) <= tolerance * size


def spans_of(lengths: Sequence[int], states: Sequence[SequenceState]) -> tuple[list[Span], Batch]:
    """Spans one after the other, and their batch."""
    spans, positions, start = [], [], 0
    for length, state in zip(lengths, states, strict=True):
        spans.append(Span(start, start + length, state))
        positions += range(state.position, state.position + length)
        start += length
        state.reserve(state.position + length)
    return spans, Batch(torch.arange(start), torch.tensor(positions), spans)


def new_states(config: Qwen4ExpConfig, kv_type: str = "f32") -> list[SequenceState]:
    """Of as many sequences as the steps have; they share a pool."""
    pool = PagePool(config, CPU, kv_format(kv_type))
    return [SequenceState(config, pool) for _ in STEPS[0]]


def assert_same_pending(got: Tensor, want: Tensor, num_rows: int) -> None:
    """What counts of a buffer of pending tokens."""
    assert_close(got[:num_rows].numpy(), want[:num_rows])


MIXER = {"norm.weight": (-1,), "down.weight": (0, -1), "up.weight": (-1, 0), "inject.weight": (1, -1)}


@pytest.mark.parametrize("inputs", ["random", "zeros", "large", "one NaN"])
@pytest.mark.parametrize("hidden", [64, 300])
def test_streams(config: Qwen4ExpConfig, team: Team, inputs: str, hidden: int) -> None:
    """What experts leave is written, the next block's input and its gains are read."""
    config = replace(config, hidden=hidden)
    num_tokens, width = 7, config.stream_width
    sizes = {-1: width, 0: config.stream_rank, 1: config.num_streams}
    weights = random_weights({name: tuple(sizes[n] for n in shape) for name, shape in MIXER.items()})
    scale = {"zeros": 0.0, "large": 1e6}.get(inputs, 1.0)
    streams = random_values(num_tokens, config.num_streams, hidden) * scale
    routed, shared = random_values(2, num_tokens, hidden, seed=1) * scale
    shared_gate, gains = random_values(num_tokens, 1), random_values(num_tokens, config.num_streams, seed=5)
    if inputs == "one NaN":
        routed[2, 5] = torch.nan

    runner = Runner(team, num_tokens)
    floats = runner.workspace.floats
    floats("streams", width)[:] = streams.flatten(1).numpy()
    floats("gains", config.num_streams)[:] = gains.numpy()
    written = Written(routed.numpy(), shared.numpy(), shared_gate.numpy())
    reader = NativeStreamReader(ArrayWeights(weights), "", config, has_gains=True)
    sizes_of_step = runner.begin([], num_tokens)
    runner.run(lambda script: reader.emit(script, runner.workspace, written), sizes_of_step)

    total = routed + torch.sigmoid(shared_gate) * shared
    expected = write(streams, 2 * torch.sigmoid(gains), total)
    assert_close(floats("streams", width), expected)
    x, new_gains = StreamMixer(TensorDevice(weights), "", config).read_with_gains(expected)
    assert_close(floats("x", hidden), x)
    read_gains = 2 * torch.sigmoid(torch.from_numpy(floats("gains", config.num_streams)))
    assert_close(read_gains.numpy(), new_gains)

    # A block of one part only, and nobody who reads.
    mixed = random_values(num_tokens, hidden, seed=2) * scale
    runner.run(
        lambda script: emit_write(script, runner.workspace, config, Written(mixed.numpy())), sizes_of_step
    )
    assert_close(floats("streams", width), write(expected, new_gains, mixed))


@pytest.mark.parametrize(("head_dim", "key_heads", "heads"), [(16, 2, 6), (128, 1, 2), (6, 3, 3)])
@pytest.mark.parametrize("inputs", ["random", "zeros", "large"])
def test_delta_net(
    config: Qwen4ExpConfig, team: Team, head_dim: int, key_heads: int, heads: int, inputs: str
) -> None:
    """Several sequences in a step, whose states go on in the next; every head is its own."""
    config = replace(
        config, delta_head_dim=head_dim, num_delta_key_heads=key_heads, num_delta_value_heads=heads
    )
    hidden, channels, inner = config.hidden, config.delta_channels, heads * head_dim
    weights = random_weights(
        {
            "blk.0.attn_qkv.weight": (channels, hidden),
            "blk.0.attn_gate.weight": (inner, hidden),
            "blk.0.ssm_alpha.weight": (heads, hidden),
            "blk.0.ssm_beta.weight": (heads, hidden),
            "blk.0.ssm_out.weight": (hidden, inner),
            "blk.0.ssm_conv1d.weight": (channels, config.conv_kernel),
            "blk.0.ssm_dt.bias": (heads,),
            "blk.0.ssm_norm.weight": (head_dim,),
            "blk.0.ssm_a": (heads,),
        }
    )
    weights["blk.0.ssm_a"] = -weights["blk.0.ssm_a"].abs()
    torch_part = DeltaNet(TensorDevice(weights), 0, config)
    native = NativeDeltaNet(ArrayWeights(weights), 0, config)
    scale = {"zeros": 0.0, "large": 1e4}.get(inputs, 1.0)
    want_states, got_states = (new_states(config) for _ in range(2))
    for number, lengths in enumerate(STEPS):
        num_tokens = sum(lengths)
        x = random_values(num_tokens, hidden, seed=number) * scale
        expected = torch_part(x, spans_of(lengths, want_states)[1])
        runner = Runner(team, num_tokens)
        native.build(runner.workspace, runner.spans)
        sizes = runner.begin(spans_of(lengths, got_states)[0], num_tokens)
        runner.workspace.floats("x", hidden)[:] = x.numpy()
        native.begin()
        runner.run(native.emit, sizes)
        assert_close(runner.workspace.floats("output", hidden), expected)
        for got, want in zip(got_states, want_states, strict=True):
            length = lengths[got_states.index(got)]
            got.advance(length)
            want.advance(length)
            num_pending = want.num_pending
            assert_close(got.delta[0].matrices.numpy(), want.delta[0].matrices)
            for rows in ("decays", "keys", "deltas"):
                assert_same_pending(getattr(got.delta[0], rows), getattr(want.delta[0], rows), num_pending)
            num_rows = num_pending + config.conv_kernel - 1
            assert_same_pending(got.delta[0].conv_inputs, want.delta[0].conv_inputs, num_rows)
            # In the next step some have fewer, or none.
            for state in (got, want):
                state.roll_back(state.position - min(num_pending, number + got_states.index(got)))


# What a code may differ by where both ways have rounded a key or a value itself differently, in parts of the
# largest.
KEY_STEPS = {"f32": 0.0, "f16": 2.0**-10, "int8": 1 / 127, "k8v4": 1 / 127}
VALUE_STEPS = KEY_STEPS | {"k8v4": 1 / 8}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "ratio", "budget", "kv_type"),
    [
        (4, 2, 32, 4, 32, "f32"),
        (3, 1, 32, 0, 32, "f32"),
        (6, 1, 12, 1, 5, "f32"),
        (4, 4, 16, 3, 9, "f32"),
        (5, 1, 64, 4, 1024, "f32"),
        (4, 2, 32, 4, 32, "f16"),
        (4, 2, 96, 4, 32, "int8"),
        (3, 1, 12, 0, 32, "int8"),
        (4, 2, 72, 4, 32, "k8v4"),
        (5, 1, 64, 4, 1024, "k8v4"),
    ],
)
def test_attention(
    config: Qwen4ExpConfig,
    team: Team,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ratio: int,
    budget: int,
    kv_type: str,
) -> None:
    """Dense, and with blocks dropped; blocks that are completed in the middle of a span or by its last token;
    contexts of one part and of several. Rows that are rounded may be so to the next code, here and there;
    from the same rows the same comes out."""
    layer = 3
    config = replace(
        config,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=8,
        indexer=IndexerConfig(4, 16, budget),
        compress_ratios=tuple(ratio for _ in config.compress_ratios),
    )
    hidden, index_dim = config.hidden, config.indexer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (2 * heads * head_dim, hidden),
        "attn_k.weight": (kv_heads * head_dim, hidden),
        "attn_v.weight": (kv_heads * head_dim, hidden),
        "attn_output.weight": (hidden, heads * head_dim),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "indexer.q_proj.weight": (4 * index_dim, hidden),
        "indexer.k_proj.weight": (index_dim, hidden),
        "indexer.q_norm.weight": (index_dim,),
        "indexer.k_norm.weight": (index_dim,),
    }
    weights = random_weights({f"blk.{layer}.{name}": shape for name, shape in shapes.items()})
    scaling = RopeScaling(ScalingType.YARN, 64, 2.0)
    rotary, rotation = (
        Rotary(8, config.rope_base, scaling, CPU),
        RotationTable(8, config.rope_base, scaling),
    )
    torch_part = Attention(TensorDevice(weights), layer, config, rotary)
    native = NativeAttention(ArrayWeights(weights), layer, config, rotation)
    want_states, got_states = (new_states(config, kv_type) for _ in range(2))
    for number, lengths in enumerate((*STEPS, (1, 1, 1, 1), (150, 1, 7, 1), *(3 * [(1, 1, 1, 1)]))):
        num_tokens = sum(lengths)
        x = random_values(num_tokens, hidden, seed=number)
        batch = spans_of(lengths, want_states)[1]
        expected = torch_part(x, batch, rotary.at(batch.positions))
        runner = Runner(team, num_tokens)
        native.build(runner.workspace, runner.spans)
        scripts = [Script() for _ in range(3)]
        native.emit_heads(scripts[0], chooses=False)
        native.emit_heads(scripts[1], chooses=True)
        native.emit_attention(scripts[2])
        sizes = runner.begin(spans_of(lengths, got_states)[0], num_tokens)
        rotation.reach(int(batch.positions.max()) + 1)
        runner.workspace.floats("x", hidden)[:] = x.numpy()
        chooses = native.begin()
        team.run(scripts[chooses].resize(sizes))
        if chooses:
            native.choose()
        for got, want, length in zip(got_states, want_states, lengths, strict=True):
            stop = got.position + length
            got_rows, want_rows = got.rows(stop), want.rows(stop)
            got_store, want_store = got.attention[layer].store, want.attention[layer].store
            got_keys, want_keys = got_store.keys_of(got_rows), want_store.keys_of(want_rows)
            assert_close(got_keys.numpy(), want_keys, TOLERANCE + KEY_STEPS[kv_type])
            got_values, want_values = got_store.values_of(got_rows), want_store.values_of(want_rows)
            assert_close(got_values.numpy(), want_values, TOLERANCE + VALUE_STEPS[kv_type])
            differing = (got_keys != want_keys).float().mean() + (got_values != want_values).float().mean()
            if kv_type != "f32":
                assert differing <= 0.01
                got_store.keys[got_rows] = want_store.keys[want_rows]
                got_store.values[got_rows] = want_store.values[want_rows]
        team.run(scripts[2].resize(sizes))
        assert_close(runner.workspace.floats("output", hidden), expected)
        for got, want, length in zip(got_states, want_states, lengths, strict=True):
            got.advance(length)
            want.advance(length)
            got_store, want_store = got.attention[layer].store, want.attention[layer].store
            if ratio:
                num_blocks = got.position // ratio
                assert_close(
                    got_store.block_keys[got.block_rows(num_blocks, ratio)].numpy(),
                    want_store.block_keys[want.block_rows(num_blocks, ratio)],
                )
            # One that is taken back is computed again.
            if number % 2:
                for state in (got, want):
                    state.roll_back(state.position - min(2, state.num_pending))


def test_rotations_are_made_as_far_as_they_are_needed() -> None:
    """And stay what they were when the table grows."""
    scaling = RopeScaling(ScalingType.YARN, 4096, 3.0)
    table, rotary = RotationTable(8, 1e4, scaling), Rotary(8, 1e4, scaling, CPU)
    for length in (1, 2048, 2049, 9000, 5):
        table.reach(length)
        expected = rotary.at(torch.arange(length))
        assert np.array_equal(table.cosines[:length], expected.cos[:, 0].numpy())
        assert np.array_equal(table.sines[:length], expected.sin[:, 0].numpy())
        assert table.record["cosines"] == table.cosines.ctypes.data
        assert table.record["sines"] == table.sines.ctypes.data


class _Recorder:
    """Notes what experts are asked, and answers with zeros."""

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        self.x, self.expert_ids, self.weights = x, expert_ids, weights
        return 0

    def collect(self, ticket: int) -> Tensor:
        return torch.zeros_like(self.x)


def expert_shapes(hidden: int, num_experts: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "blk.0.ffn_gate_inp.weight": (num_experts, hidden),
        "blk.0.ffn_gate_inp_shexp.weight": (hidden,),
        "blk.0.ffn_gate_shexp.weight": (width, hidden),
        "blk.0.ffn_up_shexp.weight": (width, hidden),
        "blk.0.ffn_down_shexp.weight": (hidden, width),
    }


@pytest.mark.parametrize(("num_experts", "num_used"), [(8, 2), (100, 10), (4, 4), (5, 1)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_routes_and_shared_expert(
    config: Qwen4ExpConfig, team: Team, num_experts: int, num_used: int, scale: float
) -> None:
    """The same experts in the same order, with the same weights."""
    config = replace(config, num_experts=num_experts, num_experts_used=num_used, expert_weights_scale=1.5)
    hidden, num_tokens = config.hidden, 9
    weights = random_weights(expert_shapes(hidden, num_experts, 48))
    x = random_values(num_tokens, hidden) * scale
    recorder = _Recorder()
    expected = MixtureOfExperts(TensorDevice(weights), 0, config)(x, recorder)
    native = NativeMixtureOfExperts(ArrayWeights(weights), 0, config)
    runner = Runner(team, num_tokens)
    native.build(runner.workspace)
    sizes = runner.begin([], num_tokens)
    runner.workspace.floats("x", hidden)[:] = x.numpy()
    left: list[Written] = []
    runner.run(native.emit_routes, sizes)
    runner.run(lambda script: left.append(native.emit_shared(script)), sizes)
    assert native.expert_ids.tolist() == recorder.expert_ids.tolist()
    assert_close(native.expert_weights, recorder.weights)
    (written,) = left
    assert written.shared is not None
    assert written.shared_gate is not None
    gate = torch.sigmoid(torch.from_numpy(written.shared_gate))
    assert_close(written.shared * gate.numpy(), expected)


@pytest.mark.parametrize(
    "row", [[0.0] * 6, [1.0, 3, 2, 3, 3, 0], [-np.inf, 0, 1, -np.inf, 2, 1], [1e30, -1e30, 0, 5, 5, 1e30]]
)
def test_equal_logits(config: Qwen4ExpConfig, team: Team, row: list[float]) -> None:
    """Every expert once, the lower number first, weights that add up to the scale."""
    expert_ids, weights = routes_of(config, team, row)
    order = sorted(range(6), key=lambda expert: (-row[expert], expert))
    assert expert_ids == order[:3]
    assert sum(weights) == pytest.approx(1.0)


@pytest.mark.parametrize("places", [[0], [5], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
def test_logits_that_are_not_numbers(config: Qwen4ExpConfig, team: Team, places: list[int]) -> None:
    """They are chosen first, as torch does, so that they show in the output; the numbers of experts are still
    numbers of experts."""
    row = [0.5, -1, 3, 2, 0, 1]
    for place in places:
        row[place] = np.nan
    expert_ids, weights = routes_of(config, team, row)
    assert len(set(expert_ids)) == 3
    assert set(expert_ids) <= set(range(6))
    assert set(places[:3]) <= set(expert_ids)
    assert np.isnan(weights).all()


def routes_of(config: Qwen4ExpConfig, team: Team, row: list[float]) -> tuple[list[int], list[float]]:
    """What is chosen of six experts with these logits, in the middle of other tokens."""
    config = replace(config, num_experts=6, num_experts_used=3, hidden=6)
    weights = random_weights(expert_shapes(6, 6, 8))
    # Logits are the inputs themselves; infinity times the zeros of a matrix would be NaN.
    native = NativeMixtureOfExperts(ArrayWeights(weights), 0, config)
    runner = Runner(team, 3)
    native.build(runner.workspace)
    sizes = runner.begin([], 3)
    script = Script()
    native.emit_routes(script)
    program = script.resize(sizes)
    runner.workspace.floats("router", 6)[:] = np.array([[3, 2, 1, 0, 0, 0], row, [0, 0, 1, 0, 0, 9]])
    program.entries["num_items"][:-1] = 0
    program.seal()
    team.run(program)
    return native.expert_ids[1].tolist(), native.expert_weights[1].tolist()


@pytest.mark.parametrize("inputs", ["random", "zeros", "large"])
def test_ngram_embedding(config: Qwen4ExpConfig, team: Team, inputs: str) -> None:
    """Gate and convolution, whose history goes on in the next step; a stream that matches nothing."""
    ngram = config.ngram
    assert ngram is not None
    width, features_width = config.stream_width, ngram.feature_width
    shapes: dict[str, tuple[int, ...]] = {
        "key.weight": (width, features_width),
        "value.weight": (config.hidden, features_width),
        "norm_key.weight": (width,),
        "norm_query.weight": (width,),
        "norm_conv.weight": (width,),
        "conv1d.weight": (width, ngram.conv_kernel),
    }
    weights = random_weights({f"blk.{ngram.layer}.ple_{name}": shape for name, shape in shapes.items()})
    torch_part = NgramEmbedding(TensorDevice(weights), config, ngram)
    native = NativeNgramEmbedding(ArrayWeights(weights), config, ngram)
    want_states, got_states = (new_states(config) for _ in range(2))
    scale = {"zeros": 0.0, "large": 1e4}.get(inputs, 1.0)
    for number, lengths in enumerate(STEPS):
        num_tokens = sum(lengths)
        streams = random_values(num_tokens, config.num_streams, config.hidden, seed=number) * scale
        features = random_values(num_tokens, features_width, seed=10 + number) * scale
        streams[4, 1] = 0
        expected = torch_part(streams, features, spans_of(lengths, want_states)[1])
        runner = Runner(team, num_tokens)
        native.build(runner.workspace, runner.spans)
        sizes = runner.begin(spans_of(lengths, got_states)[0], num_tokens)
        runner.workspace.floats("streams", width)[:] = streams.flatten(1).numpy()
        native.begin()
        native.features[:num_tokens] = features.numpy()
        runner.run(native.emit, sizes)
        assert_close(runner.workspace.floats("streams", width), expected)
        for got, want in zip(got_states, want_states, strict=True):
            length = lengths[got_states.index(got)]
            got.advance(length)
            want.advance(length)
            assert got.ngram_inputs is not None
            assert want.ngram_inputs is not None
            assert_same_pending(got.ngram_inputs, want.ngram_inputs, want.num_pending + ngram.history_length)
            for state in (got, want):
                state.roll_back(state.position - min(state.num_pending, number))
