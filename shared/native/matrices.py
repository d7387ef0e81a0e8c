"""Native: the records of matrix products (`shared.quants.matrix`) from compiled code, and what products cost.

Everything here is callable from compiled code only.
"""

from shared.native.records import reader
from shared.quants.jit import jitable
from shared.quants.matrix import CODE_STRIDE, GROUP, HALF_GROUP, MATRIX, PLANE

matrix_at = reader(MATRIX)
plane_at = reader(PLANE)

# What a thread takes for a weight that is read and decoded, and for a product with it. Rough: it only
# decides how work is divided among how many threads.
_WEIGHT_NS = 0.04
_PRODUCT_NS = 0.015

BYTE_NS = 0.08
"""What a thread takes for a byte of weights that is in no cache."""

ROUNDING_NS = 10.0
"""What a group of 32 activations takes to be rounded."""
ROUNDED_AT_ONCE = 512
"""Groups of activations that are one unit of work."""

UNITS_A_THREAD = 16
"""Into so many units, for each thread, a step is divided: the last one is waited for by the others."""
_MIN_UNIT_NS = 10_000.0
_MAX_UNIT_NS = 400_000.0


@jitable
def row_cost_ns(width: int, num_matrices: int, num_tokens: int) -> float:
    """One row of so many matrices, with so many tokens in all."""
    return width * (_WEIGHT_NS * num_matrices + _PRODUCT_NS * num_tokens)


@jitable
def unit_cost_ns(step_ns: float, num_units: int) -> float:
    """What a unit of a step should cost that is divided into about so many; not so little that claiming it
    costs more than that, nor more than others should ever wait for."""
    return min(max(step_ns / num_units, _MIN_UNIT_NS), _MAX_UNIT_NS)


@jitable
def grain_of(row_ns: float, unit_ns: float, multiple: int) -> int:
    """Rows to claim at a time: a multiple of `multiple`."""
    return max(int(unit_ns / row_ns) // multiple, 1) * multiple


@jitable
def up_to_line(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return (num_bytes + 63) & -64


@jitable
def plane_bytes(num_tokens: int, width: int) -> int:
    """For codes, scales and sums, each on cache lines of its own."""
    return (
        up_to_line(num_tokens * width * CODE_STRIDE)
        + up_to_line(num_tokens * (width // GROUP) * 4)
        + up_to_line(num_tokens * (width // HALF_GROUP) * 4)
    )


@jitable
def set_plane(address: int, floats: int, codes: int, num_tokens: int, width: int) -> None:
    """`codes` is where `plane_bytes(num_tokens, width)` begin."""
    plane = plane_at(address)
    plane.floats = floats
    plane.codes = codes
    plane.scales = codes + up_to_line(num_tokens * width * CODE_STRIDE)
    plane.sums = plane.scales + up_to_line(num_tokens * (width // GROUP) * 4)
    plane.width = width
    plane.num_tokens = num_tokens


@jitable
def set_part_of_plane(address: int, whole_address: int, first: int, count: int) -> None:
    """`count` tokens of another plane, from `first` on."""
    plane, whole = plane_at(address), plane_at(whole_address)
    width = whole.width
    plane.floats = whole.floats + first * width * 4
    plane.codes = whole.codes + first * width * CODE_STRIDE
    plane.scales = whole.scales + first * (width // GROUP) * 4
    plane.sums = whole.sums + first * (width // HALF_GROUP) * 4
    plane.width = width
    plane.num_tokens = count


@jitable
def set_matrix(address: int, weights: int, row_bytes: int, plane: int, out: int, out_stride: int) -> None:
    """All fields of a MATRIX."""
    matrix = matrix_at(address)
    matrix.weights = weights
    matrix.row_bytes = row_bytes
    matrix.plane = plane
    matrix.out = out
    matrix.out_stride = out_stride
