"""The routed experts of a layer against float64, and whatever must not change their result."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpu_worker.expert_layer import ExpertLayer, formats_of
from cpu_worker.expert_tasks import WAVE_ROUTES
from cpu_worker.worker import ExpertService
from shared import quants
from shared.gguf.model import GGUFModel
from shared.gguf.types import tensor_type_named
from shared.model_config import read_model_config
from shared.native.team import Team
from shared.quants.matrix import NUM_STEPS
from shared.work_slots import ExpertHeader, expert_ring
from tests.support.kernels import using_kernels
from tests.support.tiny_model import EXPERT_WIDTH, HIDDEN, NUM_EXPERTS, tiny_model

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

Floats = NDArray[np.float32]
Matrices = dict[str, NDArray[np.float64]]

SHAPES = {
    "gate": (NUM_EXPERTS, EXPERT_WIDTH, HIDDEN),
    "up": (NUM_EXPERTS, EXPERT_WIDTH, HIDDEN),
    "down": (NUM_EXPERTS, HIDDEN, EXPERT_WIDTH),
}


def stored(values: Floats, type_name: str) -> tuple[bytes, NDArray[np.float64]]:
    """The bytes of a matrix in a type, and the values they stand for."""
    if type_name == "F32":
        return values.tobytes(), values.astype(np.float64)
    # Q8_0: 32 weights, one f16 scale and 32 signed bytes.
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    raw = np.hstack([scales.view(np.uint8), codes.view(np.uint8)])
    return raw.tobytes(), (scales.astype(np.float64) * codes).reshape(values.shape)


@pytest.fixture(scope="module", params=[("F32", "int16"), ("Q8_0", "int16"), ("Q8_0", "int8")], ids="-".join)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GGUFModel, Matrices, str]]:
    """A model whose first layer has known experts, and their type."""
    type_name, activations = request.param
    rng = np.random.default_rng(1)
    described, matrices = tiny_model(), {}
    for name, shape in SHAPES.items():
        values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        tensor = described.tensors[f"blk.0.ffn_{name}_exps.weight"]
        tensor.type_name = type_name
        tensor.data, matrices[name] = stored(values, type_name)
    path = described.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with GGUFModel(path) as opened, using_kernels("auto", activations):
        yield opened, matrices, type_name


def routes(num_tokens: int, seed: int = 0, num_routes: int = 2) -> tuple[Floats, NDArray[np.int32], Floats]:
    """Activations, experts (each at most once a token), weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :num_routes].astype(np.int32)
    return x, ids, rng.random((num_tokens, num_routes)).astype(np.float32)


def activation_bytes(type_name: str) -> int:
    return quants.block_format(tensor_type_named(type_name).type_id).activation_bytes


def rounded(x: NDArray[np.float64], type_name: str) -> NDArray[np.float64]:
    """Activations as the kernels of that type read them."""
    num_bytes = activation_bytes(type_name)
    if num_bytes == 0:
        return x
    groups = x.reshape(-1, 32)
    scales = np.abs(groups).max(1, keepdims=True) / NUM_STEPS[num_bytes]
    return (np.rint(groups / np.where(scales > 0, scales, 1)) * scales).reshape(x.shape)


def in_float64(
    x: Floats, ids: NDArray[np.int32], weights: Floats, matrices: Matrices, type_name: str = "F32"
) -> NDArray[np.float64]:
    """The rule, route by route."""
    out = np.zeros(x.shape)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        read = rounded(x[token].astype(np.float64), type_name)
        for expert, weight in zip(chosen, shares, strict=True):
            if expert >= 0:
                gate, up = (matrices[name][expert] @ read for name in ("gate", "up"))
                h = rounded(gate / (1 + np.exp(-gate)) * up, type_name)
                out[token] += weight * (matrices["down"][expert] @ h)
    return out


def agrees(out: Floats, expected: NDArray[np.float64], type_name: str) -> bool:
    """Whether only the order of additions differs, and here and there a value was rounded the other way."""
    limit = {0: 1e-5, 1: 5e-3, 2: 2e-5}[activation_bytes(type_name)]
    return bool(np.abs(out - expected).max() <= limit * np.abs(expected).max() + 1e-12)


def compute(
    layer: ExpertLayer, x: Floats, ids: NDArray[np.int32], weights: Floats, threads: int = 1
) -> Floats:
    out = np.full_like(x, np.nan)
    team = Team(threads)
    layer.compute(x, ids, weights, out, team)
    team.close()
    return out


# More than eight tokens of one expert take another way through the kernels; 700 are more than one wave.
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 30, 700])
def test_against_float64(model: tuple[GGUFModel, Matrices, str], num_tokens: int) -> None:
    """Grouping, gathering and summing put every product where it belongs."""
    opened, matrices, type_name = model
    x, ids, weights = routes(num_tokens)
    expected = in_float64(x, ids, weights, matrices, type_name)
    assert agrees(compute(ExpertLayer(opened, 0), x, ids, weights), expected, type_name)


def test_all_tokens_choose_one_expert(model: tuple[GGUFModel, Matrices, str]) -> None:
    """A group that is larger than a wave; and one route a token."""
    opened, matrices, type_name = model
    x, ids, weights = routes(WAVE_ROUTES + 100, num_routes=1)
    ids[:] = 5
    expected = in_float64(x, ids, weights, matrices, type_name)
    assert agrees(compute(ExpertLayer(opened, 0), x, ids, weights), expected, type_name)


def test_routes_of_others(model: tuple[GGUFModel, Matrices, str]) -> None:
    """Routes marked -1 add nothing, whatever their weight; a token that has no other gets zeros, not what was
    in the slot before."""
    opened, matrices, type_name = model
    x, ids, weights = routes(9)
    ids[2] = -1
    ids[3, 0] = ids[4, 1] = -1
    out = compute(ExpertLayer(opened, 0), x, ids, weights)
    assert agrees(out, in_float64(x, ids, weights, matrices, type_name), type_name)
    assert not out[2].any()
    ids[:] = -1
    assert not compute(ExpertLayer(opened, 0), x, ids, weights).any()


@settings(deadline=None, print_blob=True)
@given(
    ids=st.lists(st.lists(st.integers(-2, NUM_EXPERTS - 1), min_size=3, max_size=3), min_size=1, max_size=40),
    data=st.data(),
)
def test_any_routes(layer_of_ones: ExpertLayer, ids: list[list[int]], data: st.DataObject) -> None:
    """Every route that is ours is computed once, with its own expert, token and weight; one expert may come
    twice. The experts of this layer only differ by a factor, and so show what was done."""
    expert_ids = np.array(ids, np.int32)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    x = np.repeat(rng.uniform(1, 2, (len(ids), 1)), HIDDEN, axis=1).astype(np.float32)
    weights = rng.random(expert_ids.shape).astype(np.float32)
    out = np.full_like(x, np.nan)
    team = Team(1)
    num_groups = layer_of_ones.compute(x, expert_ids, weights, out, team)
    assert num_groups == len(set(expert_ids[expert_ids >= 0].tolist()))
    gate = x[:, 0].astype(np.float64)
    h = gate / (1 + np.exp(-gate)) * gate
    factors = np.where(expert_ids >= 0, 1.0 + expert_ids, 0)
    expected = (weights * factors).sum(1) * h
    assert out == pytest.approx(np.repeat(expected[:, None], HIDDEN, axis=1), rel=1e-5)


@pytest.fixture(scope="module")
def layer_of_ones() -> ExpertLayer:
    """Gate and up are the mean of x, down repeats the mean of h, times 1 + the number of the expert."""
    values = {name: np.full(shape, 1 / shape[-1], np.float32) for name, shape in SHAPES.items()}
    values["down"] *= np.arange(1, NUM_EXPERTS + 1)[:, None, None]
    return ExpertLayer(in_memory({name: array.view(np.uint8) for name, array in values.items()}, "F32"), 0)


def in_memory(raw: dict[str, NDArray[np.uint8]], type_name: str) -> GGUFModel:
    """What a layer asks of a model, for experts that are in no file."""
    kind = SimpleNamespace(type=tensor_type_named(type_name))
    tensors = {f"blk.0.ffn_{name}_exps.weight": array for name, array in raw.items()}
    return cast("GGUFModel", SimpleNamespace(rows=tensors.__getitem__, info=lambda name: kind))


@pytest.fixture(scope="module")
def large_layer() -> ExpertLayer:
    """Experts that are worth sharing among threads even for one token."""
    rng = np.random.default_rng(3)
    hidden, width = 1024, 256
    raw = {}
    for name, rows, blocks in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        raw[name] = rng.integers(0, 256, (NUM_EXPERTS, rows, blocks // 32 * 34), np.uint8)
        raw[name].reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    return ExpertLayer(in_memory(raw, "Q8_0"), 0)


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_threads_do_not_change_a_bit(large_layer: ExpertLayer, num_tokens: int) -> None:
    """The same bits for any number of threads and any order in which they finish: answers are repeatable."""
    x, ids, weights = routes(num_tokens, num_routes=4)
    x = np.tile(x, 1024 // HIDDEN) * np.linspace(0.5, 1.5, 1024, dtype=np.float32)
    alone = compute(large_layer, x, ids, weights)
    assert np.isfinite(alone).all()
    for threads in (2, 3, 8):
        assert compute(large_layer, x, ids, weights, threads).tobytes() == alone.tobytes()


def test_steps_of_all_sizes_in_turn(model: tuple[GGUFModel, Matrices, str]) -> None:
    """The memory of a team serves larger and smaller steps one after the other."""
    layer, team = ExpertLayer(model[0], 0), Team(2)
    for num_tokens in (3, 40, 1, 600, 2, 600):
        x, ids, weights = routes(num_tokens)
        out = np.full_like(x, np.nan)
        layer.compute(x, ids, weights, out, team)
        assert out.tobytes() == compute(layer, x, ids, weights).tobytes()
    team.close()


def test_number_of_groups(model: tuple[GGUFModel, Matrices, str]) -> None:
    """What is counted is experts that were read, not routes."""
    layer, team = ExpertLayer(model[0], 0), Team(1)
    x, _, weights = routes(3)
    out = np.empty_like(x)
    for ids, num_groups in (
        ([[1, 2], [2, 1], [1, -1]], 2),
        ([[-1, -1]] * 3, 0),
        ([[0, 7], [1, 2], [3, 4]], 6),
    ):
        assert layer.compute(x, np.array(ids, np.int32), weights, out, team) == num_groups


def test_no_tokens(model: tuple[GGUFModel, Matrices, str]) -> None:
    """An empty step is no error."""
    x, ids, weights = routes(0)
    assert compute(ExpertLayer(model[0], 0), x, ids, weights).shape == (0, HIDDEN)


def test_unknown_expert(model: tuple[GGUFModel, Matrices, str]) -> None:
    """An id beyond the last expert is refused before it reads someone else's memory."""
    x, ids, weights = routes(3)
    ids[1, 0] = NUM_EXPERTS
    with pytest.raises(ValueError, match="expert 8 of 8"):
        compute(ExpertLayer(model[0], 0), x, ids, weights)


def test_arrays_of_other_shapes(model: tuple[GGUFModel, Matrices, str]) -> None:
    """They are refused too, since compiled code does not check what it writes to."""
    layer, team = ExpertLayer(model[0], 0), Team(1)
    x, ids, weights = routes(3)
    for arrays in (
        (x[:, :32].copy(), ids, weights, np.empty_like(x)),
        (x, ids, weights, np.empty((2, HIDDEN), np.float32)),
        (x, ids[:2], weights[:2], np.empty_like(x)),
        (x, ids, weights[:, :1].copy(), np.empty_like(x)),
    ):
        with pytest.raises(ValueError, match="for"):
            layer.compute(*arrays, team)


def test_formats(model: tuple[GGUFModel, Matrices, str]) -> None:
    """What has to be compiled for the experts of all layers, and nothing else."""
    opened, _, type_name = model
    assert {block_format.type.name for block_format in formats_of(opened, 1)} == {type_name}


def test_service(model: tuple[GGUFModel, Matrices, str], tmp_path: Path) -> None:
    """A slot of the ring: the layer and the number of tokens from its header, the time back; what lies behind
    the tokens of the step, from a larger one before, is neither read nor changed."""
    opened, matrices, type_name = model
    shape = expert_ring(read_model_config(opened), 6)
    slot = {name: np.zeros(extents, dtype) for name, (dtype, extents) in shape.arrays.items()}
    x, ids, weights = routes(4)
    slot["activations"][:4], slot["expert_ids"][:4], slot["expert_weights"][:4] = x, ids, weights
    slot["expert_ids"][4:] = 999
    slot["outputs"][:] = 7
    slot["header"][ExpertHeader.LAYER], slot["header"][ExpertHeader.NUM_TOKENS] = 1, 4
    service = ExpertService([ExpertLayer(opened, 2), ExpertLayer(opened, 0)], Team(1))
    service(slot)
    expected = in_float64(x, ids, weights, matrices, type_name)
    assert agrees(slot["outputs"][:4], expected, type_name)
    assert (slot["outputs"][4:] == 7).all()
    assert slot["header"][ExpertHeader.COMPUTE_NS] > 0
