"""A block format: what ggml calls the type, and how one block of it decodes."""

import functools
from dataclasses import dataclass

from shared.gguf.types import TensorType
from shared.quants.choice import kernel_target, takes_rows_only
from shared.quants.kernels import (
    Decode,
    DecodeBlock,
    compile_decode,
    compile_gather,
    compile_portable_multiply,
)
from shared.quants.simd.multiply import compile_multiply
from shared.quants.simd.ways import FloatWays, QuantisedWays


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """One format that Strata computes with.

    `decode_block(raw, at, out, start)` decodes the block at byte `at` of `raw` (uint8, one-dimensional) into
    `out[start : start + block_size]` (float32). It runs in compiled code only (`shared.quants.jit.jitable`),
    and must be a module-level function: numba recognises a kernel in its cache by the function it calls.

    `ways` is how kernels made for this CPU multiply it; see `shared.quants.simd.multiply`.
    """

    type: TensorType
    decode_block: DecodeBlock
    ways: QuantisedWays | FloatWays

    @functools.cached_property
    def decode(self) -> Decode:
        """Decodes rows to float32, exactly; the first access compiles it, or loads it from the cache."""
        return compile_decode(self.type, self.decode_block)

    @functools.cached_property
    def multiply_task(self) -> int:
        """The address of the task that multiplies rows of this format, made for this CPU where it can be;
        the first access compiles it, or loads it from the cache."""
        target = kernel_target()
        if target is None:
            return compile_portable_multiply(self.type, self.decode_block)
        return compile_multiply(self.type, self.ways, target, is_row_wise=takes_rows_only())

    @functools.cached_property
    def gather_task(self) -> int:
        """The address of the task that decodes single rows; the first access compiles it, or loads it from
        the cache."""
        return compile_gather(self.type, self.decode_block)

    @property
    def activation_bytes(self) -> int:
        """To how many bytes the activations are rounded that `multiply_task` reads; 0 where it reads them as
        floats."""
        target = kernel_target()
        return target.activation_bytes if target is not None and isinstance(self.ways, QuantisedWays) else 0
