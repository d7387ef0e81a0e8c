"""Matrices of 8 x 8 32-bit lanes in registers, turned on their diagonal."""

from shared.quants.simd.vector import Value

_UNPACKED = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
_PAIRED = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_HALVED = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def transposed(rows: list[Value]) -> list[Value]:
    """Eight vectors of 8 lanes, or of 16 that hold two matrices side by side: lane i of vector j becomes lane
    j of vector i."""
    pairs = [_each(rows[i], rows[i + 1], _UNPACKED) for i in range(0, 8, 2)]
    fours = [
        [*_each(pairs[i][0], pairs[i + 1][0], _PAIRED), *_each(pairs[i][1], pairs[i + 1][1], _PAIRED)]
        for i in (0, 2)
    ]
    eights = [_each(upper, lower, _HALVED) for upper, lower in zip(*fours, strict=True)]
    return [column[0] for column in eights] + [column[1] for column in eights]


def _each(first: Value, second: Value, choices: tuple[list[int], list[int]]) -> list[Value]:
    """Two shuffles. Lanes 0-7 are `first`'s, 8-15 `second`'s; a second matrix beside it is treated alike."""
    lanes = first.lanes
    return [
        first.shuffled(
            [
                base + lane if lane < 8 else lanes + base + lane - 8
                for base in range(0, lanes, 8)
                for lane in chosen
            ],
            second,
        )
        for chosen in choices
    ]
