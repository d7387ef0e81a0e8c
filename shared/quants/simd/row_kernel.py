"""A few tokens: each row of weights is decoded in registers and multiplied where it is.

A row is bound by memory or by its decoding, so a block is read once, for all tokens, and its codes never
leave the registers. Codes are made unsigned by a bias, since that is what the instructions take on one side;
what the bias adds is taken off with the sums of the activations, together with the format's minimums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.gguf.types import TensorType
from shared.quants.matrix import GROUP, HALF_GROUP
from shared.quants.simd.description import Block, Blocks, GroupDescription, NumberedScales
from shared.quants.simd.registers import Dots
from shared.quants.simd.vector import FLOAT, I8, I16, Code, Value, Variable, total_of

_GROUP_LANES = 8
# Of each token: sums of products in turn, so that one addition need not wait for the one before. As many
# however many tokens there are, so that their results are the same.
_NUM_SUMS = 2
# Blocks of one scale are short; so many of them, and of groups, are taken in one round of the loop at most.
_BLOCKS_A_ROUND = 4
_GROUPS_A_ROUND = 8
# How far ahead of the reads memory is asked for. Anything from 1 to 4 KiB does.
_PREFETCH_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Inputs:
    """One token, by addresses: signed codes, scales, and sums, of 16 or, where scales of weights belong to
    whole groups, of 32."""

    codes: Value
    scales: Value
    sums: Value
    code_bytes: int
    sum_bytes: int

    def at(self, group: Value) -> "Inputs":
        """From a group on."""
        return Inputs(
            self.codes + group * (GROUP * self.code_bytes),
            self.scales + group * 4,
            self.sums + group * self.sum_bytes,
            self.code_bytes,
            self.sum_bytes,
        )


class RowKernel:
    """Writes the code that multiplies one row with a few tokens."""

    def __init__(self, code: Code, kind: TensorType, description: GroupDescription) -> None:
        self._code = code
        self._kind = kind
        self._description = description
        # Groups that share a register.
        self._side_by_side = code.instructions.lanes32 // _GROUP_LANES
        self._lanes = code.instructions.lanes32
        self._dots = Dots(code, self._lanes)
        # Of an activation.
        self._code_bytes = code.activation_bytes
        self._groups = kind.block_size // GROUP
        self._has_one_scale = description.scale_size >= kind.block_size
        self._uses_signs = self._dots.needs_signs(description.largest_magnitude)
        self._bias = 0 if self._uses_signs else -description.smallest_code

    @property
    def _rounds(self) -> list[int]:
        """How many blocks a round takes: as many as there may be, then, for what is left, fewer."""
        rounds = [max(1, min(_BLOCKS_A_ROUND, _GROUPS_A_ROUND // self._groups))]
        while rounds[-1] > 1:
            # Of 32 weights hardly ever one is left: the widths of models are multiples of 128.
            rounds.append(rounds[-1] // 2 if self._groups > 1 else 1)
        return rounds

    def _pairs(self, num_groups: int) -> list[tuple[int, int]]:
        """Which groups of a round share a register."""
        if self._groups == 1 or not self._description.block_pairs:
            return [(group, group + 1) for group in range(0, num_groups, 2)]
        return [
            (first + a, first + b)
            for first in range(0, num_groups, self._groups)
            for a, b in self._description.block_pairs
        ]

    def _pair_halves(self, pair: tuple[int, int]) -> list[int]:
        """The halves of two groups in the order of the register."""
        natural = [2 * pair[0], 2 * pair[0] + 1, 2 * pair[1], 2 * pair[1] + 1]
        return [natural[place] for place in self._description.pair_order]

    @property
    def _needs_sums(self) -> bool:
        return bool(self._bias) or self._description.has_minimums

    @property
    def _has_own_sums(self) -> bool:
        """Whether sums of 32 serve, since no scale belongs to less."""
        return self._needs_sums and self._description.scale_size >= GROUP

    @staticmethod
    def input_bytes(code: Code, width: Value) -> Value:
        """What `write_inputs` writes for a token, in whole cache lines."""
        return (width * code.activation_bytes + (width >> 3) + 63) & -64

    def write_inputs(self, width: Value, codes: Value, sums: Value, to: Value) -> None:
        """Copies one token's codes, signed and in the order in which rows are decoded, and adds up its sums
        where they are wanted of whole groups."""
        self._write_codes(width, codes, to)
        if not self._has_own_sums:
            return
        code = self._code
        own_sums = to + width * self._code_bytes
        with code.loop(0, width >> 5) as group:
            total = code.load(FLOAT, 2, sums + group * 8).total()
            code.store(total, own_sums + group * 4, align=4)

    def inputs(self, width: Value, scales: Value, sums: Value, written: Value) -> Inputs:
        """One token, by its scales and sums, and by what was written of it."""
        if self._has_own_sums:
            return Inputs(written, scales, written + width * self._code_bytes, self._code_bytes, sum_bytes=4)
        return Inputs(written, scales, sums, self._code_bytes, sum_bytes=8)

    def _write_codes(self, width: Value, codes: Value, to: Value) -> None:
        code = self._code
        done = code.integer(0)
        for count in self._rounds:
            num_groups, size = count * self._groups, count * self._kind.block_size
            until = width - code.remainder(width, size)
            with code.loop(done, until, size) as at:
                read, written = codes + at * self._code_bytes, to + at * self._code_bytes
                for halves in self._register_halves(num_groups):
                    self._write_register(read, halves, written)
                    written = written + len(halves) * HALF_GROUP * self._code_bytes
            done = until

    def _register_halves(self, num_groups: int) -> list[list[int]]:
        """The halves of groups that each register of a round holds, in its order."""
        if self._side_by_side == 1 or num_groups == 1:
            return [[2 * group, 2 * group + 1] for group in range(num_groups)]
        return [self._pair_halves(pair) for pair in self._pairs(num_groups)]

    def _write_register(self, codes: Value, halves: list[int], to: Value) -> None:
        """What is multiplied with one register of weights: bytes as those lie; of words first those that
        belong to the lower eight of every 16 weights, then the others."""
        code = self._code
        for place, half in enumerate(halves):
            if self._code_bytes == 1:
                signed = code.load(I8, HALF_GROUP, codes + half * HALF_GROUP) ^ -128
                code.store(signed, to + place * HALF_GROUP, align=HALF_GROUP)
                continue
            for upper in (0, 1):
                words = code.load(I16, 8, codes + (2 * half + upper) * HALF_GROUP)
                code.store(words, to + (upper * len(halves) + place) * HALF_GROUP, align=HALF_GROUP)

    def write(self, row: Value, width: Value, tokens: list[Inputs], spare: Value) -> list[Value]:
        """The products of the row at address `row` with each token; `spare` is the address of memory for 16
        floats a token."""
        code, kind = self._code, self._kind
        totals = [
            [Variable(code, code.splat(FLOAT, self._lanes, 0.0)) for _ in range(_NUM_SUMS)] for _ in tokens
        ]
        num_blocks = code.divided(width, code.integer(kind.block_size))

        def write_round(first: Value, count: int) -> None:
            address = row + first * kind.block_bytes
            blocks = [Block(code, address + number * kind.block_bytes) for number in range(count)]
            here = [token.at(first * self._groups) for token in tokens]
            self._write_round(blocks, here, totals, spare)
            for line in range(0, count * kind.block_bytes, 64):
                code.prefetch(address + (_PREFETCH_BYTES + line))

        done = code.integer(0)
        for count in self._rounds:
            until = num_blocks & -count
            with code.loop(done, until, count) as first:
                write_round(first, count)
            done = until
        return [total_of(sums) for sums in totals]

    def _write_round(
        self, blocks: list[Block], tokens: list[Inputs], totals: list[list[Variable]], spare: Value
    ) -> None:
        """One block with a vector of scales, or several with one scale each."""
        code = self._code
        block = blocks[0] if len(blocks) == 1 else Blocks(code, blocks)
        factors, shift = self._factors(block)
        num_groups = self._groups * len(blocks)
        per_group = not factors.lanes or factors.lanes == num_groups
        if shift is not None:
            for token, sums in zip(tokens, totals, strict=True):
                self._take_off(shift, token, sums)
        if self._scales_numbers:
            self._write_numbered(block, num_groups, tokens, totals, spare)
            return
        x_scales = [code.load(FLOAT, num_groups, token.scales) for token in tokens]
        if not factors.lanes:
            factors = factors.broadcast(1)
        combined = [factors * (scales if per_group else scales.repeated(2)) for scales in x_scales]
        is_spread_by_memory = per_group and self._side_by_side == 1
        if is_spread_by_memory:
            # Whence a scale comes back in every lane for nothing.
            for number, scales in enumerate(combined):
                code.store(scales, spare + 64 * number, align=4)
        for place, (codes, halves) in enumerate(self._registers(blocks, num_groups)):
            dots = self._dots_of(codes, place, tokens, len(halves))
            for number, (dot, sums) in enumerate(zip(dots, totals, strict=True)):
                if is_spread_by_memory:
                    factor = code.load(FLOAT, 0, spare + (64 * number + 4 * place), align=4)
                    factor = factor.broadcast(self._lanes)
                else:
                    factor = self._spread(combined[number], halves, per_group)
                total = sums[place % len(sums)]
                total.set(code.fused_multiply_add(dot, factor, total.get()))

    @property
    def _scales_numbers(self) -> bool:
        """Whether products are scaled as 16-bit integers, which on AVX2 costs no more than adding them up."""
        is_numbered = isinstance(self._description, NumberedScales)
        return is_numbered and not self._dots.has_vnni and self._code_bytes == 1

    def _write_numbered(
        self,
        block: Block,
        num_groups: int,
        tokens: list[Inputs],
        totals: list[list[Variable]],
        spare: Value,
    ) -> None:
        """The products of one block, by way of its scales' numbers."""
        code, description = self._code, self._description
        assert isinstance(description, NumberedScales)
        unit = description.unit(block).broadcast(num_groups)
        for number, token in enumerate(tokens):
            x_scales = code.load(FLOAT, num_groups, token.scales)
            code.store(unit * x_scales, spare + 64 * number, align=4)
        numbers = description.scale_numbers(block)
        halves = [numbers.shuffled([*range(first, first + 8)] * 2) for first in (0, 8)]
        for group in range(num_groups):
            codes = description.codes(block, group) + self._bias
            # In both halves of the register the same eight numbers: of those, one for each half.
            places = [
                2 * (2 * group % 8 + half) + byte for half in (0, 1) for _ in range(8) for byte in (0, 1)
            ]
            spread = code.bytes_shuffled(halves[group // 4].as_type(I8, 32), places).as_type(I16, 16)
            for number, (token, sums) in enumerate(zip(tokens, totals, strict=True)):
                activations = code.load(I8, GROUP, token.codes + group * GROUP)
                dot = self._dots.scaled(self._dots.pairs(codes, activations), spread).to_float()
                factor = code.load(FLOAT, 0, spare + (64 * number + 4 * group), align=4)
                total = sums[group % len(sums)]
                total.set(code.fused_multiply_add(dot, factor.broadcast(self._lanes), total.get()))

    def _registers(self, blocks: list[Block], num_groups: int) -> Iterator[tuple[Value, list[int]]]:
        """Codes of a round, register by register, made unsigned, and the halves of groups they belong to."""

        def place_of(group: int) -> tuple[Block, int]:
            return blocks[group // self._groups], group % self._groups

        if self._side_by_side == 1 or num_groups == 1:
            for group in range(num_groups):
                codes = self._description.codes(*place_of(group)) + self._bias
                yield codes if self._side_by_side == 1 else self._padded(codes), [2 * group, 2 * group + 1]
            return
        for pair in self._pairs(num_groups):
            first, second = (place_of(group) for group in pair)
            yield self._description.pair_codes(first, second) + self._bias, self._pair_halves(pair)

    def _spread(self, combined: Value, halves: list[int], per_group: bool) -> Value:
        """The factors of halves of groups, each in the four lanes of its products."""
        lanes = [half // 2 if per_group else half for half in halves for _ in range(4)]
        # What has no group is multiplied with no products.
        return combined.shuffled(lanes + [0] * (self._lanes - len(lanes)))

    def _factors(self, block: Block) -> tuple[Value, Value | None]:
        """The scales, one for each group or half group, and what each unit of an activation's sum takes off,
        shaped alike; scalars where there is one group."""
        factors = self._description.scales(block)
        shift = factors * float(self._bias) if self._bias else None
        if self._description.has_minimums:
            minimums = self._description.minimums(block)
            shift = minimums if shift is None else shift + minimums
        if not self._has_one_scale or self._groups == 1:
            return factors, shift
        # One scale for several groups.
        if not factors.lanes:
            factors = factors.broadcast(1)
            shift = shift.broadcast(1) if shift is not None else None
        return factors.repeated(self._groups), shift.repeated(self._groups) if shift is not None else None

    def _take_off(self, shift: Value, token: Inputs, sums: list[Variable]) -> None:
        code = self._code
        if not shift.lanes:
            shift = shift.broadcast(1)
        x_sums = code.load(FLOAT, shift.lanes, token.sums)
        for number, first in enumerate(range(0, shift.lanes, self._lanes)):
            lanes = range(first, first + min(self._lanes, shift.lanes))
            left, right = shift.shuffled(lanes), x_sums.shuffled(lanes)
            if left.lanes < self._lanes:
                left, right = self._padded(left), self._padded(right)
            total = sums[number % len(sums)]
            total.set(code.fused_multiply_add(-left, right, total.get()))

    def _padded(self, values: Value) -> Value:
        """With zeros to a whole register. (The activations beside them may be anything: whatever follows.)"""
        zeros = self._code.splat(values.element, values.lanes, 0)
        missing = self._lanes * (1 if values.element == FLOAT else 4) - values.lanes
        return values.shuffled([*range(values.lanes), *([values.lanes] * missing)], zeros)

    def _dots_of(self, codes: Value, place: int, tokens: list[Inputs], num_halves: int) -> list[Value]:
        """The sums of products of a round's register number `place`, which holds so many halves of groups,
        with each token, as floats. Four lanes belong to the 16 weights of a half: each to four of them."""
        size = 4 * self._lanes
        if self._code_bytes == 1:
            add = self._dots.add_signed if self._uses_signs else self._dots.add
            loaded = [self._code.load(I8, size, token.codes + place * size) for token in tokens]
            return [add(self._dots.zero(), codes, activations).to_float() for activations in loaded]
        weights = self._dots.widened(codes)
        results = []
        for token in tokens:
            sums = self._dots.zero()
            for upper in (0, 1):
                address = token.codes + (2 * place * size + upper * num_halves * HALF_GROUP)
                activations = self._code.load(I16, size // 2, address)
                sums = self._dots.add_words(sums, weights[upper], activations)
            results.append(sums.to_float())
        return results
