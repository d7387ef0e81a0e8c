"""Every block format decodes by torch operations to exactly what `shared.quants` makes of the same bytes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.device.torch_decode import decode_blocks
from shared.gguf.types import tensor_type_named
from shared.quants import SUPPORTED, block_format, decode_rows
from tests.support.quant_blocks import random_rows, set_scale

HALF = np.finfo(np.float16)
EXTREME_SCALES = np.array(
    [0.0, -0.0, HALF.max, HALF.min, HALF.tiny, HALF.smallest_subnormal, np.inf, -np.inf, np.nan], np.float32
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


def assert_decodes(name: str, blocks: NDArray[np.uint8], device: str) -> None:
    """Bit for bit, signs of zeros included; any NaN will do for a NaN."""
    fmt = block_format(tensor_type_named(name).type_id)
    want = decode_rows(fmt, blocks)
    got = decode_blocks(fmt, torch.from_numpy(blocks).to(device)).cpu().numpy()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


def blocks_of(rows: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    return rows.reshape(-1, tensor_type_named(name).block_bytes)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("device", DEVICES)
def test_random_blocks(name: str, device: str) -> None:
    """Guards against a wrong bit anywhere in a layout: all codes, table entries and sub-scales occur."""
    assert_decodes(name, blocks_of(random_rows(name, num_rows=33, width=4096, seed=1), name), device)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("device", DEVICES)
def test_bytes_of_any_kind(name: str, device: str) -> None:
    """Scales are random bits too, so NaN, infinite and subnormal ones occur."""
    kind = tensor_type_named(name)
    blocks = np.random.default_rng(2).integers(0, 256, (256, kind.block_bytes), dtype=np.uint8)
    assert_decodes(name, blocks, device)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("filling", [0x00, 0xFF])
@pytest.mark.parametrize("device", DEVICES)
def test_extreme_blocks(name: str, filling: int, device: str) -> None:
    """The smallest and the largest code with the scales at the edges of half precision."""
    blocks = np.full((len(EXTREME_SCALES), tensor_type_named(name).block_bytes), filling, np.uint8)
    set_scale(name, blocks, EXTREME_SCALES)
    assert_decodes(name, blocks, device)


@pytest.mark.parametrize("name", SUPPORTED)
def test_blocks_anywhere_in_memory(name: str) -> None:
    """One block, none, and blocks that begin at an odd byte: slots have whatever the file has."""
    kind = tensor_type_named(name)
    blocks = blocks_of(random_rows(name, num_rows=1, width=1024, seed=3), name)
    fmt = block_format(kind.type_id)
    memory = torch.zeros(blocks.size + 1, dtype=torch.uint8)
    memory[1:] = torch.from_numpy(blocks.reshape(-1))
    moved = memory[1:].view(-1, kind.block_bytes)
    assert decode_blocks(fmt, moved).numpy().tobytes() == decode_rows(fmt, blocks).tobytes()
    assert decode_blocks(fmt, moved[:1]).numpy().tobytes() == decode_rows(fmt, blocks[:1]).tobytes()
    assert decode_blocks(fmt, moved[:0]).shape == (0, kind.block_size)


def test_other_shapes_are_refused() -> None:
    """A row of several blocks is not a block."""
    fmt = block_format(tensor_type_named("Q8_0").type_id)
    for blocks in (torch.zeros((2, 68), dtype=torch.uint8), torch.zeros((2, 34), dtype=torch.int8)):
        with pytest.raises(ValueError, match=r"Q8_0 blocks must be uint8 \[num_blocks, 34\]"):
            decode_blocks(fmt, blocks)
