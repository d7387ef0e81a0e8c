"""Several tokens: a tile of rows is decoded once, and then multiplied with all of them.

A tile is as many rows as a register has 32-bit lanes, R of them. Its codes are interleaved, as many of one
row as fit into a lane beside those of the next, so that one instruction multiplies R rows with the
activations of a token that stand in every lane, and no sum across lanes is ever needed:

    codes    i16 [width / 2, R, 2] for activations of two bytes, i8 [width / 4, R, 4] for those of one
    offsets  i32 [width / scale_size, R]   where sums of products with bytes begin
    scales   f32 [width / scale_size, R]
    minimums f32 [width / scale_size, R]   of formats that have them

Activations of one byte are unsigned, 128 more than they are. What that adds, 128 times the sum of the codes,
depends on the weights alone: the sums begin that much lower.
"""

from shared.gguf.types import TensorType
from shared.quants.matrix import CODE_STRIDE, GROUP
from shared.quants.simd.description import Block, GroupDescription
from shared.quants.simd.registers import Dots
from shared.quants.simd.transposing import transposed
from shared.quants.simd.vector import FLOAT, I8, I16, I32, NO_BYTE, Code, Value, Variable

_ACTIVATION_BIAS = 128


class TileKernel:
    """Writes the code for tiles of one format."""

    def __init__(self, code: Code, kind: TensorType, description: GroupDescription) -> None:
        self._code = code
        self._kind = kind
        self._description = description
        self.num_rows = code.instructions.lanes32
        # One scale for a whole block is as good as one for each group of it.
        self._scale_size = min(description.scale_size, GROUP)
        self._dots = Dots(code, self.num_rows)
        self._code_bytes = code.activation_bytes
        self._uses_signs = self._dots.needs_signs(description.largest_magnitude)
        self._has_offsets = not self._uses_signs and self._code_bytes == 1

    # Where things lie in the scratch memory

    def _layout(self, scratch: Value, width: Value) -> "_Tile":
        scale_bytes = (width * (4 * self.num_rows)) >> (4 if self._scale_size == 16 else 5)
        staging = scratch
        codes = staging + self.num_rows * self._kind.block_size
        offsets = codes + width * (self.num_rows * self._code_bytes)
        return _Tile(
            staging=staging,
            codes=codes,
            offsets=offsets,
            scales=offsets + scale_bytes,
            minimums=offsets + scale_bytes * 2,
        )

    def write_decoding(
        self, rows: Value, row_bytes: Value, last: Value, width: Value, scratch: Value
    ) -> None:
        """Decodes the rows at address `rows`; those after row `last` (counted from there) repeat it."""
        code, kind = self._code, self._kind
        tile = self._layout(scratch, width)
        num_blocks = code.divided(width, code.integer(kind.block_size))
        with code.loop(0, num_blocks) as number:
            first_scale = number * (kind.block_size // self._scale_size)
            with code.loop(0, self.num_rows) as row:
                address = rows + code.smaller(row, last) * row_bytes + number * kind.block_bytes
                self._write_row(Block(code, address), tile, row, first_scale)
            self._write_interleaving(tile, number * kind.block_size)

    def _write_row(self, block: Block, tile: "_Tile", row: Value, first_scale: Value) -> None:
        code, kind, description = self._code, self._kind, self._description
        for group in range(kind.block_size // GROUP):
            at = tile.staging + row * kind.block_size + group * GROUP
            code.store(description.codes(block, group), at)
        place = (first_scale * self.num_rows + row) * 4
        self._scatter(description.scales(block), tile.scales + place)
        if description.has_minimums:
            self._scatter(description.minimums(block), tile.minimums + place)

    def _scatter(self, values: Value, address: Value) -> None:
        """Each lane, or a scalar for all scale groups of the block, into its row's place."""
        count = self._kind.block_size // self._scale_size
        for number in range(count):
            value = values.lane(number) if values.lanes else values
            self._code.store(value, address + number * 4 * self.num_rows, align=4)

    def _write_interleaving(self, tile: "_Tile", first: Value) -> None:
        """Staged codes [R, block size] to [block size / 4, R, 4], and the offsets they ask for."""
        code, size = self._code, self._kind.block_size
        with code.loop(0, size, GROUP) as at:
            staged = [
                code.load(I32, GROUP // 4, tile.staging + at + row * size) for row in range(self.num_rows)
            ]
            # Two rows to a register where it has room for them: row r and row r + 8.
            if self.num_rows == 16:
                staged = [staged[row].joined(staged[row + 8]) for row in range(8)]
            quads = [quad.as_type(I8, 4 * self.num_rows) for quad in transposed(staged)]
            written = tile.codes + (first + at) * (self.num_rows * self._code_bytes)
            for quad in quads:
                for stored in [quad] if self._code_bytes == 1 else self._pairs_of(quad):
                    code.store(stored, written, align=32)
                    written = written + 4 * self.num_rows
            if self._has_offsets:
                self._write_offsets(tile, first + at, quads)

    def _pairs_of(self, quad: Value) -> list[Value]:
        """Four bytes a row as two words a row, and two more."""
        code, result = self._code, []
        for first in (0, 2):
            # To the upper byte of a word: from there a shift extends the sign.
            places = [
                4 * (byte // 4) + first + byte % 4 // 2 if byte % 2 else NO_BYTE for byte in range(16)
            ] * (self.num_rows // 4)
            words = code.bytes_shuffled(quad, places).as_type(I16, 2 * self.num_rows)
            result.append(words.shifted_right(8))
        return result

    def _write_offsets(self, tile: "_Tile", at: Value, quads: list[Value]) -> None:
        """Of the group of weights from `at` on, whose interleaved codes are `quads`."""
        code = self._code
        bias = code.splat(I8, 4 * self.num_rows, _ACTIVATION_BIAS)
        per_scale = self._scale_size // 4
        for part in range(GROUP // self._scale_size):
            sums = self._dots.zero()
            for quad in quads[part * per_scale : (part + 1) * per_scale]:
                sums = self._dots.add(sums, bias, quad)
            place = self._scale_index(at, part) * (4 * self.num_rows)
            code.store(-sums, tile.offsets + place, align=32)

    def _scale_index(self, weight: Value, part: int) -> Value:
        return (weight >> (4 if self._scale_size == 16 else 5)) + part

    def write_products(
        self,
        scratch: Value,
        width: Value,
        tokens: int,
        x: Value,
        scales: Value,
        sums: Value,
    ) -> list[Value]:
        """The products of the tile with `tokens` tokens, whose codes, scales and sums begin at these
        addresses: a vector of R rows for each."""
        code = self._code
        tile = self._layout(scratch, width)
        totals = [Variable(code, code.splat(FLOAT, self.num_rows, 0.0)) for _ in range(tokens)]
        with code.loop(0, width, GROUP) as at:
            self._write_group(tile, at, width, totals, x, scales, sums)
        return [total.get() for total in totals]

    def _write_group(
        self,
        tile: "_Tile",
        at: Value,
        width: Value,
        totals: list[Variable],
        x: Value,
        scales: Value,
        sums: Value,
    ) -> None:
        code = self._code
        group = at >> 5
        tokens = range(len(totals))
        inputs = self._spread_addresses(x + at * self._code_bytes, width * CODE_STRIDE, len(totals))
        x_scales = [scales + ((width >> 5) * token + group) * 4 for token in tokens]
        parts = GROUP // self._scale_size
        by_token: list[Value | None] = [None for _ in tokens]
        for part in range(parts):
            place = self._scale_index(at, part) * (4 * self.num_rows)
            products = self._part_sums(tile, at, part, inputs, place)
            factors = code.load(FLOAT, self.num_rows, tile.scales + place, align=32)
            for token in tokens:
                floats, earlier = products[token].to_float(), by_token[token]
                by_token[token] = (
                    floats * factors if earlier is None else code.fused_multiply_add(floats, factors, earlier)
                )
        for token in tokens:
            x_scale = code.load(FLOAT, 0, x_scales[token], align=4).broadcast(self.num_rows)
            product = by_token[token]
            assert product is not None
            totals[token].set(code.fused_multiply_add(product, x_scale, totals[token].get()))
        if not self._description.has_minimums:
            return
        x_sums = [sums + ((width >> 4) * token + (at >> 4)) * 4 for token in tokens]
        for part in range(parts):
            place = self._scale_index(at, part) * (4 * self.num_rows)
            minimums = -code.load(FLOAT, self.num_rows, tile.minimums + place, align=32)
            # Sums are of 16: adding two of them first would take longer than the second product.
            for half in range(part, part + 1) if parts == 2 else range(2):
                for token in tokens:
                    x_sum = code.load(FLOAT, 0, x_sums[token] + 4 * half, align=4).broadcast(self.num_rows)
                    totals[token].set(code.fused_multiply_add(minimums, x_sum, totals[token].get()))

    def _spread_addresses(self, first: Value, stride: Value, count: int) -> list[Value]:
        """So many addresses, `stride` bytes apart. An instruction adds a register, or twice a register, to
        another and a constant: with one register for every three addresses none has to be computed."""
        bases = [self._code.kept(first + stride * number) for number in range(0, count, 3)]
        return [bases[number // 3] + stride * (number % 3) for number in range(count)]

    def _part_sums(
        self, tile: "_Tile", at: Value, part: int, inputs: list[Value], place: Value
    ) -> list[Value]:
        """Sums of products over the weights of one scale, for each token."""
        code, lanes = self._code, self.num_rows
        if self._code_bytes == 2:
            return self._word_sums(tile, at, part, inputs)
        quads = range(part * self._scale_size // 4, (part + 1) * self._scale_size // 4)
        if self._has_offsets:
            offsets = code.load(I32, lanes, tile.offsets + place, align=32)
            sums = [offsets for _ in inputs]
        else:
            sums = [self._dots.zero() for _ in inputs]
        depth = self._depth()
        pairs: list[Value | None] = [None for _ in inputs]
        for count, quad in enumerate(quads, start=1):
            weights = code.load(I8, 4 * lanes, tile.codes + (at + 4 * quad) * lanes, align=32)
            for token, address in enumerate(inputs):
                four = code.load(I32, 0, address + 4 * quad).broadcast(lanes)
                if self._uses_signs:
                    signed = (four ^ -0x7F7F7F80).as_type(I8, 4 * lanes)
                    sums[token] = self._dots.add_signed(sums[token], weights, signed)
                    continue
                activations = four.as_type(I8, 4 * lanes)
                if self._dots.has_vnni:
                    sums[token] = self._dots.add(sums[token], activations, weights)
                    continue
                products, earlier = self._dots.pairs(activations, weights), pairs[token]
                pairs[token] = products = products if earlier is None else earlier + products
                if count % depth == 0 or count == len(quads):
                    sums[token] = sums[token] + self._dots.widen(products)
                    pairs[token] = None
        return sums

    def _word_sums(self, tile: "_Tile", at: Value, part: int, inputs: list[Value]) -> list[Value]:
        """The same with activations of two bytes."""
        code, lanes = self._code, self.num_rows
        sums = [self._dots.zero() for _ in inputs]
        for pair in range(part * self._scale_size // 2, (part + 1) * self._scale_size // 2):
            weights = code.load(I16, 2 * lanes, tile.codes + (at + 2 * pair) * (2 * lanes), align=32)
            for token, address in enumerate(inputs):
                two = code.load(I32, 0, address + 4 * pair).broadcast(lanes).as_type(I16, 2 * lanes)
                sums[token] = self._dots.add_words(sums[token], weights, two)
        return sums

    def _depth(self) -> int:
        """How many pairs of products may be added in 16 bits."""
        return max(1, 32767 // (2 * 255 * self._description.largest_magnitude))


class _Tile:
    """Addresses in the scratch memory."""

    def __init__(
        self, *, staging: Value, codes: Value, offsets: Value, scales: Value, minimums: Value
    ) -> None:
        self.staging = staging
        self.codes = codes
        self.offsets = offsets
        self.scales = scales
        self.minimums = minimums
