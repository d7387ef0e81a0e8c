"""Reads and writes inside compiled code: a block's bytes and scales, and the decoded values.

Plain indexing (`raw[at]`) would be right too, and four times slower: numba adds a test for negative indices
to each access, and has to assume that a store into `out` may change `raw`, so that LLVM can vectorise
nothing. These loads skip the test and are marked invariant: **while a kernel runs, `raw` does not change and
does not overlap what the kernel writes.** They check no bounds; `shared.quants` checks shapes before it
calls a kernel. Byte order is little-endian, as GGUF and every CPU numba compiles for here.

Callable from compiled code only.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from shared.quants.jit import jitable

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _unsigned_load(num_bits: int) -> Callable[[Bytes, int], int]:
    """A function `(raw, at)` that reads `num_bits` at byte `at`, whatever the alignment, as an int64."""

    def load(typing_context: Any, raw: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
            loaded = builder.load(address, typ=ir.IntType(num_bits), align=1)
            loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
            return builder.zext(loaded, ir.IntType(64))

        return types.int64(raw, types.intp), generate

    return cast(Callable[[Bytes, int], int], intrinsic(load))


byte_at = _unsigned_load(8)
uint16_at = _unsigned_load(16)
uint32_at = _unsigned_load(32)


def _store(typing_context: Any, out: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        builder.store(args[2], address)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.float32), generate


put = cast(Callable[[Floats, int, np.float32], None], intrinsic(_store))
"""`put(out, at, value)`: out[at] = value."""


@jitable
def half_from_bits(bits: int) -> np.float32:
    """The value of the IEEE half-precision number with these 16 bits, exactly; any NaN stays a NaN.

    In integers, since numba's own conversion needs a CPU with F16C, and without multiplying subnormal
    float32 numbers, which some CPUs do slowly.
    """
    exponent, shifted = bits & 0x7C00, (bits & 0x7FFF) << 13
    # Exponents are biased by 15 there and by 127 here; all ones stays all ones.
    rebias = 224 << 23 if exponent == 0x7C00 else 112 << 23
    normal = np.uint32(shifted + rebias).view(np.float32)
    subnormal = np.uint32(shifted + (113 << 23)).view(np.float32) - np.float32(2.0**-14)
    magnitude = subnormal if exponent == 0 else normal
    return -magnitude if bits & 0x8000 else magnitude


@jitable
def half_at(raw: Bytes, at: int) -> np.float32:
    """The half-precision number at byte `at`."""
    return half_from_bits(uint16_at(raw, at))
