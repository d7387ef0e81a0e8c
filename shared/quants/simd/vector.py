"""Vectors and scalars of a kernel that is being written.

A `Value` stands for one LLVM value; Python's operators append the instruction that computes the result. So a
kernel is an ordinary Python function that runs once, when the kernel is written: its loops over a fixed
number of things are unrolled, its lists of vectors become registers, and its parameters are constants of the
code. Loops that the kernel itself runs are `Code.loop`.

Integer operators work lane by lane and wrap around; `>>` shifts zeros in. A Python number on either side
becomes a constant of the other side's type.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Union

from llvmlite import ir
from numpy.typing import NDArray

from shared.quants.simd.instruction_set import Target

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE, VOID = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.VoidType()

# By the number of bytes.
_SHUFFLES = {
    16: "llvm.x86.ssse3.pshuf.b.128",
    32: "llvm.x86.avx2.pshuf.b",
    64: "llvm.x86.avx512.pshuf.b.512",
}

NO_BYTE = -128
"""In `Code.bytes_shuffled`, the place of a byte that becomes 0."""

Operand = Union["Value", int, float]


def vector_type(element: ir.Type, lanes: int) -> ir.Type:
    """`lanes` elements side by side; 0 is a scalar."""
    return ir.VectorType(element, lanes) if lanes else element


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A scalar or a vector; `lanes` is 0 for a scalar."""

    code: "Code"
    ir: Any

    @property
    def element(self) -> Any:
        """The LLVM type of a lane."""
        return self.ir.type.element if self.lanes else self.ir.type

    @property
    def lanes(self) -> int:
        """How many there are, 0 for a scalar."""
        return self.ir.type.count if isinstance(self.ir.type, ir.VectorType) else 0

    def _with(self, other: Operand, integer: str, floating: str = "") -> "Value":
        operation = floating if isinstance(self.element, ir.FloatType) else integer
        right = self.code.like(self, other)
        return self.code.value(getattr(self.code.builder, operation)(self.ir, right.ir))

    def __add__(self, other: Operand) -> "Value":
        return self._with(other, "add", "fadd")

    def __sub__(self, other: Operand) -> "Value":
        return self._with(other, "sub", "fsub")

    def __neg__(self) -> "Value":
        if isinstance(self.element, ir.FloatType):
            return self.code.value(self.code.builder.fneg(self.ir))
        return self.code.like(self, 0) - self

    def __rsub__(self, other: Operand) -> "Value":
        return self.code.like(self, other) - self

    def __mul__(self, other: Operand) -> "Value":
        return self._with(other, "mul", "fmul")

    def __and__(self, other: Operand) -> "Value":
        return self._with(other, "and_")

    def __or__(self, other: Operand) -> "Value":
        return self._with(other, "or_")

    def __xor__(self, other: Operand) -> "Value":
        return self._with(other, "xor")

    def __lshift__(self, other: Operand) -> "Value":
        return self._with(other, "shl")

    def __rshift__(self, other: Operand) -> "Value":
        return self._with(other, "lshr")

    def shifted_right(self, bits: int) -> "Value":
        """Of signed integers: the sign is shifted in."""
        return self._with(bits, "ashr")

    __radd__, __rmul__, __rand__, __ror__ = __add__, __mul__, __and__, __or__

    def as_type(self, element: ir.Type, lanes: int) -> "Value":
        """The same bits as another type."""
        return self.code.value(self.code.builder.bitcast(self.ir, vector_type(element, lanes)))

    def zero_extended(self, element: ir.Type) -> "Value":
        """Wider integers of the same (unsigned) values."""
        return self.code.value(self.code.builder.zext(self.ir, vector_type(element, self.lanes)))

    def sign_extended(self, element: ir.Type) -> "Value":
        """Wider integers of the same (signed) values."""
        return self.code.value(self.code.builder.sext(self.ir, vector_type(element, self.lanes)))

    def truncated(self, element: ir.Type) -> "Value":
        """Narrower integers: the low bits."""
        return self.code.value(self.code.builder.trunc(self.ir, vector_type(element, self.lanes)))

    def to_float(self) -> "Value":
        """Signed integers, or halves, as float32."""
        target = vector_type(FLOAT, self.lanes)
        if isinstance(self.element, ir.HalfType):
            return self.code.value(self.code.builder.fpext(self.ir, target))
        return self.code.value(self.code.builder.sitofp(self.ir, target))

    def shuffled(self, lanes: Sequence[int], other: "Value | None" = None) -> "Value":
        """The named lanes, counted through this vector and then `other`."""
        index = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        second = other.ir if other is not None else ir.Constant(self.ir.type, ir.Undefined)
        return self.code.value(self.code.builder.shuffle_vector(self.ir, second, index))

    def lane(self, number: int) -> "Value":
        """One lane, as a scalar."""
        return self.code.value(self.code.builder.extract_element(self.ir, ir.Constant(I32, number)))

    def joined(self, other: "Value") -> "Value":
        """This vector's lanes, then the other's."""
        return self.shuffled(range(2 * self.lanes), other)

    def repeated(self, times: int) -> "Value":
        """Each lane `times` times in a row."""
        return self.shuffled([lane for lane in range(self.lanes) for _ in range(times)])

    def broadcast(self, lanes: int) -> "Value":
        """A scalar in every lane."""
        target = ir.VectorType(self.ir.type, lanes)
        undefined = ir.Constant(target, ir.Undefined)
        first = self.code.builder.insert_element(undefined, self.ir, ir.Constant(I32, 0))
        index = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.code.value(self.code.builder.shuffle_vector(first, undefined, index))

    def total(self) -> "Value":
        """The sum of all lanes, pairwise."""
        value, lanes = self, self.lanes
        while lanes > 1:
            lanes //= 2
            value = value.shuffled(range(lanes)) + value.shuffled(range(lanes, 2 * lanes))
        return value.lane(0)

    def is_less(self, other: Operand) -> "Value":
        """Of signed integers: one bit."""
        return self.code.value(self.code.builder.icmp_signed("<", self.ir, self.code.like(self, other).ir))


class Variable:
    """A value that changes while the kernel runs."""

    def __init__(self, code: "Code", start: Value) -> None:
        self._code = code
        with code.builder.goto_entry_block():
            self._slot = code.builder.alloca(start.ir.type)
        self.set(start)

    def get(self) -> Value:
        """As it is now."""
        return self._code.value(self._code.builder.load(self._slot))

    def set(self, value: Value) -> None:
        """From here on."""
        self._code.builder.store(value.ir, self._slot)


def total_of(variables: Sequence[Variable]) -> Value:
    """The sum of all lanes of all of them, pairwise; as many as a power of 2."""
    values = [variable.get() for variable in variables]
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0].total()


class Code:
    """A function that is being written."""

    def __init__(self, module: ir.Module, builder: ir.IRBuilder, target: Target) -> None:
        self.module = module
        self.builder = builder
        self.instructions = target.instructions
        self.activation_bytes = target.activation_bytes

    # Values

    def value(self, llvm_value: Any) -> Value:
        """Wraps an LLVM value."""
        return Value(self, llvm_value)

    def like(self, pattern: Value, operand: Operand) -> Value:
        """`operand` as a value of the pattern's type."""
        if isinstance(operand, Value):
            return operand
        if not pattern.lanes:
            return self.value(ir.Constant(pattern.element, operand))
        return self.value(ir.Constant(pattern.ir.type, [operand] * pattern.lanes))

    def integer(self, number: int) -> Value:
        """An int64, the type of addresses and counts."""
        return self.value(ir.Constant(I64, number))

    def splat(self, element: ir.Type, lanes: int, number: float) -> Value:
        """A constant in every lane."""
        content = [number] * lanes if lanes else number
        return self.value(ir.Constant(vector_type(element, lanes), content))

    def constant(self, element: ir.Type, numbers: Sequence[int]) -> Value:
        """A constant vector."""
        return self.value(ir.Constant(ir.VectorType(element, len(numbers)), list(numbers)))

    # Memory

    def load(
        self, element: ir.Type, lanes: int, address: Value, *, align: int = 1, constant: bool = False
    ) -> Value:
        """Reads; `constant` promises that nothing writes there while the kernel runs."""
        target = vector_type(element, lanes)
        loaded = self.builder.load(self._pointer(address, target), typ=target, align=align)
        if constant:
            loaded.set_metadata("invariant.load", self.module.add_metadata([]))
        return self.value(loaded)

    def store(self, value: Value, address: Value, *, align: int = 1) -> None:
        """Writes."""
        self.builder.store(value.ir, self._pointer(address, value.ir.type), align=align)

    def store_first(self, values: Value, address: Value, count: Value) -> None:
        """Writes the first `count` lanes of floats, or all of them."""
        kind = values.ir.type
        numbers = self.constant(I64, range(values.lanes))
        wanted = self.builder.icmp_signed("<", numbers.ir, count.broadcast(values.lanes).ir)
        name = f"llvm.masked.store.v{values.lanes}f32.p0"
        function = self._function(name, VOID, [kind, ir.PointerType(kind), I32, wanted.type])
        alignment = ir.Constant(I32, 4)
        self.builder.call(function, [values.ir, self._pointer(address, kind), alignment, wanted])

    def unpacked(self, values: Value) -> list[Value]:
        """Every lane of a vector of 16-bit integers as an int64; they move to general registers in fours."""
        lanes = []
        quads = values.as_type(I64, values.lanes // 4)
        for number in range(quads.lanes):
            quad = quads.lane(number)
            lanes += [(quad >> (16 * place)) & 0xFFFF for place in range(4)]
        return lanes

    def prefetch(self, address: Value) -> None:
        """Asks for the cache line at an address, which need not exist."""
        pointer = ir.PointerType(I8)
        function = self._function("llvm.prefetch.p0", VOID, [pointer, I32, I32, I32])
        flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]  # a read, kept in all caches, of data
        self.builder.call(function, [self._pointer(address, I8), *flags])

    def table(self, name: str, entries: NDArray[Any]) -> Value:
        """The address of a constant table; the same one for the same name."""
        if name in self.module.globals:
            table = self.module.globals[name]
        else:
            data = ir.Constant(ir.ArrayType(I8, entries.nbytes), bytearray(entries.tobytes()))
            table = ir.GlobalVariable(self.module, data.type, name)
            table.linkage, table.global_constant, table.initializer, table.align = "internal", True, data, 64
        return self.value(self.builder.ptrtoint(table, I64))

    def kept(self, value: Value) -> Value:
        """The same integer, in a register of its own: LLVM knows no more what it was computed from."""
        kind = ir.FunctionType(I64, [I64])
        return self.value(self.builder.asm(kind, "", "=r,0", [value.ir], side_effect=False))

    # Control

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Value]:
        """Runs what is written inside for start, start + step, ... below stop (int64)."""
        first = self.like(self.integer(0), start)
        limit = self.like(self.integer(0), stop)
        counter = Variable(self, first)
        head, body, after = (self.builder.append_basic_block(name) for name in ("head", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(counter.get().is_less(limit).ir, body, after)
        self.builder.position_at_end(body)
        yield counter.get()
        counter.set(counter.get() + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def choose(self, condition: Value, yes: Value, no: Value) -> Value:
        """Lane by lane, or whole."""
        return self.value(self.builder.select(condition.ir, yes.ir, no.ir))

    def divided(self, dividend: Value, divisor: Value) -> Value:
        """Of two integers that are not negative."""
        return self.value(self.builder.sdiv(dividend.ir, divisor.ir))

    def remainder(self, dividend: Value, divisor: int) -> Value:
        """Of an integer that is not negative."""
        return self.value(self.builder.srem(dividend.ir, self.integer(divisor).ir))

    def smaller(self, left: Value, right: Value) -> Value:
        """Of two signed integers."""
        return self.choose(left.is_less(right), left, right)

    def larger(self, left: Value, right: Value) -> Value:
        """Of two signed integers."""
        return self.choose(left.is_less(right), right, left)

    # Instructions that operators do not name

    def fused_multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend, rounded once."""
        kind = left.ir.type
        suffix = f"v{left.lanes}f32" if left.lanes else "f32"
        function = self._function(f"llvm.fma.{suffix}", kind, [kind] * 3)
        return self.value(self.builder.call(function, [left.ir, right.ir, addend.ir]))

    def count_bits(self, value: Value) -> Value:
        """Of each lane."""
        kind = value.ir.type
        function = self._function(f"llvm.ctpop.v{value.lanes}i{value.element.width}", kind, [kind])
        return self.value(self.builder.call(function, [value.ir]))

    def intrinsic(self, name: str, result: ir.Type, *operands: Value) -> Value:
        """Calls one of LLVM's functions for a CPU."""
        function = self._function(name, result, [operand.ir.type for operand in operands])
        return self.value(self.builder.call(function, [operand.ir for operand in operands]))

    def call(self, function: ir.Function, arguments: Sequence[Value]) -> Value:
        """Calls a function of the module."""
        return self.value(self.builder.call(function, [argument.ir for argument in arguments]))

    def bytes_from_bits(self, words: Value, first_bits: Sequence[int]) -> Value:
        """Each byte cut out of the 64-bit word it lies in, beginning at a bit (0 to 63) of its own."""
        starts = self.constant(I8, first_bits)
        name = f"llvm.x86.avx512.pmultishift.qb.{8 * words.lanes}"
        return self.intrinsic(name, words.ir.type, starts, words)

    def look_up(self, table: Sequence[int], index: Value) -> Value:
        """16-entry table of bytes: table[index] in each lane, an index of 0..15."""
        entries = self.constant(I8, list(table) * (index.lanes // 16))
        return self.intrinsic(_SHUFFLES[index.lanes], index.ir.type, entries, index)

    def bytes_shuffled(self, values: Value, places: Sequence[int]) -> Value:
        """Each byte from a place of its own 16 bytes, 0 to 15, or NO_BYTE: one instruction, and no other."""
        return self.intrinsic(_SHUFFLES[values.lanes], values.ir.type, values, self.constant(I8, places))

    def upper_products(self, left: Value, right: Value) -> Value:
        """The upper halves of products of 16 unsigned 16-bit numbers."""
        return self.intrinsic("llvm.x86.avx2.pmulhu.w", left.ir.type, left, right)

    def _pointer(self, address: Value, kind: ir.Type) -> Any:
        return self.builder.inttoptr(address.ir, ir.PointerType(kind))

    def _function(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> Any:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)
