"""What a block format says about itself, from which its kernels follow.

A block is cut into groups of 32 weights. `codes` makes the signed codes of one group, a vector of 32 bytes in
the order of the weights; `scales` the factors of all weights of the block, one for each `scale_size` of them;
`minimums`, where there are some, what is taken off:

    value = code * scale - minimum
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from llvmlite import ir

from shared.quants.simd.vector import DOUBLE, HALF, I1, I8, I16, I32, I64, Code, Value


class Block:
    """One encoded block, at an address. Reads are unsigned."""

    def __init__(self, code: Code, address: Value) -> None:
        self.code = code
        self._address = address
        self._made: dict[str, list[Value]] = {}

    def once(self, name: str, make: Callable[["Block"], list[Value]]) -> list[Value]:
        """What all groups of the block use, made when the first of them asks."""
        if name not in self._made:
            self._made[name] = make(self)
        return self._made[name]

    def bytes(self, offset: int, count: int) -> Value:
        """`count` bytes side by side."""
        return self._read(I8, count, offset)

    def words(self, offset: int, count: int) -> Value:
        """`count` 16-bit numbers side by side."""
        return self._read(I16, count, offset)

    def byte(self, offset: int) -> Value:
        """One byte, as an int64."""
        return self._read(I8, 0, offset).zero_extended(I64)

    def word(self, offset: int) -> Value:
        """16 bits, as an int64."""
        return self._read(I16, 0, offset).zero_extended(I64)

    def double_word(self, offset: int) -> Value:
        """32 bits, as an int32."""
        return self._read(I32, 0, offset)

    def quad_word(self, offset: int) -> Value:
        """64 bits."""
        return self._read(I64, 0, offset)

    def strided_double_words(self, offset: int, count: int, stride: int) -> Value:
        """`count` 32-bit numbers that begin `stride` bytes apart, side by side."""
        words = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
        for number in range(count):
            word = self.double_word(offset + number * stride)
            words = self.code.builder.insert_element(words, word.ir, ir.Constant(I32, number))
        return self.code.value(words)

    def half(self, offset: int) -> Value:
        """A half-precision number, as a float32."""
        return self._halves([self.word(offset)]).lane(0)

    def _halves(self, words: Sequence[Value]) -> Value:
        """Up to four half-precision numbers by their bits, as float32 side by side.

        By way of a general register: an instruction that loads 16 bits into a vector waits for whatever the
        vector's other bits were last used for, which here is the whole round before.
        """
        # Twice, or LLVM would see that one lane is all that is wanted, and use that instruction.
        packed = words[0] | words[0] << 16 if len(words) == 1 else words[0]
        for place, word in enumerate(words[1:], start=1):
            packed = packed | word << (16 * place)
        return packed.as_type(HALF, 4).to_float().shuffled(range(len(words)))

    def _read(self, element: ir.Type, lanes: int, offset: int) -> Value:
        return self.code.load(element, lanes, self._address + offset, constant=True)


class Blocks(Block):
    """Several blocks with one scale each: the scales side by side."""

    def __init__(self, code: Code, blocks: Sequence[Block]) -> None:
        super().__init__(code, code.integer(0))
        self._blocks = blocks

    def half(self, offset: int) -> Value:
        """One of each block."""
        return self._halves([block.word(offset) for block in self._blocks])


class GroupDescription(ABC):
    """A format whose weights are codes with scales."""

    scale_size = 32
    """Weights that share a scale: 16, 32, or more where one scale serves the whole block."""
    smallest_code = -128
    largest_code = 127
    """What `codes` may be. Magnitudes up to 64 let a kernel add neighbouring products in 16 bits."""
    has_minimums = False
    is_tile_scheduled = False
    """Whether tiles are decoded faster where LLVM orders the instructions; see `machine_code.Module`."""

    @property
    def largest_magnitude(self) -> int:
        """Of a code."""
        return max(self.largest_code, -self.smallest_code)

    @abstractmethod
    def codes(self, block: Block, group: int) -> Value:
        """Signed codes of weights 32 * group and on: 32 bytes."""

    def scales(self, block: Block) -> Value:
        """The factors: a float scalar where one serves the block, else a vector of them."""
        raise NotImplementedError

    # Two groups to a register, where it has room: by default neighbours, one's weights after the other's.
    # A format overrides this where its bytes are closer to another order. The halves of a group, its weights
    # 0-15 and 16-31, are what may be put in order.

    block_pairs: tuple[tuple[int, int], ...] = ()
    """Which groups of a block go together; () are neighbours."""
    pair_order: tuple[int, int, int, int] = (0, 1, 2, 3)
    """The order of their halves in the register: 0 and 1 are the first group's, 2 and 3 the second's."""

    def pair_codes(self, first: tuple[Block, int], second: tuple[Block, int]) -> Value:
        """The signed codes of two groups, each named by its block and its number there: 64 bytes."""
        return self.codes(*first).joined(self.codes(*second))

    def minimums(self, block: Block) -> Value:
        """What is taken off, shaped as `scales`."""
        raise NotImplementedError


# What several formats do with a vector


def to_floats(numbers: Value) -> Value:
    """Unsigned bytes or words as floats."""
    return numbers.zero_extended(I32).to_float()


def nibbles(packed: Value) -> Value:
    """All low halves of some bytes, then all high halves."""
    return (packed & 15).joined(packed >> 4)


def interleaved_nibbles(packed: Value) -> Value:
    """The low half of each byte, then its high half."""
    lanes = packed.lanes
    order = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True) for lane in pair]
    return (packed & 15).shuffled(order, packed >> 4)


def bits_for_pair(packed: Value, first_shift: int, second_shift: int) -> Value:
    """32 bytes shifted right by one number, then the same bytes by another. Bits of a neighbour come in from
    above, as far as a byte is shifted: they are to be masked off."""
    twice = packed.joined(packed).as_type(I16, 32)
    shifts = packed.code.constant(I16, [first_shift] * 16 + [second_shift] * 16)
    return (twice >> shifts).as_type(I8, 64)


def spread_bits(code: Code, bits: Value) -> Value:
    """An int32 as 32 conditions, lowest bit first."""
    return code.value(code.builder.bitcast(bits.ir, ir.VectorType(I1, 32)))


def negated_where(code: Code, is_negative: Value, magnitudes: Value) -> Value:
    """Magnitudes with signs."""
    return code.choose(is_negative, -magnitudes, magnitudes)


def looked_up(code: Code, table: Value, entry_bytes: int, indexes: Sequence[Value]) -> Value:
    """Entries of 4 or 8 bytes at int64 indexes, side by side: a vector of bytes."""
    # As doubles, two of which are one load each into the halves of a register.
    element = {4: I32, 8: DOUBLE}[entry_bytes]
    entries = ir.Constant(ir.VectorType(element, len(indexes)), ir.Undefined)
    for place, index in enumerate(indexes):
        entry = code.load(element, 0, table + index * entry_bytes, constant=True)
        entries = code.builder.insert_element(entries, entry.ir, ir.Constant(I32, place))
    return code.value(entries).as_type(I8, entry_bytes * len(indexes))


def fields(word: Value, width: int, count: int, stride: int | None = None) -> list[Value]:
    """`count` fields of `width` bits of a 64-bit number, lowest first, `stride` bits apart."""
    apart = stride or width
    return [(word >> (apart * number)) & ((1 << width) - 1) for number in range(count)]


def even_parity(code: Code, signs: Value) -> Value:
    """Seven sign bits a byte, with the eighth that makes their number even."""
    return signs | ((code.count_bits(signs) & 1) << 7)


def bits_of_bytes(code: Code, packed: Value, first: int, count: int = 4, stride: int = 1) -> Value:
    """Each bit of `count` bytes, `stride` apart from `first` on, as a condition, lowest bit first: 8 * count
    conditions."""
    repeated = packed.shuffled([first + lane // 8 * stride for lane in range(8 * count)])
    picked = repeated & code.constant(I8, [1 << (lane % 8) for lane in range(8 * count)])
    return code.value(code.builder.icmp_unsigned("!=", picked.ir, code.like(picked, 0).ir))


def packed_signs(code: Code, word: Value) -> Value:
    """Four times seven sign bits of an int32, each with the eighth that makes their number even: 32
    conditions."""
    sevens = (word.broadcast(4) >> code.constant(I32, [0, 7, 14, 21])) & 127
    return bits_of_bytes(code, even_parity(code, sevens.as_type(I8, 16)), 0, stride=4)


def all_or_nothing(bits: Sequence[Value]) -> Value:
    """Four bits, each eight times, as an int32."""
    spread = bits[0] | bits[1] << 8 | bits[2] << 16 | bits[3] << 24
    return (spread * 255).truncated(I32)


class NumberedScales(GroupDescription):
    """A format whose scales are whole numbers of 16 weights each, times one unit for the block."""

    scale_size = 16

    @abstractmethod
    def scale_numbers(self, block: Block) -> Value:
        """One for each 16 weights: signed 16-bit integers."""

    @abstractmethod
    def unit(self, block: Block) -> Value:
        """What they count, a float."""

    def scales(self, block: Block) -> Value:
        numbers = self.scale_numbers(block)
        return numbers.sign_extended(I32).to_float() * self.unit(block).broadcast(numbers.lanes)
