"""Random weights in the block formats of GGUF files, and their values by an implementation that is not ours.

Codes are uniformly random, so that look-up tables are read all over; the half-precision scales of a block
have one size and a random sign, which centres every format on zero, asymmetric ones too.
"""

from functools import cache

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from shared.gguf.types import tensor_type_named

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Byte offsets of a block's half-precision numbers, and their size for a scale of 1: minima lie in the middle
# of what the codes reach.
_HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    **dict.fromkeys(("Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), ((0, 1.0),)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), ((0, 1.0),)),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
}
RANDOM_TYPES = tuple(_HALVES)
"""The types there are random blocks of."""


def random_blocks(type_name: str, num_blocks: int, spread: float, rng: np.random.Generator) -> Bytes:
    """uint8 [num_blocks, block_bytes] whose values have about the standard deviation `spread`."""
    return _blocks(type_name, num_blocks, spread / _spread_at_scale_one(type_name), rng)


def decode(type_name: str, rows: Bytes) -> Floats:
    """The values of rows [num_rows, row_bytes], float32 [num_rows, width], by the `gguf` package; Q2_0, which
    its release on PyPI does not know, by its formula."""
    if type_name == "Q2_0":
        blocks = rows.reshape(-1, 18)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        codes = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        levels = codes.reshape(len(blocks), 64).astype(np.float32) - 1
        result: Floats = (levels * scale).reshape(len(rows), -1)
        return result
    values: Floats = quants.dequantize(rows, GGMLQuantizationType[type_name])
    return values


def _blocks(type_name: str, num_blocks: int, scale: float, rng: np.random.Generator) -> Bytes:
    block_bytes = tensor_type_named(type_name).block_bytes
    # A copy, since what `bytes` returns cannot be written.
    blocks = np.frombuffer(bytearray(rng.bytes(num_blocks * block_bytes)), np.uint8)
    blocks = blocks.reshape(num_blocks, block_bytes)
    is_negative = rng.integers(0, 2, num_blocks, dtype=np.uint8)
    for offset, size in _HALVES[type_name]:
        low, high = np.array([scale * size], np.float16).view(np.uint8)
        blocks[:, offset] = low
        # The sign is the top bit of the second byte.
        blocks[:, offset + 1] = high ^ is_negative << 7
    return blocks


@cache
def _spread_at_scale_one(type_name: str) -> float:
    return float(decode(type_name, _blocks(type_name, 512, 1.0, np.random.default_rng(0))).std())
