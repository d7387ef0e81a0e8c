"""How each family of formats multiplies: by rows as they lie, or by tiles of rows decoded before."""

from typing import Protocol

from shared.gguf.types import TensorType
from shared.native.task import SCRATCH_BYTES
from shared.quants.matrix import CODE_STRIDE
from shared.quants.simd.description import GroupDescription
from shared.quants.simd.float_kernel import FloatKernel, ReadFloats
from shared.quants.simd.instruction_set import InstructionSet
from shared.quants.simd.row_kernel import RowKernel
from shared.quants.simd.tile_kernel import TileKernel
from shared.quants.simd.vector import I64, Code, Value
from shared.window import WINDOW_TOKENS

# With more the sums of two rows have no room in registers.
_MOST_FLOAT_TOKENS = 4
_FLOAT_TOKENS_IN_CACHE = 64
# Of scratch memory for each token of a pass, before the inputs: what `RowKernel.write` calls spare.
_SPARE_BYTES = 64
# Behind the inputs of the last token: what the last read of them may touch.
_OVERREAD_BYTES = 64


class Call:
    """What a task is called with, as far as every way needs it. Arguments after the fourth are
    `more`."""

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

    @property
    def most_row_tokens(self) -> int:
        """With how many tokens a row is multiplied at once."""

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        """With how many tokens a tile is multiplied at once, as far as registers reach."""

    def most_inputs(self, code: Code, call: Call) -> Value:
        """For so many tokens there is room, in the scratch memory or in a cache, for what rows are multiplied
        with; a multiple of `most_row_tokens`."""

    def write_inputs(self, code: Code, call: Call, first: Value, count: Value) -> None:
        """Writes there what rows are multiplied with, of `count` tokens from `first` on."""

    def write_rows(self, code: Code, call: Call, tokens: int) -> None:
        """Writes the products of the call's rows, as they lie, with exactly so many tokens. `more` says which
        is the first, and its place among the inputs."""

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

    @property
    def most_row_tokens(self) -> int:
        # Of 16 registers or 32 not everything finds room, but a second pass would decode the row again.
        return WINDOW_TOKENS

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        # A sum of floats and one of integers for each token, of 16 registers or 32.
        return 4 if instructions.lanes32 == 8 else 8

    def most_inputs(self, code: Code, call: Call) -> Value:
        room = code.integer(SCRATCH_BYTES - WINDOW_TOKENS * _SPARE_BYTES - _OVERREAD_BYTES)
        # Whole passes. Rows of MAX_WIDTH leave room for three.
        return code.divided(room, RowKernel.input_bytes(code, call.width)) & -WINDOW_TOKENS

    def _inputs_at(self, code: Code, call: Call, place: Value) -> Value:
        begin = call.scratch + WINDOW_TOKENS * _SPARE_BYTES
        return begin + RowKernel.input_bytes(code, call.width) * place

    def write_inputs(self, code: Code, call: Call, first: Value, count: Value) -> None:
        kernel = RowKernel(code, self._kind, self._description)
        with code.loop(0, count) as place:
            token = first + place
            codes = call.codes + call.width * CODE_STRIDE * token
            sums = call.sums + (call.width >> 4) * 4 * token
            kernel.write_inputs(call.width, codes, sums, self._inputs_at(code, call, place))

    def write_rows(self, code: Code, call: Call, tokens: int) -> None:
        width, (token, place) = call.width, call.more
        kernel = RowKernel(code, self._kind, self._description)
        scale_stride, sum_stride = (width >> 5) * 4, (width >> 4) * 4
        input_stride = RowKernel.input_bytes(code, width)
        # What LLVM does not know to come from `token` it does not carry through the loop (a few percent).
        scales = code.kept(call.scales + scale_stride * token)
        sums = code.kept(call.sums + sum_stride * token)
        written = code.kept(self._inputs_at(code, call, place))
        inputs = [
            kernel.inputs(
                width,
                scales + scale_stride * number,
                sums + sum_stride * number,
                written + input_stride * number,
            )
            for number in range(tokens)
        ]
        out = code.kept(call.out + call.out_stride * 4 * token)
        with code.loop(call.start, call.stop) as row:
            products = kernel.write(call.weights + row * call.row_bytes, width, inputs, call.scratch)
            _store_row(code, call, row, out, products)

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

    @property
    def most_row_tokens(self) -> int:
        return _MOST_FLOAT_TOKENS

    def most_tile_tokens(self, instructions: InstructionSet) -> int:
        return 8

    def most_inputs(self, code: Code, call: Call) -> Value:
        # They are read where they are, but by every block of rows: so many stay in a cache.
        return code.integer(_FLOAT_TOKENS_IN_CACHE)

    def write_inputs(self, code: Code, call: Call, first: Value, count: Value) -> None:
        pass

    def write_rows(self, code: Code, call: Call, tokens: int) -> None:
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        token, _ = call.more
        floats = code.kept(call.floats + call.width * 4 * token)
        inputs = [floats + call.width * (4 * number) for number in range(tokens)]
        out = code.kept(call.out + call.out_stride * 4 * token)
        # Two rows at once where that saves reading activations: with few tokens it halves the speed, and with
        # weights of two bytes their widening wants the registers.
        num_rows = 2 if tokens > 2 and self._weight_bytes == 4 else 1
        with code.loop(call.start, call.stop, num_rows) as first:
            # The last of an odd number of rows is its own partner.
            rows = [code.smaller(first + number, call.stop - 1) for number in range(num_rows)]
            addresses = [call.weights + row * call.row_bytes for row in rows]
            for row, products in zip(rows, kernel.write_rows(addresses, call.width, inputs), strict=True):
                _store_row(code, call, row, out, products)

    def write_tile(self, code: Code, call: Call, first: Value, remaining: Value) -> None:
        rows = call.weights + first * call.row_bytes
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        kernel.write_decoding(rows, call.row_bytes, remaining - 1, call.width, call.scratch)

    def write_products(self, code: Code, call: Call, token: Value, tokens: int) -> list[Value]:
        kernel = FloatKernel(code, self._weight_bytes, self._read)
        return kernel.write_products(call.scratch, call.width, tokens, call.floats + token * call.width * 4)


def _store_row(code: Code, call: Call, row: Value, out: Value, products: list[Value]) -> None:
    for number, product in enumerate(products):
        code.store(product, out + (call.out_stride * number + row) * 4, align=4)
