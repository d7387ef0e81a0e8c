"""Memory at an address, inside compiled code: loads, stores, atomic operations, and what threads wait with.

Everything here is callable from compiled code only (`shared.quants.jit`: `compile_kernel`, `compile_task`,
`jitable`), and checks nothing. A task usually makes arrays of its addresses first::

    from shared.native.memory import floats_at, carray, load

    def scale_rows(params: int, start: int, stop: int, scratch: int) -> None:
        width = load(params + 8)  # the second field of a record of int64 fields
        rows = carray(floats_at(load(params)), (stop, width))
        for row in range(start, stop):
            for i in range(width):
                rows[row, i] *= np.float32(2)

The functions are module globals and must stay so: numba recognises a compiled function in its cache by the
globals it uses, while one that an enclosing function made would look new in every process.

Atomic operations are sequentially consistent; `load_shared` acquires and `store_shared` releases.
"""

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import binding, ir
from numba.core import cgutils as _cgutils
from numba.core import types as _types
from numba.extending import intrinsic

# numba has annotations here and there; what is used of it here is untyped.
cgutils: Any = _cgutils
types: Any = _types
native = cast("Callable[[Callable[..., Any]], Any]", intrinsic)
"""numba's decorator for functions that write LLVM code. What they make takes other arguments than they do, so
it has to be cast where it gets its name."""

# For `system_call`, which is an instruction that LLVM has no name for.
binding.initialize_native_asmparser()

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()
# Numbers of system calls on x86-64, the one architecture the package starts on.
_NANOSLEEP = 35
_FUTEX = 202
# A team's words are private to the process, which spares the kernel the look at whose memory they are in. A
# ring's are not.
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NS_PER_S = 1_000_000_000
EVERYONE = 1 << 30
"""As many threads as could ever wait for one word."""
_CLOCK_MONOTONIC = 1
# struct rusage: two times of two words each, four words of memory, minor faults, major faults.
_RUSAGE_SELF, _RUSAGE_WORDS, _MAJOR_FAULTS_WORD = 0, 18, 9


def _pointer_to(element: Any) -> Callable[[int], Any]:
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return cast("Callable[[int], Any]", native(convert))


carray = cast("Callable[[Any, tuple[int, ...]], Any]", cast("Any", numba).carray)
"""`carray(floats_at(address), (rows, width))`: an array on the memory, C-contiguous, not checked."""

bytes_at = _pointer_to(types.uint8)
signed_bytes_at = _pointer_to(types.int8)
halves_at = _pointer_to(types.uint16)
floats_at = _pointer_to(types.float32)
integers_at = _pointer_to(types.int64)
ids_at = _pointer_to(types.int32)
words_at = _pointer_to(types.uint32)


def _load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _INT64.as_pointer()))

    return types.int64(types.int64), generate


def _store(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _INT64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _load_shared(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


def _store_shared(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _load_word(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load_atomic(builder.inttoptr(args[0], _INT32.as_pointer()), "acquire", 4)
        return builder.zext(word, _INT64)

    return types.int64(types.int64), generate


def _store_word(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], _INT32)
        builder.store_atomic(word, builder.inttoptr(args[0], _INT32.as_pointer()), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", word, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        void = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, void, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep_in_all_levels, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], _BYTE_POINTER), read, keep_in_all_levels, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _call_task(typing_context: Any, task: Any, params: Any, start: Any, stop: Any, scratch: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*5 * (types.int64,)), generate


def _system_call(builder: Any, args: list[Any]) -> Any:
    # libc's wrapper takes any number of arguments; all of ours are integers, for which the call is the same.
    kind = ir.FunctionType(_INT64, [_INT64] * 7)
    padded = [ir.Constant(_INT64, arg) if isinstance(arg, int) else arg for arg in args]
    padded += [ir.Constant(_INT64, 0)] * (7 - len(padded))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "syscall"), padded)


def _kernel_call(typing_context: Any, number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The instruction itself: libc's wrapper would hide the error in a word of the thread.
        kind = ir.FunctionType(_INT64, [_INT64] * 7)
        registers = "={rax},{rax},{rdi},{rsi},{rdx},{r10},{r8},{r9},~{rcx},~{r11},~{memory}"
        return builder.call(ir.InlineAsm(kind, "syscall", registers, side_effect=True), args)

    return types.int64(*7 * (types.int64,)), generate


def _nap(typing_context: Any, duration_ns: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, _INT64, 2)  # seconds, nanoseconds
        second = ir.Constant(_INT64, _NS_PER_S)
        builder.store(builder.sdiv(args[0], second), time)
        builder.store(builder.srem(args[0], second), builder.gep(time, [ir.Constant(_INT32, 1)]))
        _system_call(builder, [_NANOSLEEP, builder.ptrtoint(time, _INT64)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _futex_wait(typing_context: Any, address: Any, expected: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _system_call(builder, [_FUTEX, args[0], _FUTEX_WAIT_PRIVATE, args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _futex_wake(typing_context: Any, address: Any, num_threads: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _system_call(builder, [_FUTEX, args[0], _FUTEX_WAKE_PRIVATE, args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _futex_wait_shared(typing_context: Any, address: Any, expected: Any, timeout_ns: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, expected, timeout_ns = args
        time = cgutils.alloca_once(builder, _INT64, 2)  # seconds, nanoseconds
        second = ir.Constant(_INT64, _NS_PER_S)
        builder.store(builder.sdiv(timeout_ns, second), time)
        nanoseconds = builder.gep(time, [ir.Constant(_INT32, 1)])
        builder.store(builder.srem(timeout_ns, second), nanoseconds)
        _system_call(builder, [_FUTEX, address, _FUTEX_WAIT, expected, builder.ptrtoint(time, _INT64)])
        return context.get_dummy_value()

    return types.void(*3 * (types.int64,)), generate


def _futex_wake_shared(typing_context: Any, address: Any, num_threads: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _system_call(builder, [_FUTEX, args[0], _FUTEX_WAKE, args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _clock_ns(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = cgutils.alloca_once(builder, _INT64, 2)  # seconds, nanoseconds
        kind = ir.FunctionType(_INT32, [_INT32, _INT64.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(_INT32, _CLOCK_MONOTONIC), time])
        seconds = builder.load(time)
        nanoseconds = builder.load(builder.gep(time, [ir.Constant(_INT32, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(_INT64, _NS_PER_S)), nanoseconds)

    return types.int64(), generate


def _major_faults(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        usage = cgutils.alloca_once(builder, _INT64, _RUSAGE_WORDS)
        kind = ir.FunctionType(_INT32, [_INT32, _INT64.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "getrusage")
        builder.call(function, [ir.Constant(_INT32, _RUSAGE_SELF), usage])
        return builder.load(builder.gep(usage, [ir.Constant(_INT32, _MAJOR_FAULTS_WORD)]))

    return types.int64(), generate


load = cast("Callable[[int], int]", native(_load))
"""`load(address)`: the int64 there."""

store = cast("Callable[[int, int], None]", native(_store))
"""`store(address, value)`: writes an int64."""

load_shared = cast("Callable[[int], int]", native(_load_shared))
"""`load` of a word that other threads write: what they wrote before it is visible afterwards."""

store_shared = cast("Callable[[int, int], None]", native(_store_shared))
"""`store` into a word that other threads read: what was written before it becomes visible before it."""

load_word_shared = cast("Callable[[int], int]", native(_load_word))
"""`load_shared` of an unsigned word of 32 bits, as the kernel's rings have them."""

store_word_shared = cast("Callable[[int, int], None]", native(_store_word))
"""`store_shared` of the lower 32 bits."""

system_call = cast("Callable[[int, int, int, int, int, int, int], int]", native(_kernel_call))
"""`system_call(number, a, b, c, d, e, f)`: the kernel's answer, a negative errno where it fails."""

fetch_add = cast("Callable[[int, int], int]", native(_fetch_add))
"""`fetch_add(address, value)`: adds to an int64 atomically; returns what it was before."""

fence = cast("Callable[[], None]", native(_fence))
"""Orders stores before it and loads after it, which x86-64 would otherwise exchange."""

pause = cast("Callable[[], None]", native(_pause))
"""Says to the CPU that this thread spins."""

prefetch = cast("Callable[[int], None]", native(_prefetch))
"""Asks for the cache line at an address, which need not be mapped."""

call_task = cast("Callable[[int, int, int, int, int], None]", native(_call_task))
"""`call_task(task, params, start, stop, scratch)`: calls the task at that address."""

futex_wait = cast("Callable[[int, int], None]", native(_futex_wait))
"""`futex_wait(address, expected)`: sleeps while the lower 32 bits of the word equal those of `expected`; may
return early, so the caller looks at the word. Only threads of this process can be waited for."""

futex_wake = cast("Callable[[int, int], None]", native(_futex_wake))
"""`futex_wake(address, num_threads)`: wakes at most so many that wait there."""

futex_wait_shared = cast("Callable[[int, int, int], None]", native(_futex_wait_shared))
"""`futex_wait_shared(address, expected, timeout_ns)`: as `futex_wait`, for a word in memory that processes
share; returns after `timeout_ns` at the latest, which is not negative."""

futex_wake_shared = cast("Callable[[int, int], None]", native(_futex_wake_shared))
"""`futex_wake_shared(address, num_threads)`: wakes at most so many that wait there, in whatever process, with
`futex_wait_shared` or `shared.futex`."""

nap = cast("Callable[[int], None]", native(_nap))
"""`nap(duration_ns)`: sleeps for so long, which is not negative, or until a signal comes."""

clock_ns = cast("Callable[[], int]", native(_clock_ns))
"""Nanoseconds of the monotonic clock; takes about 25."""

major_faults = cast("Callable[[], int]", native(_major_faults))
"""Major page faults of this process so far, of all its threads; takes about a microsecond."""
