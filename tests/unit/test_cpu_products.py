"""Products of several matrices in one go: the same bits as one by one, however they are shared out."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.device.products import Products
from shared import quants
from shared.gguf.types import tensor_type_named
from shared.native.team import Team
from shared.quants import BlockFormat

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

WIDTH = 512
NUM_ROWS = (1200, 7, 64, 33)
TYPES = ("Q8_0", "F32", "Q8_0", "Q8_0")

Matrices = list[tuple[NDArray[np.uint8], BlockFormat]]


@pytest.fixture(scope="module")
def matrices() -> Matrices:
    """Of two types, which read activations in different forms, and of sizes that tiles do not divide."""
    rng = np.random.default_rng(0)
    made = []
    for name, num_rows in zip(TYPES, NUM_ROWS, strict=True):
        if name == "F32":
            raw = rng.normal(size=(num_rows, WIDTH)).astype(np.float32).view(np.uint8)
        else:
            raw = rng.integers(0, 256, (num_rows, WIDTH // 32 * 34), np.uint8)
            raw.reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        made.append((raw, quants.block_format(tensor_type_named(name).type_id)))
    return made


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_as_one_by_one(matrices: Matrices, num_threads: int) -> None:
    """Few tokens and many, in turn on one team, whose memory grows meanwhile."""
    team, rng = Team(num_threads), np.random.default_rng(1)
    products = Products(matrices, team)
    for num_tokens in (1, 3, 200, 1, 9):
        x = rng.normal(size=(num_tokens, WIDTH)).astype(np.float32)
        results = products(torch.from_numpy(x))
        for result, (raw, block_format) in zip(results, matrices, strict=True):
            expected = np.empty((num_tokens, len(raw)), np.float32)
            quants.matmul(block_format, raw, x, expected)
            assert result.numpy().tobytes() == expected.tobytes()
    team.close()


def test_x_that_is_not_contiguous(matrices: Matrices) -> None:
    """Columns of a larger tensor, as torch hands them out."""
    products = Products(matrices, Team(1))
    wide = torch.randn(4, 3 * WIDTH)
    view = wide[:, WIDTH : 2 * WIDTH]
    for result, expected in zip(products(view), products(view.clone()), strict=True):
        assert torch.equal(result, expected)


def test_no_tokens(matrices: Matrices) -> None:
    """An empty step is no error."""
    results = Products(matrices, Team(1))(torch.empty(0, WIDTH))
    assert [tuple(result.shape) for result in results] == [(0, num_rows) for num_rows in NUM_ROWS]


def test_what_does_not_fit(matrices: Matrices) -> None:
    """Compiled code checks nothing, so these are refused before."""
    products = Products(matrices[:1], Team(1))
    for x in (torch.empty(2, WIDTH + 32), torch.empty(2, WIDTH, dtype=torch.float64)):
        with pytest.raises(ValueError, match="width 512"):
            products(x)
    raw, block_format = matrices[0]
    with pytest.raises(ValueError, match=r"\[256, 512\]"):
        Products([(raw, block_format), (np.ascontiguousarray(raw[:, : 8 * 34]), block_format)], Team(1))
