"""The routed experts of a layer against float64, and whatever must not change their result."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpu_worker import expert_layer
from cpu_worker.expert_layer import ExpertLayer, group_by_expert, silu
from cpu_worker.worker import ExpertService
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.task_pool import TaskPool
from shared.work_slots import ExpertHeader, expert_ring
from tests.support.tiny_model import EXPERT_WIDTH, HIDDEN, NUM_EXPERTS, tiny_model

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


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GGUFModel, Matrices]]:
    """A model whose first layer has known experts."""
    rng = np.random.default_rng(1)
    described, matrices = tiny_model(), {}
    for name, shape in SHAPES.items():
        values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        tensor = described.tensors[f"blk.0.ffn_{name}_exps.weight"]
        tensor.type_name = request.param
        tensor.data, matrices[name] = stored(values, request.param)
    with GGUFModel(described.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as opened:
        yield opened, matrices


def routes(num_tokens: int, seed: int = 0, num_routes: int = 2) -> tuple[Floats, NDArray[np.int32], Floats]:
    """Activations, experts (each at most once a token), weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :num_routes].astype(np.int32)
    return x, ids, rng.random((num_tokens, num_routes)).astype(np.float32)


def in_float64(x: Floats, ids: NDArray[np.int32], weights: Floats, matrices: Matrices) -> NDArray[np.float64]:
    """The rule, route by route."""
    out = np.zeros(x.shape)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        for expert, weight in zip(chosen, shares, strict=True):
            if expert >= 0:
                gate, up = (matrices[name][expert] @ x[token].astype(np.float64) for name in ("gate", "up"))
                out[token] += weight * (matrices["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def compute(
    layer: ExpertLayer, x: Floats, ids: NDArray[np.int32], weights: Floats, threads: int = 1
) -> Floats:
    out = np.full_like(x, np.nan)
    pool = TaskPool(threads)
    layer.compute(x, ids, weights, out, pool)
    pool.close()
    return out


# Up to 24 tokens of one expert take another way through the kernels than more of them.
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 30, 200])
def test_against_float64(model: tuple[GGUFModel, Matrices], num_tokens: int) -> None:
    """Grouping, gathering and summing put every product where it belongs."""
    opened, matrices = model
    x, ids, weights = routes(num_tokens)
    expected = in_float64(x, ids, weights, matrices)
    assert compute(ExpertLayer(opened, 0), x, ids, weights) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_all_tokens_choose_one_expert(model: tuple[GGUFModel, Matrices]) -> None:
    """The largest group there can be; and one route a token."""
    opened, matrices = model
    x, ids, weights = routes(100, num_routes=1)
    ids[:] = 5
    expected = in_float64(x, ids, weights, matrices)
    assert compute(ExpertLayer(opened, 0), x, ids, weights) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_routes_of_others(model: tuple[GGUFModel, Matrices]) -> None:
    """Routes marked -1 add nothing, whatever their weight; a token that has no other gets zeros, not what was
    in the slot before."""
    opened, matrices = model
    x, ids, weights = routes(9)
    ids[2] = -1
    ids[3, 0] = ids[4, 1] = -1
    out = compute(ExpertLayer(opened, 0), x, ids, weights)
    assert out == pytest.approx(in_float64(x, ids, weights, matrices), rel=1e-4, abs=1e-5)
    assert not out[2].any()
    ids[:] = -1
    assert not compute(ExpertLayer(opened, 0), x, ids, weights).any()


@pytest.mark.parametrize("num_tokens", [1, 5, 60])
def test_threads_do_not_change_a_bit(
    model: tuple[GGUFModel, Matrices], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits for any number of threads and any order in which they finish: answers are repeatable."""
    monkeypatch.setattr(expert_layer, "_MIN_WORK_TO_SHARE", 0)
    layer = ExpertLayer(model[0], 0)
    x, ids, weights = routes(num_tokens, num_routes=4)
    alone = compute(layer, x, ids, weights)
    for threads in (2, 3, 8):
        assert compute(layer, x, ids, weights, threads).tobytes() == alone.tobytes()


def test_number_of_groups(model: tuple[GGUFModel, Matrices]) -> None:
    """What is counted is experts that were read, not routes."""
    layer, pool = ExpertLayer(model[0], 0), TaskPool(1)
    x, _, weights = routes(3)
    out = np.empty_like(x)
    for ids, num_groups in (
        ([[1, 2], [2, 1], [1, -1]], 2),
        ([[-1, -1]] * 3, 0),
        ([[0, 7], [1, 2], [3, 4]], 6),
    ):
        assert layer.compute(x, np.array(ids, np.int32), weights, out, pool) == num_groups


def test_no_tokens(model: tuple[GGUFModel, Matrices]) -> None:
    """An empty step is no error."""
    x, ids, weights = routes(0)
    assert compute(ExpertLayer(model[0], 0), x, ids, weights).shape == (0, HIDDEN)


def test_unknown_expert(model: tuple[GGUFModel, Matrices]) -> None:
    """An id beyond the last expert is refused before it reads someone else's memory."""
    x, ids, weights = routes(3)
    ids[1, 0] = NUM_EXPERTS
    with pytest.raises(ValueError, match="expert 8 of 8"):
        compute(ExpertLayer(model[0], 0), x, ids, weights)


@settings(deadline=None, print_blob=True)
@given(st.lists(st.lists(st.integers(-2, 9), min_size=3, max_size=3), max_size=20))
def test_groups(ids: list[list[int]]) -> None:
    """Every route that is ours is in exactly one group, that of its expert, and points at its token."""
    expert_ids = np.array(ids, np.int32).reshape(-1, 3)
    ours = {route: expert for route, expert in enumerate(expert_ids.reshape(-1).tolist()) if expert >= 0}
    groups = list(group_by_expert(expert_ids))
    assert [group.expert for group in groups] == sorted(set(ours.values()))
    assert sum(len(group.routes) for group in groups) == len(ours)
    found = {}
    for group in groups:
        assert (group.routes // 3 == group.tokens).all()
        found |= dict.fromkeys(group.routes.tolist(), group.expert)
    assert found == ours


def test_silu() -> None:
    """Exact enough everywhere, and without a warning where the plain formula overflows."""
    x = np.array([-1e30, -1000, -88, -1, -1e-30, 0, 1e-30, 1, 88, 1000, 1e30], np.float32)
    with np.errstate(all="raise", under="ignore"):
        values = silu(x)
    exact = np.array([0 if value < -700 else value / (1 + np.exp(-value)) for value in x.astype(np.float64)])
    assert values == pytest.approx(exact, rel=1e-6, abs=1e-35)


def test_service(model: tuple[GGUFModel, Matrices], tmp_path: Path) -> None:
    """A slot of the ring: the layer and the number of tokens from its header, the time back; what lies behind
    the tokens of the step, from a larger one before, is neither read nor changed."""
    opened, matrices = model
    shape = expert_ring(read_model_config(opened), 6)
    slot = {name: np.zeros(extents, dtype) for name, (dtype, extents) in shape.arrays.items()}
    x, ids, weights = routes(4)
    slot["activations"][:4], slot["expert_ids"][:4], slot["expert_weights"][:4] = x, ids, weights
    slot["expert_ids"][4:] = 999
    slot["outputs"][:] = 7
    slot["header"][ExpertHeader.LAYER], slot["header"][ExpertHeader.NUM_TOKENS] = 1, 4
    service = ExpertService([ExpertLayer(opened, 2), ExpertLayer(opened, 0)], TaskPool(1))
    service(slot)
    assert slot["outputs"][:4] == pytest.approx(in_float64(x, ids, weights, matrices), rel=1e-4, abs=1e-5)
    assert (slot["outputs"][4:] == 7).all()
    assert slot["header"][ExpertHeader.COMPUTE_NS] > 0
