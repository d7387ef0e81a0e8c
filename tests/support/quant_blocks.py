"""Random blocks of every quantised format, and their values by an implementation that is not ours."""

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from shared.gguf.types import tensor_type_named

# Where a block's half-precision numbers lie. IQ1_M scatters its own, see `set_scale`; F32 and BF16 have none.
_HALF_OFFSETS = {
    **dict.fromkeys(("F16", "Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def set_scale(name: str, blocks: NDArray[np.uint8], scale: NDArray[np.float32]) -> None:
    """Writes `scale` [num_blocks] as the scale, and the minimum where there is one, of `blocks`
    [num_blocks, block_bytes]."""
    if name == "IQ1_M":
        bits = scale.astype(np.float16).view(np.uint16)
        for k in range(4):
            blocks[:, 49 + 2 * k] = blocks[:, 49 + 2 * k] & 0x0F | (bits >> (4 * k) & 15) << 4
    elif name in ("F32", "BF16"):
        width = tensor_type_named(name).block_bytes
        blocks[:] = scale.astype(np.float32).view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    else:
        half = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
        for offset in _HALF_OFFSETS[name]:
            blocks[:, offset : offset + 2] = half


def random_rows(name: str, num_rows: int, width: int, seed: int) -> NDArray[np.uint8]:
    """[num_rows, row_bytes]: random codes, scales of both signs between 0.01 and 0.1 in magnitude."""
    kind = tensor_type_named(name)
    rng = np.random.default_rng(seed)
    num_blocks = num_rows * width // kind.block_size
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), dtype=np.uint8)
    scale = rng.uniform(0.01, 0.1, num_blocks) * rng.choice([-1.0, 1.0], num_blocks)
    set_scale(name, blocks, scale.astype(np.float32))
    return blocks.reshape(num_rows, kind.row_bytes(width))


def dequantize(name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[num_rows, width], by the `gguf` package; by a formula for the two types it does not decode."""
    if name in ("Q1_0", "Q2_0"):
        blocks = rows.reshape(-1, 18)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        if name == "Q1_0":
            levels = 2 * np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) - 1
        else:
            codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3
            levels = codes.reshape(len(blocks), 64).astype(np.float32) - 1
        with np.errstate(all="ignore"):
            return (levels * scale).reshape(len(rows), -1)
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType[name])
        return values
