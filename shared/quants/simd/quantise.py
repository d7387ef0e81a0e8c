"""The quantise task in vectors; `shared.quants.quantising` says what it computes."""

from functools import partial

from llvmlite import ir

from shared.quants.matrix import GROUP, HALF_GROUP, NUM_STEPS
from shared.quants.simd.instruction_set import Target
from shared.quants.simd.machine_code import Module, compile_function
from shared.quants.simd.multiply import begin_function, declare_task
from shared.quants.simd.vector import FLOAT, I8, I16, I32, I64, Code, Value

_LANES = 8
_NAME = "quantise_plane"


def compile_quantise(target: Target) -> int:
    """The address of the task, compiled or from the cache."""
    return compile_function(_NAME, target, Module(_NAME, partial(_write, target=target)))


def _write(module: ir.Module, target: Target) -> None:
    code, (plane, start, stop, _) = begin_function(declare_task(module, _NAME), target)
    floats, codes, scales, sums, width = (
        code.load(I64, 0, plane + 8 * number, align=8, constant=True) for number in range(5)
    )
    num_steps = NUM_STEPS[target.activation_bytes]
    with code.loop(start, stop) as group:
        first = group * GROUP
        x = [code.load(FLOAT, _LANES, floats + (first + at) * 4) for at in range(0, GROUP, _LANES)]
        largest = _largest_magnitude(code, x)
        is_zero = code.value(code.builder.fcmp_ordered("==", largest.ir, code.like(largest, 0.0).ir))
        inverse = code.value(code.builder.fdiv(code.like(largest, float(num_steps)).ir, largest.ir))
        inverse = code.choose(is_zero, code.like(largest, 0.0), inverse).broadcast(_LANES)
        scale = largest * (1 / num_steps)
        code.store(scale, scales + group * 4, align=4)
        rounded = [
            code.intrinsic("llvm.x86.avx.cvt.ps2dq.256", ir.VectorType(I32, _LANES), part * inverse)
            for part in x
        ]
        for half in range(2):
            low, high = rounded[2 * half], rounded[2 * half + 1]
            total = (low + high).total().to_float() * scale
            code.store(total, sums + (group * 2 + half) * 4, align=4)
            both, first_code = low.joined(high), first + HALF_GROUP * half
            if target.activation_bytes == 2:
                code.store(both.truncated(I16), codes + first_code * 2)
            else:
                # Every earlier token left as many bytes unused as it has values (CODE_STRIDE).
                unused = code.divided(first, width) * width
                code.store(both.truncated(I8) ^ -128, codes + first_code + unused)
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
