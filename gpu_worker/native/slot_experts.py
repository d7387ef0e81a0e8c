"""Experts in slots as one native call: their routes in waves, each wave a program that a team runs.

::

    step 0    gather     copies the activations of each route's token side by side
    step 1    round      them, where a kernel wants that
    step 2    gate, up   of every expert, for its routes
    step 3    gate up    h = silu(gate) * up
    step 4    round      h, where a kernel wants that
    step 5    down       of every expert
    step 6    add        the products to the sums, weighted, in the order of the routes

A wave is up to `WAVE_ROUTES` routes; an expert with routes in two waves takes part in both. For one token of
which every expert has one route, the activations are used where they lie.

Addresses and strides are in bytes, other numbers in elements.
"""

import functools
from collections.abc import Callable

from gpu_worker.native.moe import PRODUCTS
from shared.native.matrices import (
    ROUNDED_AT_ONCE,
    ROUNDING_NS,
    UNITS_A_THREAD,
    grain_of,
    plane_at,
    plane_bytes,
    row_cost_ns,
    set_matrix,
    set_part_of_plane,
    set_plane,
    unit_cost_ns,
    up_to_line,
)
from shared.native.memory import floats_at, ids_at, integers_at
from shared.native.program import ENTRY_BYTES, seal_entries, set_entry
from shared.native.records import fields, reader
from shared.native.team import num_threads, run_entries
from shared.quants.jit import INTEGER, compile_kernel, compile_task, jitable
from shared.quants.matrix import GROUP as QUANT_GROUP
from shared.quants.matrix import MATRIX, PLANE

WAVE_ROUTES = 512
"""As of the cpu_worker's waves: more are worth little, and buffers of about 30 kB a route stay in the last
cache."""
SMALLEST_MEMORY = 4096
"""Enough to find out how much is needed."""

SLOT_LAYER = fields(
    *("gate_task", "up_task", "down_task", "quantise_task"),  # of shared.quants
    *("gather_task", "gated_task", "add_task"),  # the tasks below, and that of gpu_worker.native.moe
    *("gate_at", "up_at", "down_at"),  # where the matrices begin in a slot
    *("gate_row_bytes", "up_row_bytes", "down_row_bytes"),
    "hidden",
    "width",  # of one expert
    "rounds_x",  # 1 where gate or up read rounded activations
    "rounds_h",  # 1 where down does
)
SLOT_WORK = fields(
    "layer",
    "buffers",  # i64 [num_groups]: addresses of slots
    "starts",  # i64 [num_groups + 1]: the first route of each group, and the number of routes
    "num_groups",
    "tokens",  # i32 [routes]
    "weights",  # f32 [routes]
    "x",  # f32 [num_tokens, hidden]
    "out",  # f32 [num_tokens, hidden]
    "num_tokens",
)
_GATHER = fields("source", "tokens", "out", "width")
_ADD = fields("products", "tokens", "weights", "num_routes", "out", "width")
_PLAN = fields(
    *("x_plane", "h_plane", "gather", "gated", "add"),  # records
    *("pieces", "entries"),
    *("x", "x_codes", "gate", "up", "h", "h_codes", "products"),  # of all routes of a wave
)

_layer_at, _work_at, _plan_at = reader(SLOT_LAYER), reader(SLOT_WORK), reader(_PLAN)
_gather_at, _add_at, _gated_at = reader(_GATHER), reader(_ADD), reader(PRODUCTS)

# A piece is what a wave has of a group: three MATRIX and two PLANE, each on cache lines of its own.
_RECORD_BYTES = 64
assert max(MATRIX.itemsize, PLANE.itemsize) <= _RECORD_BYTES
_GATE, _UP, _DOWN, _X_PLANE, _H_PLANE, _PIECE_BYTES = range(0, 6 * _RECORD_BYTES, _RECORD_BYTES)
_PLAN_BYTES = _PLAN.itemsize
_SMALL_RECORD_BYTES = 128
# Gather, two roundings, gate up and add; beside three for each piece.
_OTHER_ENTRIES = 5

# What a thread takes for a route that is gathered, for a value of h, and for one that is added. Rough, as all
# costs.
_ROUTE_NS = 500.0
_GATED_NS = 1.0
_ADDED_NS = 0.3
_SMALL_UNIT_NS = 10_000.0
_GATHERED_AT_ONCE = 16
# Where a kernel's tiles begin.
_TILE_ROWS = 16


def _gather_rows(params: int, start: int, stop: int, scratch: int) -> None:
    """Items: routes."""
    gather = _gather_at(params)
    tokens, width = ids_at(gather.tokens), gather.width
    for route in range(start, stop):
        row = floats_at(gather.source + tokens[route] * width * 4)
        out = floats_at(gather.out + route * width * 4)
        for i in range(width):
            out[i] = row[i]


@jitable
def _add_weighted(weight: float, products: int, out: int, count: int) -> None:
    values, sums = floats_at(products), floats_at(out)
    for i in range(count):
        sums[i] += weight * values[i]


def _add_routes(params: int, start: int, stop: int, scratch: int) -> None:
    """Items: columns of the sums."""
    add = _add_at(params)
    tokens, weights, width, first = ids_at(add.tokens), floats_at(add.weights), add.width, start * 4
    for route in range(add.num_routes):
        products, out = add.products + route * width * 4, add.out + tokens[route] * width * 4
        _add_weighted(weights[route], products + first, out + first, stop - start)


@functools.cache
def gather_rows_task() -> int:
    """Copies rows of tokens side by side."""
    return compile_task(_gather_rows, "gather_rows")


@functools.cache
def add_routes_task() -> int:
    """Adds weighted rows to those of their tokens."""
    return compile_task(_add_routes, "add_routes")


@jitable
def _lay_out(memory: int, layer_address: int, capacity: int, num_groups: int) -> int:
    """Divides the memory among what a wave of so many routes needs; returns the bytes of it."""
    plan, layer = _plan_at(memory), _layer_at(layer_address)
    hidden, width = layer.hidden, layer.width
    num_pieces = min(capacity, num_groups)
    at = memory + up_to_line(_PLAN_BYTES)
    plan.x_plane, plan.h_plane = at, at + _SMALL_RECORD_BYTES
    plan.gather, plan.gated = at + 2 * _SMALL_RECORD_BYTES, at + 3 * _SMALL_RECORD_BYTES
    plan.add = at + 4 * _SMALL_RECORD_BYTES
    plan.pieces = at + 5 * _SMALL_RECORD_BYTES
    plan.entries = plan.pieces + num_pieces * _PIECE_BYTES
    plan.x = up_to_line(plan.entries + (3 * num_pieces + _OTHER_ENTRIES) * ENTRY_BYTES)
    plan.x_codes = up_to_line(plan.x + capacity * hidden * 4)
    plan.gate = plan.x_codes + plane_bytes(capacity, hidden)
    plan.up = up_to_line(plan.gate + capacity * width * 4)
    plan.h = up_to_line(plan.up + capacity * width * 4)
    plan.h_codes = up_to_line(plan.h + capacity * width * 4)
    plan.products = plan.h_codes + plane_bytes(capacity, width)
    needed_bytes: int = plan.products + capacity * hidden * 4 - memory
    return needed_bytes


@jitable
def _set_piece(memory: int, layer_address: int, piece: int, buffer: int, place: int, count: int) -> None:
    """The records of an expert and `count` routes from that place in the wave on."""
    plan, layer = _plan_at(memory), _layer_at(layer_address)
    width, hidden = layer.width, layer.hidden
    set_part_of_plane(piece + _H_PLANE, plan.h_plane, place, count)
    row = place * width * 4
    gate, up, x_plane = buffer + layer.gate_at, buffer + layer.up_at, piece + _X_PLANE
    set_matrix(piece + _GATE, gate, layer.gate_row_bytes, x_plane, plan.gate + row, width)
    set_matrix(piece + _UP, up, layer.up_row_bytes, x_plane, plan.up + row, width)
    products = plan.products + place * hidden * 4
    down = buffer + layer.down_at
    set_matrix(piece + _DOWN, down, layer.down_row_bytes, piece + _H_PLANE, products, hidden)


@jitable
def _run_wave(
    memory: int, work_address: int, team: int, group: int, first: int, stop: int, is_direct: bool
) -> int:
    """Computes routes `first` to `stop` - 1, of groups from `group` on; returns the group that is next."""
    plan, work = _plan_at(memory), _work_at(work_address)
    layer = _layer_at(work.layer)
    hidden, width, count = layer.hidden, layer.width, stop - first
    buffers, starts = integers_at(work.buffers), integers_at(work.starts)
    entry, cost_ns, num_rows = plan.entries, 0.0, count
    if is_direct:
        num_rows = 1
        set_plane(plan.x_plane, work.x, plan.x_codes, 1, hidden)
    else:
        gather = _gather_at(plan.gather)
        gather.source, gather.tokens = work.x, work.tokens + first * 4
        gather.out, gather.width = plan.x, hidden
        set_plane(plan.x_plane, plan.x, plan.x_codes, count, hidden)
        entry = set_entry(entry, layer.gather_task, plan.gather, count, _GATHERED_AT_ONCE, 0)
        cost_ns += count * _ROUTE_NS
    if layer.rounds_x != 0:
        num_scales = num_rows * (hidden // QUANT_GROUP)
        entry = set_entry(entry, layer.quantise_task, plan.x_plane, num_scales, ROUNDED_AT_ONCE, 1)
        cost_ns += num_scales * ROUNDING_NS
    set_plane(plan.h_plane, plan.h, plan.h_codes, count, width)
    num_pieces, is_cut = 0, False
    while not is_cut and group < work.num_groups and starts[group] < stop:
        begin, end = max(starts[group], first), min(starts[group + 1], stop)
        if begin < end:
            piece = plan.pieces + num_pieces * _PIECE_BYTES
            place = 0 if is_direct else begin - first
            set_part_of_plane(piece + _X_PLANE, plan.x_plane, place, end - begin)
            _set_piece(memory, work.layer, piece, buffers[group], begin - first, end - begin)
            num_pieces += 1
        is_cut = starts[group + 1] > stop
        if not is_cut:
            group += 1
    num_units = num_threads(team) * UNITS_A_THREAD
    gate_up_ns = 2 * width * row_cost_ns(hidden, num_pieces, count)
    down_ns = hidden * row_cost_ns(width, num_pieces, count)
    gate_up_unit_ns, down_unit_ns = unit_cost_ns(gate_up_ns, num_units), unit_cost_ns(down_ns, num_units)
    for number in range(num_pieces):
        piece = plan.pieces + number * _PIECE_BYTES
        num_routes = plane_at(piece + _H_PLANE).num_tokens
        grain = grain_of(row_cost_ns(hidden, 1, num_routes), gate_up_unit_ns, _TILE_ROWS)
        entry = set_entry(entry, layer.gate_task, piece + _GATE, width, grain, 2)
        entry = set_entry(entry, layer.up_task, piece + _UP, width, grain, 2)
    gated = _gated_at(plan.gated)
    gated.gate, gated.up, gated.out, gated.width = plan.gate, plan.up, plan.h, width
    grain = grain_of(width * _GATED_NS, _SMALL_UNIT_NS, 1)
    entry = set_entry(entry, layer.gated_task, plan.gated, count, grain, 3)
    if layer.rounds_h != 0:
        num_scales = count * (width // QUANT_GROUP)
        entry = set_entry(entry, layer.quantise_task, plan.h_plane, num_scales, ROUNDED_AT_ONCE, 4)
        cost_ns += num_scales * ROUNDING_NS
    for number in range(num_pieces):
        piece = plan.pieces + number * _PIECE_BYTES
        row_ns = row_cost_ns(width, 1, plane_at(piece + _H_PLANE).num_tokens)
        grain = grain_of(row_ns, down_unit_ns, _TILE_ROWS)
        entry = set_entry(entry, layer.down_task, piece + _DOWN, hidden, grain, 5)
    add = _add_at(plan.add)
    add.products, add.tokens, add.weights = plan.products, work.tokens + first * 4, work.weights + first * 4
    add.num_routes, add.out, add.width = count, work.out, hidden
    grain = grain_of(count * _ADDED_NS, _SMALL_UNIT_NS, _TILE_ROWS)
    entry = set_entry(entry, layer.add_task, plan.add, hidden, grain, 6)
    cost_ns += gate_up_ns + down_ns + count * (width * _GATED_NS + hidden * _ADDED_NS)
    num_entries = (entry - plan.entries) // ENTRY_BYTES
    run_entries(team, plan.entries, num_entries, seal_entries(plan.entries, num_entries), int(cost_ns))
    return group


def _compute(work_address: int, team: int, memory: int, memory_bytes: int) -> int:
    work = _work_at(work_address)
    starts, num_groups = integers_at(work.starts), work.num_groups
    num_routes = starts[num_groups]
    needed_bytes = _lay_out(memory, work.layer, min(num_routes, WAVE_ROUTES), num_groups)
    if needed_bytes > memory_bytes:
        return needed_bytes
    is_direct = work.num_tokens == 1
    for group in range(num_groups):
        is_direct &= starts[group + 1] - starts[group] < 2
    first, group = 0, 0
    while first < num_routes:
        stop = min(first + WAVE_ROUTES, num_routes)
        group = _run_wave(memory, work_address, team, group, first, stop, is_direct)
        first = stop
    return 0


@functools.cache
def compute_slots() -> Callable[[int, int, int, int], int]:
    """Takes the addresses of a SLOT_WORK, of a team (`Team.address`), and of at least SMALLEST_MEMORY bytes,
    64-byte aligned, and how many there are. Returns 0; or, having done nothing, the bytes that it needs."""
    return compile_kernel(_compute, "compute_slots", *4 * (INTEGER,))
