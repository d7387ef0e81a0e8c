"""The multiply task of one format for one target: which kernel it takes for how many tokens."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from llvmlite import ir

from shared.gguf.types import TensorType
from shared.quants.matrix import CODE_STRIDE
from shared.quants.simd.description import GroupDescription
from shared.quants.simd.float_kernel import FloatKernel, ReadFloats
from shared.quants.simd.instruction_set import InstructionSet, Target
from shared.quants.simd.machine_code import Module, compile_function
from shared.quants.simd.row_kernel import RowKernel
from shared.quants.simd.tile_kernel import TileKernel
from shared.quants.simd.vector import I64, VOID, Code, Value

_TASK = ir.FunctionType(VOID, [I64] * 4)
# Measured at widths 2560 and 10240: from five tokens on a tile is ahead.
_MOST_FLOAT_TOKENS = 4


class Call:
    """What a task is called with, as far as every way needs it."""

    def __init__(self, code: Code, arguments: list[Value]) -> None:
        self.params, self.start, self.stop, self.scratch, *self.more = arguments

        def field(address: Value, number: int) -> Value:
            return code.load(I64, 0, address + 8 * number, align=8, constant=True)

        # The fields of a MATRIX and of its PLANE, in their order.
        self.weights, self.row_bytes, plane, self.out, self.out_stride = (
            field(self.params, number) for number in range(5)
        )
        self.floats, self.codes, self.scales, self.sums, self.width, self.num_tokens = (
            field(plane, number) for number in range(6)
        )


class Ways(Protocol):
    """How one family of formats multiplies."""

    @property
    def is_tile_scheduled(self) -> bool:
        """See `Module`."""

    def most_few(self, instructions: InstructionSet) -> int:
        """Up to how many tokens rows are taken as they lie."""

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        """With how many tokens a tile is multiplied at once, as far as registers reach."""

    def write_few(self, code: Code, call: Call, tokens: int) -> None:
        """Writes the way for exactly so many tokens, taking rows as they lie."""

    def write_tile(self, code: Code, call: Call, first: Value, remaining: Value) -> None:
        """Writes the decoding of the tile whose first row is `first`; so many rows are wanted of it."""

    def write_products(self, code: Code, call: Call, token: Value, tokens: int) -> list[Value]:
        """Writes the products of that tile with `tokens` tokens from `token` on."""


class QuantisedWays:
    """Codes times codes."""

    def __init__(self, kind: TensorType, description: GroupDescription) -> None:
        self._kind = kind
        self._description = description

    @property
    def is_tile_scheduled(self) -> bool:
        return self._description.is_tile_scheduled

    def most_few(self, instructions: InstructionSet) -> int:
        return instructions.most_row_tokens

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        # A sum of floats and one of integers for each token, of 16 registers or 32.
        return 4 if instructions.lanes32 == 8 else 8

    def write_few(self, code: Code, call: Call, tokens: int) -> None:
        width = call.width
        kernel = RowKernel(code, self._kind, self._description)
        inputs = [
            kernel.write_inputs(
                width,
                call.codes + width * (CODE_STRIDE * token),
                call.scales + (width >> 5) * (4 * token),
                call.sums + (width >> 4) * (4 * token),
                call.scratch + kernel.input_bytes(width) * token,
            )
            for token in range(tokens)
        ]
        # A register beyond the last token, which the last of its reads may touch.
        spare = call.scratch + kernel.input_bytes(width) * tokens + 64
        with code.loop(call.start, call.stop) as row:
            products = kernel.write(call.weights + row * call.row_bytes, width, inputs, spare)
            _store_row(code, call, row, products)

    def write_tile(self, code: Code, call: Call, first: Value, remaining: Value) -> None:
        rows = call.weights + first * call.row_bytes
        kernel = TileKernel(code, self._kind, self._description)
        kernel.write_decoding(rows, call.row_bytes, remaining - 1, call.width, call.scratch)

    def write_products(self, code: Code, call: Call, token: Value, tokens: int) -> list[Value]:
        kernel = TileKernel(code, self._kind, self._description)
        return kernel.write_products(
            call.scratch,
            call.width,
            tokens,
            call.codes + token * call.width * CODE_STRIDE,
            call.scales + token * (call.width >> 5) * 4,
            call.sums + token * (call.width >> 4) * 4,
        )


class FloatWays:
    """Floats times floats."""

    def __init__(self, weight_bytes: int, read: ReadFloats) -> None:
        self._weight_bytes = weight_bytes
        self._read = read

    @property
    def is_tile_scheduled(self) -> bool:
        return True

    def most_few(self, instructions: InstructionSet) -> int:
        return _MOST_FLOAT_TOKENS

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        return 8

    def write_few(self, code: Code, call: Call, tokens: int) -> None:
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        inputs = [call.floats + call.width * (4 * token) for token in range(tokens)]
        # Two rows at once where activations are most of what is read; where weights are, it halves the speed.
        num_rows = 1 if tokens <= 2 else 2
        with code.loop(call.start, call.stop, num_rows) as first:
            # The last of an odd number of rows is its own partner.
            rows = [code.smaller(first + number, call.stop - 1) for number in range(num_rows)]
            addresses = [call.weights + row * call.row_bytes for row in rows]
            for row, products in zip(rows, kernel.write_rows(addresses, call.width, inputs), strict=True):
                _store_row(code, call, row, products)

    def write_tile(self, code: Code, call: Call, first: Value, remaining: Value) -> None:
        rows = call.weights + first * call.row_bytes
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        kernel.write_decoding(rows, call.row_bytes, remaining - 1, call.width, call.scratch)

    def write_products(self, code: Code, call: Call, token: Value, tokens: int) -> list[Value]:
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        return kernel.write_products(call.scratch, call.width, tokens, call.floats + token * call.width * 4)


def compile_multiply(kind: TensorType, ways: Ways, target: Target) -> int:
    """The address of the task, compiled or from the cache."""
    name = f"multiply_{kind.name}"
    return compile_function(name, target, *modules_of(name, ways, target))


def modules_of(name: str, ways: Ways, target: Target) -> tuple[Module, Module]:
    """The task `name`, with its ways for few tokens, and what it calls for many."""
    many = f"{name}_many"
    return (
        Module(name, partial(_write_task, name=name, many=many, ways=ways, target=target)),
        Module(
            many,
            partial(_write_many_task, name=many, ways=ways, target=target),
            is_scheduled=ways.is_tile_scheduled,
        ),
    )


def _write_task(module: ir.Module, name: str, many: str, ways: Ways, target: Target) -> None:
    task = declare_task(module, name)
    code, arguments = begin_function(task, target)
    num_tokens = Call(code, arguments).num_tokens
    for tokens in range(1, ways.most_few(target.instructions) + 1):
        write = partial(ways.write_few, tokens=tokens)
        few = _write_part(module, f"{name}_{tokens}", target, write)
        is_this = code.builder.icmp_signed("==", num_tokens.ir, code.integer(tokens).ir)
        with code.builder.if_then(is_this):
            code.call(few, arguments)
            code.builder.ret_void()
    code.call(declare_task(module, many), arguments)
    code.builder.ret_void()


def _write_many_task(module: ir.Module, name: str, ways: Ways, target: Target) -> None:
    passes = []
    for tokens in _pass_sizes(ways, target.instructions):
        write = partial(_write_pass, ways=ways, tokens=tokens)
        passes.append(_write_part(module, f"{name}_{tokens}", target, write, num_arguments=6))
    task = declare_task(module, name)
    code, arguments = begin_function(task, target)
    _write_many(code, Call(code, arguments), ways, passes)
    code.builder.ret_void()


def _pass_sizes(ways: Ways, instructions: InstructionSet) -> range:
    """With how many tokens a tile is multiplied at once: passes of one call differ by one at most."""
    most, fewest = ways.most_tile_tokens(instructions), ways.most_few(instructions) + 1
    # Beyond two passes none can be smaller than with two.
    return range(min(tokens // -(-tokens // most) for tokens in range(fewest, 2 * most + 1)), most + 1)


def _write_part(
    module: ir.Module,
    name: str,
    target: Target,
    write: Callable[[Code, Call], None],
    num_arguments: int = 4,
) -> ir.Function:
    """A function of the module's own; arguments after the fourth are `Call.more`."""
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * num_arguments), name)
    function.attributes.add("noinline")
    function.linkage = "internal"
    code, arguments = begin_function(function, target)
    write(code, Call(code, arguments))
    code.builder.ret_void()
    return function


def declare_task(module: ir.Module, name: str) -> ir.Function:
    """A task (`shared.native.task`) to be written."""
    function = ir.Function(module, _TASK, name)
    function.attributes.add("noinline")
    return function


def begin_function(function: ir.Function, target: Target) -> tuple[Code, list[Value]]:
    """Begins to write it: the code and its arguments."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    code = Code(function.module, builder, target)
    # The entry block keeps the variables, the code begins after it.
    body = builder.append_basic_block("body")
    builder.branch(body)
    builder.position_at_end(body)
    return code, [code.value(argument) for argument in function.args]


def _write_many(code: Code, call: Call, ways: Ways, passes: list[ir.Function]) -> None:
    """All tokens, tile by tile, in passes of nearly equal size."""
    sizes = _pass_sizes(ways, code.instructions)
    num_passes = code.divided(call.num_tokens + (sizes[-1] - 1), code.integer(sizes[-1]))
    # No tokens are no pass, and nothing may be divided by that.
    num_passes = code.larger(num_passes, code.integer(1))
    size = code.divided(call.num_tokens, num_passes)
    # So many passes take one token more.
    num_larger = call.num_tokens - size * num_passes
    with code.loop(call.start, call.stop, code.instructions.lanes32) as first:
        ways.write_tile(code, call, first, call.stop - first)
        with code.loop(0, num_passes) as number:
            is_larger = number.is_less(num_larger)
            token = number * size + code.smaller(number, num_larger)
            this_size = size + is_larger.zero_extended(I64)
            arguments = [call.params, call.start, call.stop, call.scratch, first, token]
            for tokens, function in zip(sizes, passes, strict=True):
                is_this = code.builder.icmp_signed("==", this_size.ir, code.integer(tokens).ir)
                with code.builder.if_then(is_this):
                    code.call(function, arguments)


def _write_pass(code: Code, call: Call, ways: Ways, tokens: int) -> None:
    """The tile in the scratch memory, whose first row is given, with `tokens` tokens from a given one on."""
    first, token = call.more
    for number, product in enumerate(ways.write_products(code, call, token, tokens)):
        out = call.out + ((token + number) * call.out_stride + first) * 4
        code.store_first(product, out, call.stop - first)


def _store_row(code: Code, call: Call, row: Value, products: list[Value]) -> None:
    for token, product in enumerate(products):
        code.store(product, call.out + (call.out_stride * token + row) * 4, align=4)
