"""Loads and stores that LLVM may reorder: each region is memory that no other region overlaps.

LLVM vectorises a loop only when no store can change what a later load reads. It tests that at run time, but
for a few pointers at most; what a loop over many rows needs has to be said (LLVM Language Reference,
"noalias and alias.scope Metadata"; the delta net's recurrence is ten times as fast for it). What is said must
be true: **while a loop runs, what is accessed through one region is accessed through no other.**

Callable from compiled code only.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import types

from shared.native.arithmetic import Pointer
from shared.native.memory import native

_NUM_REGIONS = 8

Get = Callable[[Pointer, int], Any]
Put = Callable[[Pointer, int, np.float32], None]


def _mark(builder: Any, instruction: Any, region: int) -> None:
    module = builder.module
    domain = module.add_metadata(["strata"])
    scopes = [module.add_metadata([f"strata region {number}", domain]) for number in range(_NUM_REGIONS)]
    others = [scope for number, scope in enumerate(scopes) if number != region]
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[region]]))
    instruction.set_metadata("noalias", module.add_metadata(others))


def region(number: int) -> tuple[Get, Put]:
    """`get(pointer, i)` of any elements and `put(pointer, i, value)` of float32 in the region of that number;
    to be kept in globals of a module."""

    def get(typing_context: Any, pointer: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = builder.load(builder.gep(args[0], [args[1]]))
            _mark(builder, loaded, number)
            return loaded

        return pointer.dtype(pointer, types.int64), generate

    def put(typing_context: Any, pointer: Any, at: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _mark(builder, builder.store(args[2], builder.gep(args[0], [args[1]])), number)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, types.float32), generate

    return cast("Get", native(get)), cast("Put", native(put))
