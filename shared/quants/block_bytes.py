"""Reads and writes inside compiled code: a block's bytes and scales, and the decoded values.

Plain indexing (`raw[at]`) would be right too, and slow (measured on Q8_0: 1.2 instead of 0.13 ns a weight):
numba adds a test for negative indices to each access, and LLVM must assume that a store into `out` may change
`raw`, so that it vectorises nothing. These loads skip the test and are marked invariant: **while a kernel
runs, `raw` does not change and does not overlap what the kernel writes.** They check no bounds;
`shared.quants` checks shapes before it calls a kernel. Byte order is little-endian, as GGUF and every CPU
numba compiles for here.

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


def _element_address(context: Any, builder: Any, array_type: Any, args: Any) -> Any:
    """Of element args[1] of the array args[0]."""
    array = context.make_array(array_type)(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


def _unsigned_load(num_bits: int) -> Callable[[Bytes, int], int]:
    """A function `(raw, at)` that reads `num_bits` at byte `at`, whatever the alignment, as an int64."""

    def load(typing_context: Any, raw: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address = _element_address(context, builder, signature.args[0], args)
            loaded = builder.load(address, typ=ir.IntType(num_bits), align=1)
            loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
            return builder.zext(loaded, ir.IntType(64))

        return types.int64(raw, types.intp), generate

    return cast("Callable[[Bytes, int], int]", intrinsic(load))


byte_at = _unsigned_load(8)
uint16_at = _unsigned_load(16)
uint32_at = _unsigned_load(32)


def _store(typing_context: Any, out: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _element_address(context, builder, signature.args[0], args))
        return context.get_dummy_value()

    return types.void(out, types.intp, types.float32), generate


put = cast("Callable[[Floats, int, np.float32], None]", intrinsic(_store))
"""`put(out, at, value)`: out[at] = value."""


@jitable
def half_from_bits(bits: int) -> np.float32:
    """The value of the IEEE half-precision number with these 16 bits, exactly; any NaN stays a NaN.

    In integers, since numba's own conversion needs a CPU with F16C, and without multiplying subnormal
    float32 numbers, which some CPUs do slowly.
    """
    rest = bits & 0x7FFF
    if rest < 0x0400:  # subnormal
        value = np.float32(rest) * np.float32(2.0**-24)
    elif rest < 0x7C00:  # exponents are biased by 15 there and by 127 here
        value = np.uint32((rest << 13) + (112 << 23)).view(np.float32)
    else:  # infinite or NaN
        value = np.uint32((rest << 13) | 0x7F800000).view(np.float32)
    return -value if bits & 0x8000 else value


@jitable
def half_at(raw: Bytes, at: int) -> np.float32:
    """The half-precision number at byte `at`."""
    return half_from_bits(uint16_at(raw, at))
