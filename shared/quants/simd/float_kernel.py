"""Weights that are floating-point numbers, whole or halved: products in float32, nothing is rounded first.

Few tokens take a row as it lies. More take a tile: as many rows as a register has lanes, widened and
transposed once, f32 [width, rows], so that one instruction multiplies them all with an activation that stands
in every lane.
"""

from collections.abc import Callable

from shared.quants.simd.transposing import transposed
from shared.quants.simd.vector import FLOAT, I32, Code, Value, Variable, total_of

ReadFloats = Callable[[Code, Value, int], Value]
"""(code, address of a weight, lanes) -> that many weights as float32; 0 lanes are a scalar."""

_STEP = 8
# Of each token: sums of products in turn, so that one addition need not wait for the one before. As many
# however many tokens there are, so that their results are the same.
_NUM_SUMS = 4
# How far ahead of the reads memory is asked for.
_PREFETCH_BYTES = 2048


class FloatKernel:
    """Writes the code for weights of `weight_bytes` bytes."""

    def __init__(self, code: Code, weight_bytes: int, read: ReadFloats) -> None:
        self._code = code
        self._weight_bytes = weight_bytes
        self._read = read
        self.num_rows = code.instructions.lanes32

    def write_rows(self, rows: list[Value], width: Value, tokens: list[Value]) -> list[list[Value]]:
        """For each row, by address, its products with the float32 activations at each address.

        Several rows at once share what is read of the activations, which do not fit the L1 cache.
        """
        # Rows and activations begin anywhere: twice as wide reads would straddle cache lines twice as often.
        code, lanes = self._code, _STEP
        pairs = [(number, token) for number in range(len(rows)) for token in range(len(tokens))]
        totals = {
            pair: [Variable(code, code.splat(FLOAT, lanes, 0.0)) for _ in range(_NUM_SUMS)] for pair in pairs
        }
        rests = {pair: Variable(code, code.splat(FLOAT, 0, 0.0)) for pair in pairs}

        def add(at: Value, place: int) -> None:
            weights = [self._read(code, row + at * self._weight_bytes, lanes) for row in rows]
            activations = [code.load(FLOAT, lanes, token + at * 4) for token in tokens]
            for (number, token), sums in totals.items():
                total = sums[place]
                total.set(code.fused_multiply_add(weights[number], activations[token], total.get()))

        a_round = lanes * _NUM_SUMS
        in_rounds = width - (width & (a_round - 1))
        in_registers = width - (width & (lanes - 1))
        with code.loop(0, in_rounds, a_round) as at:
            for place in range(_NUM_SUMS):
                add(at + place * lanes, place)
            for row in rows:
                for line in range(0, a_round * self._weight_bytes, 64):
                    code.prefetch(row + at * self._weight_bytes + (_PREFETCH_BYTES + line))
        with code.loop(in_rounds, in_registers, lanes) as at:
            add(at, 0)
        with code.loop(in_registers, width) as at:
            for (number, token), rest in rests.items():
                weight = self._read(code, rows[number] + at * self._weight_bytes, 0)
                activation = code.load(FLOAT, 0, tokens[token] + at * 4)
                rest.set(code.fused_multiply_add(weight, activation, rest.get()))
        products: list[list[Value]] = [[] for _ in rows]
        for (number, token), sums in totals.items():
            products[number].append(total_of(sums) + rests[number, token].get())
        return products

    def write_decoding(self, rows: Value, row_bytes: Value, last: Value, width: Value, tile: Value) -> None:
        """Fills the tile from the rows at address `rows`; those after row `last` repeat it."""
        code, lanes = self._code, self.num_rows
        addresses = [rows + code.smaller(code.integer(row), last) * row_bytes for row in range(lanes)]
        in_steps = width - (width & (_STEP - 1))
        with code.loop(0, in_steps, _STEP) as at:
            read = [
                self._read(code, address + at * self._weight_bytes, _STEP).as_type(I32, _STEP)
                for address in addresses
            ]
            if lanes == 2 * _STEP:
                read = [read[row].joined(read[row + _STEP]) for row in range(_STEP)]
            for number, column in enumerate(transposed(read)):
                code.store(column, tile + (at + number) * (4 * lanes), align=4 * _STEP)
        with code.loop(in_steps, width) as at:
            for row, address in enumerate(addresses):
                weight = self._read(code, address + at * self._weight_bytes, 0)
                code.store(weight, tile + (at * lanes + row) * 4, align=4)

    def write_products(self, tile: Value, width: Value, tokens: int, x: Value) -> list[Value]:
        """The products of the tile with `tokens` tokens, f32 [tokens, width] at address x."""
        code, lanes = self._code, self.num_rows
        totals = [Variable(code, code.splat(FLOAT, lanes, 0.0)) for _ in range(tokens)]
        with code.loop(0, width) as at:
            weights = code.load(FLOAT, lanes, tile + at * (4 * lanes), align=4 * _STEP)
            for token, total in enumerate(totals):
                activation = code.load(FLOAT, 0, x + (width * token + at) * 4, align=4)
                total.set(code.fused_multiply_add(weights, activation.broadcast(lanes), total.get()))
        return [total.get() for total in totals]
