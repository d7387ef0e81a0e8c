"""A block format: what ggml calls the type, and how one block of it decodes."""

import functools
from dataclasses import dataclass

from shared.gguf.types import TensorType
from shared.quants.kernels import DecodeBlock, Kernels, compile_kernels


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """One format that Strata computes with.

    `decode_block(raw, at, out, start)` decodes the block at byte `at` of `raw` (uint8, one-dimensional) into
    `out[start : start + block_size]` (float32). It runs in compiled code only (`shared.quants.jit.jitable`),
    and must be a module-level function: numba recognises a kernel in its cache by the function it calls.
    None where the bytes are the values already (F32).
    """

    type: TensorType
    decode_block: DecodeBlock | None

    @functools.cached_property
    def kernels(self) -> Kernels:
        """The compiled kernels; the first access compiles them, or loads them from the cache."""
        assert self.decode_block is not None, f"{self.type.name} is not decoded"
        return compile_kernels(self.type, self.decode_block)
