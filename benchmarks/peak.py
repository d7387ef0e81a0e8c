"""What one core multiplies at most: the instruction that sums up products, again and again, in registers."""

import time
from functools import partial

import numpy as np
from llvmlite import ir

from benchmarks.report import median
from shared.native.records import Record
from shared.native.task import aligned_zeros
from shared.quants.products import run_task
from shared.quants.simd.instruction_set import Target
from shared.quants.simd.machine_code import Module, compile_function
from shared.quants.simd.multiply import begin_function, declare_task
from shared.quants.simd.registers import Dots
from shared.quants.simd.vector import I8, I16, I32, Variable

_NAME = "peak"
_OUT = np.dtype([("total", np.int64)])
# More than any instruction has cycles to wait for, and few enough for 16 registers.
_NUM_SUMS = 12
_NUM_STEPS = 200_000
_NUM_TURNS = 7


def peak_mac_per_s(target: Target) -> float:
    """Multiply-adds in a second, on the CPU this runs on: the median of a few turns."""
    task = compile_function(_NAME, target, Module(_NAME, partial(_write, target=target)))
    out: Record = aligned_zeros(64).view(_OUT)
    lanes = target.instructions.lanes32 * (2 if target.activation_bytes == 2 else 4)
    speeds = []
    for _ in range(_NUM_TURNS):
        began = time.process_time()
        run_task(task, out, 0, _NUM_STEPS)
        speeds.append(_NUM_STEPS * _NUM_SUMS * lanes / (time.process_time() - began))
    return median(speeds)


def _write(module: ir.Module, target: Target) -> None:
    code, (out, start, stop, scratch) = begin_function(declare_task(module, _NAME), target)
    lanes32 = target.instructions.lanes32
    dots = Dots(code, lanes32)
    kind, lanes = (I16, 2 * lanes32) if target.activation_bytes == 2 else (I8, 4 * lanes32)
    # Read from memory, or the compiler would know what comes out.
    left, right = code.load(kind, lanes, scratch), code.load(kind, lanes, scratch + 64)
    add = dots.add_words if target.activation_bytes == 2 else dots.add
    sums = [Variable(code, code.load(I32, lanes32, scratch + 64 * number)) for number in range(_NUM_SUMS)]
    with code.loop(start, stop):
        for total in sums:
            total.set(add(total.get(), left, right))
    whole = sums[0].get()
    for total in sums[1:]:
        whole = whole + total.get()
    code.store(whole.total(), out, align=4)
    code.builder.ret_void()
