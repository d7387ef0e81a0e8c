"""The quantise task in vectors; `shared.quants.quantising` says what it computes."""

from functools import partial

from llvmlite import ir

from shared.quants.matrix import GROUP
from shared.quants.simd.instruction_set import InstructionSet
from shared.quants.simd.machine_code import Module, compile_function
from shared.quants.simd.multiply import begin_function, declare_task
from shared.quants.simd.vector import FLOAT, I8, I32, I64, Code, Value

_LANES = 8
_NAME = "quantise_plane"


def compile_quantise(instructions: InstructionSet) -> int:
    """The address of the task, compiled or from the cache."""
    return compile_function(_NAME, instructions, Module(_NAME, partial(_write, instructions=instructions)))


def _write(module: ir.Module, instructions: InstructionSet) -> None:
    code, (plane, start, stop, _) = begin_function(declare_task(module, _NAME), instructions)
    floats, codes, scales, sums = (
        code.load(I64, 0, plane + 8 * number, align=8, constant=True) for number in range(4)
    )
    with code.loop(start, stop) as group:
        first = group * GROUP
        x = [code.load(FLOAT, _LANES, floats + (first + at) * 4) for at in range(0, GROUP, _LANES)]
        largest = _largest_magnitude(code, x)
        is_zero = code.value(code.builder.fcmp_ordered("==", largest.ir, code.like(largest, 0.0).ir))
        inverse = code.value(code.builder.fdiv(code.like(largest, 127.0).ir, largest.ir))
        inverse = code.choose(is_zero, code.like(largest, 0.0), inverse).broadcast(_LANES)
        scale = largest * (1 / 127)
        code.store(scale, scales + group * 4, align=4)
        rounded = [
            code.intrinsic("llvm.x86.avx.cvt.ps2dq.256", ir.VectorType(I32, _LANES), part * inverse)
            for part in x
        ]
        for half in range(2):
            low, high = rounded[2 * half], rounded[2 * half + 1]
            total = (low + high).total().to_float() * scale
            code.store(total, sums + (group * 2 + half) * 4, align=4)
            biased = low.joined(high).truncated(I8) ^ -128
            code.store(biased, codes + first + 16 * half)
    code.builder.ret_void()


def _largest_magnitude(code: Code, x: list[Value]) -> Value:
    """Compared by their bits, in which order infinity is above every number and NaN above infinity."""
    magnitudes = [part.as_type(I32, _LANES) & 0x7FFFFFFF for part in x]
    value = code.larger(code.larger(magnitudes[0], magnitudes[1]), code.larger(magnitudes[2], magnitudes[3]))
    lanes = _LANES
    while lanes > 1:
        lanes //= 2
        value = code.larger(value.shuffled(range(lanes)), value.shuffled(range(lanes, 2 * lanes)))
    return value.lane(0).as_type(FLOAT, 0)
