"""The multiply tasks of one format for one target: which kernel they take for how many tokens.

Two tasks are made. One takes rows as they lie, for any number of tokens, in passes of as many as registers
reach for: what it computes for a token does not depend on the others. The other takes windows of up to
`WINDOW_TOKENS` tokens to the first, so that they have the same results, and more to tiles, which are faster.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from shared.gguf.types import TensorType
from shared.quants.simd.instruction_set import InstructionSet, Target
from shared.quants.simd.machine_code import Module, compile_function
from shared.quants.simd.vector import I64, VOID, Code, Value
from shared.quants.simd.ways import Call, Ways
from shared.window import WINDOW_TOKENS

_TASK = ir.FunctionType(VOID, [I64] * 4)
# So many rows stay in a cache while all tokens are multiplied with them.
_ROWS_A_BLOCK = 16


def compile_multiply(kind: TensorType, ways: Ways, target: Target, *, is_row_wise: bool = False) -> int:
    """The address of the task, compiled or from the cache. `is_row_wise`: of the one that takes rows as they
    lie however many tokens there are."""
    name = f"multiply_{kind.name}"
    rows, both = modules_of(name, ways, target)
    if is_row_wise:
        return compile_function(rows.name, target, rows)
    return compile_function(name, target, rows, both)


def modules_of(name: str, ways: Ways, target: Target) -> tuple[Module, Module]:
    """The task that takes rows as they lie, and the task `name`, which calls that one for windows."""
    rows = f"{name}_rows"
    return (
        Module(rows, partial(_write_rows_task, name=rows, ways=ways, target=target)),
        Module(
            name,
            partial(_write_task, name=name, rows=rows, ways=ways, target=target),
            is_scheduled=ways.is_tile_scheduled,
        ),
    )


def _write_rows_task(module: ir.Module, name: str, ways: Ways, target: Target) -> None:
    most = ways.most_row_tokens
    passes = [
        _write_part(module, f"{name}_{tokens}", target, partial(ways.write_rows, tokens=tokens))
        for tokens in range(1, most + 1)
    ]
    task = declare_task(module, name)
    code, arguments = begin_function(task, target)
    call = Call(code, arguments)
    most_inputs = ways.most_inputs(code, call)
    with code.loop(0, call.num_tokens, most_inputs) as first:
        count = code.smaller(call.num_tokens - first, most_inputs)
        ways.write_inputs(code, call, first, count)
        # One pass has no use for blocks.
        is_one = count.is_less(most + 1)
        block = code.choose(is_one, call.stop - call.start, code.integer(_ROWS_A_BLOCK))
        with code.loop(call.start, call.stop, block) as row:
            end = code.smaller(row + block, call.stop)
            with code.loop(0, count, most) as place:
                size = code.smaller(count - place, code.integer(most))
                arguments = [call.params, row, end, call.scratch, first + place, place]
                _call_of_size(code, size, dict(enumerate(passes, start=1)), arguments)
    code.builder.ret_void()


def _write_task(module: ir.Module, name: str, rows: str, ways: Ways, target: Target) -> None:
    passes = {
        tokens: _write_part(
            module, f"{name}_{tokens}", target, partial(_write_pass, ways=ways, tokens=tokens)
        )
        for tokens in _pass_sizes(ways, target.instructions)
    }
    task = declare_task(module, name)
    code, arguments = begin_function(task, target)
    call = Call(code, arguments)
    with code.builder.if_then(call.num_tokens.is_less(WINDOW_TOKENS + 1).ir):
        code.call(declare_task(module, rows), arguments)
        code.builder.ret_void()
    _write_many(code, call, ways, passes)
    code.builder.ret_void()


def _call_of_size(code: Code, size: Value, by_size: dict[int, ir.Function], arguments: list[Value]) -> None:
    for number, function in by_size.items():
        is_this = code.builder.icmp_signed("==", size.ir, code.integer(number).ir)
        with code.builder.if_then(is_this):
            code.call(function, arguments)


def _pass_sizes(ways: Ways, instructions: InstructionSet) -> range:
    """With how many tokens a tile is multiplied at once: passes of one call differ by one at most."""
    most, fewest = ways.most_tile_tokens(instructions), WINDOW_TOKENS + 1
    # With more tokens than these, and so more passes, none can be smaller.
    return range(min(tokens // -(-tokens // most) for tokens in range(fewest, fewest + most + 1)), most + 1)


def _write_part(
    module: ir.Module, name: str, target: Target, write: Callable[[Code, Call], None]
) -> ir.Function:
    """A function of the module's own, with two arguments more than a task: `Call.more`."""
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * 6), name)
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


def _write_many(code: Code, call: Call, ways: Ways, passes: dict[int, ir.Function]) -> None:
    """All tokens, tile by tile, in passes of nearly equal size."""
    num_passes = code.divided(call.num_tokens + (max(passes) - 1), code.integer(max(passes)))
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
            _call_of_size(code, this_size, passes, arguments)


def _write_pass(code: Code, call: Call, ways: Ways, tokens: int) -> None:
    """The tile in the scratch memory, whose first row is given, with `tokens` tokens from a given one on."""
    first, token = call.more
    for number, product in enumerate(ways.write_products(code, call, token, tokens)):
        out = call.out + ((token + number) * call.out_stride + first) * 4
        code.store_first(product, out, call.stop - first)
