"""What a token's products are, to the bit, in the company of others: up to a window's length they do not show
it, by every kernel of every format, and with deterministic kernels never."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_worker.expert_layer import ExpertLayer
from shared.gguf.model import GGUFModel
from shared.gguf.types import tensor_type_named
from shared.native.team import Team
from shared.quants import SUPPORTED, ActivationPlane, block_format, multiply_task, quantise_task, uses_codes
from shared.quants.matrix import MAX_WIDTH
from shared.quants.products import run_multiply, run_task
from shared.quants.simd.instruction_set import ALL, AVXVNNI, supported
from shared.window import WINDOW_TOKENS
from tests.support.kernels import using_kernels
from tests.support.quant_blocks import random_rows
from tests.support.tiny_model import EXPERT_WIDTH, HIDDEN, NUM_EXPERTS, tiny_model

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

# Not a multiple of a round of blocks of any size, so that fewer blocks are taken last.
WIDTH = 1792
NUM_ROWS = 37
WINDOWS = range(2, WINDOW_TOKENS + 1)
BATCHES = (3, 8, 9, 17, 40, 100)

Floats = NDArray[np.float32]

# AVX-VNNI has no arithmetic of its own, and compiling takes most of the time here.
KERNELS = [(it.name, activations) for it in ALL if it is not AVXVNNI for activations in ("int16", "int8")]
every_kernel = pytest.mark.parametrize("kernels", [*KERNELS, ("portable", "int16")], ids="-".join)


@contextmanager
def computing_with(kernels: tuple[str, str], *, deterministic: bool) -> Iterator[None]:
    name, activations = kernels
    if name != "portable" and name not in [instructions.name for instructions in supported()]:
        pytest.skip(f"this CPU has not all instructions of {name}")
    with using_kernels(name, activations, deterministic=deterministic):
        yield


def products(type_name: str, raw: NDArray[np.uint8], x: Floats) -> NDArray[np.uint32]:
    """As bits."""
    fmt = block_format(tensor_type_named(type_name).type_id)
    out = np.full((len(x), len(raw)), np.nan, np.float32)
    plane = ActivationPlane(x)
    if uses_codes(fmt):
        run_task(quantise_task(), plane.record, 0, plane.scales.size)
    # Two ranges, so that rows are not always in the same company either.
    run_multiply(multiply_task(fmt), raw, plane, out, 0, 18)
    run_multiply(multiply_task(fmt), raw, plane, out, 18, len(raw))
    assert np.isfinite(out).all()
    return out.view(np.uint32)


def activations(num_tokens: int, width: int) -> Floats:
    return np.random.default_rng(7).standard_normal((num_tokens, width)).astype(np.float32)


def alone(type_name: str, raw: NDArray[np.uint8], x: Floats) -> NDArray[np.uint32]:
    return np.concatenate([products(type_name, raw, x[token : token + 1]) for token in range(len(x))])


@every_kernel
@pytest.mark.parametrize("name", SUPPORTED)
def test_windows(name: str, kernels: tuple[str, str]) -> None:
    """A token of a window has the bits it has alone."""
    raw, x = random_rows(name, NUM_ROWS, WIDTH, seed=1), activations(WINDOW_TOKENS, WIDTH)
    with computing_with(kernels, deterministic=False):
        expected = alone(name, raw, x)
        for num_tokens in WINDOWS:
            np.testing.assert_array_equal(products(name, raw, x[:num_tokens]), expected[:num_tokens])
        # Its place does not matter either.
        np.testing.assert_array_equal(products(name, raw, x[3:]), expected[3:])


@every_kernel
@pytest.mark.parametrize("name", SUPPORTED)
def test_deterministic_batches(name: str, kernels: tuple[str, str]) -> None:
    """However many tokens there are; and what windows are without the switch they are with it."""
    raw, x = random_rows(name, NUM_ROWS, WIDTH, seed=2), activations(max(BATCHES), WIDTH)
    with computing_with(kernels, deterministic=False):
        window = products(name, raw, x[:WINDOW_TOKENS])
    with computing_with(kernels, deterministic=True):
        expected = alone(name, raw, x)
        np.testing.assert_array_equal(window, expected[:WINDOW_TOKENS])
        for num_tokens in BATCHES:
            np.testing.assert_array_equal(products(name, raw, x[:num_tokens]), expected[:num_tokens])


@every_kernel
@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_widest_rows(name: str, kernels: tuple[str, str]) -> None:
    """The scratch memory has room for the inputs of some of the tokens only."""
    raw, x = random_rows(name, NUM_ROWS, MAX_WIDTH, seed=3), activations(27, MAX_WIDTH)
    with computing_with(kernels, deterministic=True):
        np.testing.assert_array_equal(products(name, raw, x), alone(name, raw, x))


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_experts(type_name: str, tmp_path: Path) -> None:
    """A token among forty others, most of which chose its experts too."""
    described = tiny_model()
    for name, num_rows, width in (
        ("gate", EXPERT_WIDTH, HIDDEN),
        ("up", EXPERT_WIDTH, HIDDEN),
        ("down", HIDDEN, EXPERT_WIDTH),
    ):
        tensor = described.tensors[f"blk.0.ffn_{name}_exps.weight"]
        tensor.type_name = type_name
        tensor.data = random_rows(type_name, NUM_EXPERTS * num_rows, width, seed=num_rows).tobytes()
    rng = np.random.default_rng(4)
    x = rng.normal(0, 0.1, (41, HIDDEN)).astype(np.float32)
    ids = np.tile(np.int32([1, 0]), (41, 1))
    ids[::5, 1] = NUM_EXPERTS - 1
    weights = rng.random(ids.shape).astype(np.float32)
    path = described.write(tmp_path / "tiny.gguf")
    together, single = np.empty_like(x), np.empty_like(x)
    with GGUFModel(path) as opened, using_kernels("auto", deterministic=True):
        compute_experts(opened, x, ids, weights, together)
        for token in range(len(x)):
            one = slice(token, token + 1)
            compute_experts(opened, x[one], ids[one], weights[one], single[one])
    assert np.isfinite(together).all()
    np.testing.assert_array_equal(together.view(np.uint32), single.view(np.uint32))


def compute_experts(
    model: GGUFModel, x: Floats, ids: NDArray[np.int32], weights: Floats, out: Floats
) -> None:
    team = Team(2)
    try:
        ExpertLayer(model, 0).compute(x, ids, weights, out, team)
    finally:
        team.close()
