"""One layer's experts as one native call: groups the routes, writes the program, runs it on the team.

The program, for waves 0 to n - 1 (`cpu_worker.expert_tasks` says what the tasks do)::

    step 0        round the activations
    step 1        gather wave 0
    step 2        gate_up wave 0,      gather wave 1
    step 3        gate_up wave 1,      gather wave 2,      down wave 0
    ...
    step n + 2                                             down wave n - 1

A step overlaps the stages of three waves, so that the end of a wave leaves no thread without work; every
other wave therefore uses the same buffers. Steps without items (tokens that lie side by side need no
gathering) cost nothing. For one token this is: round, gate_up, down.

All records and buffers lie in one piece of memory, which each call lays out anew.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cpu_worker.expert_tasks import (
    GATHER,
    GROUP,
    GROUP_STRIDE,
    PARTIAL_BYTES,
    WAVE,
    WAVE_ROUTES,
    gather_at,
    group_at,
    layer_at,
    wave_at,
)
from shared.native.matrices import (
    ROUNDED_AT_ONCE,
    ROUNDING_NS,
    UNITS_A_THREAD,
    grain_of,
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
from shared.quants.jit import INTEGER, READONLY_ROWS, ROWS, compile_kernel, jitable
from shared.quants.matrix import GROUP as QUANT_GROUP
from shared.quants.matrix import MATRIX, PLANE

Compute = Callable[
    [int, int, int, int, NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]],
    int,
]

TOO_LITTLE_MEMORY = 1 << 48
"""`compute` returns this plus the number of bytes it needs."""
SMALLEST_MEMORY = 4096
"""Enough to find out how much is needed."""

# Addresses in the memory, and what the layout follows from.
_PLAN = fields(
    "counts",  # i64 [num_experts]: where the routes of an expert end
    "tokens",  # i32 [routes], in the order of the experts
    "weights",  # f32 [routes]
    "gathered",  # i32 [routes]: routes of each wave that have to be gathered, counted from its first
    "groups",  # GROUP_STRIDE each
    "waves",  # _WAVE_STRIDE each
    "entries",  # ENTRY
    "step_plane",  # PLANE: the activations of the step
    "step_codes",
    "gather_buffers",  # two of gather_bytes
    "h_buffers",  # two of h_bytes: gate and h, up, rounded h
    "num_tokens",
    "wave_rows",  # the most routes of a wave
    "gather_floats_bytes",
    "gather_bytes",
    "h_floats_bytes",
    "h_bytes",
)
_PLAN_BYTES, _PLANE_BYTES = _PLAN.itemsize, PLANE.itemsize
_plan_at = reader(_PLAN)

# Records behind a GROUP, and behind a WAVE.
_GATE = GROUP.itemsize
_UP = _GATE + MATRIX.itemsize
_X_PLANE = _UP + MATRIX.itemsize
_H_PLANE = _X_PLANE + PLANE.itemsize
assert _H_PLANE + PLANE.itemsize <= GROUP_STRIDE
_WAVE_STRIDE = 256
_GATHER = WAVE.itemsize
_GATHERED_PLANE = _GATHER + GATHER.itemsize
assert _GATHERED_PLANE + PLANE.itemsize <= _WAVE_STRIDE

# What a thread takes for a route that is gathered. Rough, as all costs.
_ROUTE_NS = 500.0
_GATHERED_AT_ONCE = 16
# Each unit goes through all experts of the wave, which is cheaper with more columns at a time.
_DOWN_UNITS_A_THREAD = 8
# Where a kernel's tiles begin, and what activations share a scale.
_DOWN_MULTIPLE = 16
_GATE_UP_MULTIPLE = 32


@jitable
def _lay_out(memory: int, layer_address: int, num_tokens: int, num_chosen: int) -> int:
    """Writes a _PLAN to the begin of the memory, the layout of the rest; returns the bytes of all."""
    plan, layer = _plan_at(memory), layer_at(layer_address)
    hidden, width, num_experts = layer.hidden, layer.width, layer.num_experts
    most_routes = num_tokens * num_chosen
    # A group that fills a wave is divided; two waves that follow each other have more than one wave's routes.
    most_groups = min(most_routes, num_experts) + most_routes // WAVE_ROUTES
    most_waves = 2 * (most_routes // WAVE_ROUTES) + 1
    wave_rows = min(most_routes, WAVE_ROUTES)
    plan.num_tokens = num_tokens
    plan.wave_rows = wave_rows
    plan.gather_floats_bytes = up_to_line(wave_rows * hidden * 4) if layer.reads_floats != 0 else 0
    plan.gather_bytes = plan.gather_floats_bytes + plane_bytes(wave_rows, hidden)
    plan.h_floats_bytes = up_to_line(wave_rows * width * 4)
    plan.h_bytes = 2 * plan.h_floats_bytes + plane_bytes(wave_rows, width)

    plan.counts = memory + up_to_line(_PLAN_BYTES)
    plan.tokens = plan.counts + up_to_line(num_experts * 8)
    plan.weights = plan.tokens + up_to_line(most_routes * 4)
    plan.gathered = plan.weights + up_to_line(most_routes * 4)
    plan.groups = plan.gathered + up_to_line(most_routes * 4)
    plan.waves = plan.groups + most_groups * GROUP_STRIDE
    plan.entries = plan.waves + most_waves * _WAVE_STRIDE
    plan.step_plane = plan.entries + (most_groups + 2 * most_waves + 1) * ENTRY_BYTES
    plan.step_codes = plan.step_plane + up_to_line(_PLANE_BYTES)
    plan.gather_buffers = plan.step_codes + plane_bytes(num_tokens, hidden)
    plan.h_buffers = plan.gather_buffers + 2 * plan.gather_bytes
    num_bytes: int = plan.h_buffers + 2 * plan.h_bytes - memory
    return num_bytes


@jitable
def _sort_routes(memory: int, num_experts: int, expert_ids: Any, route_weights: Any) -> int:
    """Writes tokens and weights of the routes in the order of their experts, those of one expert in the order
    of the tokens; returns how many there are, or -1 - expert for one that does not exist."""
    plan = _plan_at(memory)
    counts, tokens, weights = integers_at(plan.counts), ids_at(plan.tokens), floats_at(plan.weights)
    num_tokens, num_chosen = expert_ids.shape
    for expert in range(num_experts):
        counts[expert] = 0
    for token in range(num_tokens):
        for rank in range(num_chosen):
            expert = expert_ids[token, rank]
            if expert >= num_experts:
                return int(-1 - expert)
            if expert >= 0:
                counts[expert] += 1
    num_routes = 0
    for expert in range(num_experts):
        count = counts[expert]
        counts[expert] = num_routes
        num_routes += count
    for token in range(num_tokens):
        for rank in range(num_chosen):
            expert = expert_ids[token, rank]
            if expert >= 0:
                at = counts[expert]
                counts[expert] = at + 1
                tokens[at] = token
                weights[at] = route_weights[token, rank]
    return num_routes


@jitable
def _begin_wave(memory: int, layer: int, number: int, first_route: int, groups: int, out: int) -> int:
    """Writes the records of a wave that has no groups yet; returns its address."""
    plan = _plan_at(memory)
    address: int = plan.waves + number * _WAVE_STRIDE
    wave = wave_at(address)
    wave.layer = layer
    wave.groups = groups
    wave.num_groups = 0
    wave.num_routes = 0
    wave.tokens = plan.tokens + first_route * 4
    wave.weights = plan.weights + first_route * 4
    wave.out = out
    wave.num_tokens = plan.num_tokens
    wave.is_first = 1 if number == 0 else 0
    gather = gather_at(address + _GATHER)
    gather.layer = layer
    gather.from_plane = plan.step_plane
    gather.to_plane = address + _GATHERED_PLANE
    gather.routes = plan.gathered + first_route * 4
    gather.tokens = wave.tokens
    gather.num_routes = 0
    buffer = plan.gather_buffers + (number & 1) * plan.gather_bytes
    hidden = layer_at(layer).hidden
    set_plane(gather.to_plane, buffer, buffer + plan.gather_floats_bytes, plan.wave_rows, hidden)
    return address


@jitable
def _are_side_by_side(tokens: Any, count: int) -> bool:
    num_steps = 0
    for i in range(1, count):
        num_steps += 1 if tokens[i] == tokens[i - 1] + 1 else 0
    return num_steps == count - 1


@jitable
def _add_group(memory: int, wave_address: int, parity: int, expert: int, count: int) -> None:
    """Adds the next `count` routes, all of one expert, to a wave."""
    plan, wave, gather = _plan_at(memory), wave_at(wave_address), gather_at(wave_address + _GATHER)
    layer = layer_at(wave.layer)
    width, first = layer.width, wave.num_routes
    address = wave.groups + wave.num_groups * GROUP_STRIDE
    group = group_at(address)
    group.layer = wave.layer
    group.gate_matrix = address + _GATE
    group.up_matrix = address + _UP
    group.x_plane = address + _X_PLANE
    group.h_plane = address + _H_PLANE
    group.down_weights = layer.down_weights + expert * layer.hidden * layer.down_row_bytes
    group.num_routes = count
    tokens = ids_at(wave.tokens + first * 4)
    if _are_side_by_side(tokens, count):
        set_part_of_plane(group.x_plane, gather.from_plane, tokens[0], count)
    else:
        set_part_of_plane(group.x_plane, gather.to_plane, first, count)
        routes = ids_at(gather.routes)
        for i in range(count):
            routes[gather.num_routes + i] = first + i
        gather.num_routes += count
    h_buffer = plan.h_buffers + parity * plan.h_bytes
    gate_out = h_buffer + first * width * 4
    up_out = gate_out + plan.h_floats_bytes
    gate = layer.gate_weights + expert * width * layer.gate_row_bytes
    up = layer.up_weights + expert * width * layer.up_row_bytes
    set_matrix(group.gate_matrix, gate, layer.gate_row_bytes, group.x_plane, gate_out, width)
    set_matrix(group.up_matrix, up, layer.up_row_bytes, group.x_plane, up_out, width)
    # The rounded h of the whole wave, and of it the rows of this group.
    set_plane(group.h_plane, h_buffer, h_buffer + 2 * plan.h_floats_bytes, plan.wave_rows, width)
    set_part_of_plane(group.h_plane, group.h_plane, first, count)
    wave.num_groups += 1
    wave.num_routes += count


@jitable
def _write_waves(memory: int, layer_address: int, out: int) -> tuple[int, int]:
    """Writes all waves and groups; returns the numbers of waves and of experts that were chosen."""
    plan = _plan_at(memory)
    counts, num_experts = integers_at(plan.counts), layer_at(layer_address).num_experts
    num_waves = num_chosen = start = 0
    wave_address, groups = 0, plan.groups
    for expert in range(num_experts):
        end = counts[expert]
        if end > start:
            num_chosen += 1
        while start < end:
            count = min(end - start, WAVE_ROUTES)
            if num_waves == 0 or wave_at(wave_address).num_routes + count > WAVE_ROUTES:
                wave_address = _begin_wave(memory, layer_address, num_waves, start, groups, out)
                num_waves += 1
            _add_group(memory, wave_address, (num_waves - 1) & 1, expert, count)
            groups += GROUP_STRIDE
            start += count
    return num_waves, num_chosen


@jitable
def _row_ns(wave_address: int, width: int) -> float:
    """What one row of every group's matrix costs together."""
    wave = wave_at(wave_address)
    return row_cost_ns(width, wave.num_groups, wave.num_routes)


@jitable
def _write_entries(memory: int, layer_address: int, num_waves: int, threads: int) -> tuple[int, float]:
    """Writes the program; returns where its entries end, and what it costs in ns."""
    plan, layer = _plan_at(memory), layer_at(layer_address)
    hidden, width = layer.hidden, layer.width
    entry, cost_ns = plan.entries, 0.0
    if layer.activation_bytes != 0:
        num_groups = plan.num_tokens * (hidden // QUANT_GROUP)
        cost_ns += num_groups * ROUNDING_NS
        entry = set_entry(entry, layer.quantise_task, plan.step_plane, num_groups, ROUNDED_AT_ONCE, 0)
    for step in range(1, num_waves + 3):
        if 2 <= step <= num_waves + 1:
            address = plan.waves + (step - 2) * _WAVE_STRIDE
            wave = wave_at(address)
            wave_ns = 2 * width * _row_ns(address, hidden)
            unit_ns = unit_cost_ns(wave_ns, threads * UNITS_A_THREAD)
            cost_ns += wave_ns
            for number in range(wave.num_groups):
                group_address = wave.groups + number * GROUP_STRIDE
                row_ns = 2 * row_cost_ns(hidden, 1, group_at(group_address).num_routes)
                grain = grain_of(row_ns, unit_ns, _GATE_UP_MULTIPLE)
                entry = set_entry(entry, layer.gate_up, group_address, width, grain, step)
        if 1 <= step <= num_waves:
            gather_address = plan.waves + (step - 1) * _WAVE_STRIDE + _GATHER
            num_routes = gather_at(gather_address).num_routes
            cost_ns += num_routes * _ROUTE_NS
            entry = set_entry(entry, layer.gather, gather_address, num_routes, _GATHERED_AT_ONCE, step)
        if step >= 3:
            address = plan.waves + (step - 3) * _WAVE_STRIDE
            row_ns = _row_ns(address, width)
            unit_ns = unit_cost_ns(hidden * row_ns, threads * _DOWN_UNITS_A_THREAD)
            cost_ns += hidden * row_ns
            most = PARTIAL_BYTES // (4 * wave_at(address).num_routes)
            grain = grain_of(row_ns, min(unit_ns, most * row_ns), _DOWN_MULTIPLE)
            entry = set_entry(entry, layer.down, address, hidden, grain, step)
    return entry, cost_ns


@jitable
def compute_layer(
    layer_address: int,
    team: int,
    memory: int,
    memory_bytes: int,
    x: Any,
    expert_ids: Any,
    route_weights: Any,
    out: Any,
) -> int:
    """Native: computes a layer's experts for all tokens of a step.

    Addresses of a LAYER, of a team (`Team.address`) and of at least SMALLEST_MEMORY bytes, 64-byte aligned;
    x float32 [tokens, hidden], expert_ids int32 [tokens, chosen], weights float32 [tokens, chosen] and out
    float32 [tokens, hidden], all C-contiguous. Returns the number of experts computed; or, having written
    nothing to `out`, -1 - expert where that one does not exist, and TOO_LITTLE_MEMORY + the bytes it needs
    where there are fewer.
    """
    layer = layer_at(layer_address)
    num_tokens, num_chosen = expert_ids.shape
    needed_bytes = _lay_out(memory, layer_address, num_tokens, num_chosen)
    if needed_bytes > memory_bytes:
        return TOO_LITTLE_MEMORY + needed_bytes
    num_routes = _sort_routes(memory, layer.num_experts, expert_ids, route_weights)
    if num_routes < 0:
        return num_routes
    out_address = out.ctypes.data
    if num_routes == 0:
        sums = floats_at(out_address)
        for i in range(num_tokens * layer.hidden):
            sums[i] = 0
        return 0
    plan = _plan_at(memory)
    set_plane(plan.step_plane, x.ctypes.data, plan.step_codes, num_tokens, layer.hidden)
    num_waves, num_groups = _write_waves(memory, layer_address, out_address)
    entries = plan.entries
    end, cost_ns = _write_entries(memory, layer_address, num_waves, num_threads(team))
    num_entries = (end - entries) // ENTRY_BYTES
    num_units = seal_entries(entries, num_entries)
    run_entries(team, entries, num_entries, num_units, int(cost_ns))
    return num_groups


def _compute(
    layer: int,
    team: int,
    memory: int,
    memory_bytes: int,
    x: Any,
    expert_ids: Any,
    route_weights: Any,
    out: Any,
) -> int:
    return compute_layer(layer, team, memory, memory_bytes, x, expert_ids, route_weights, out)


@functools.cache
def compute() -> Compute:
    """`compute_layer` as a function for Python."""
    ids = types.Array(types.int32, 2, "C", readonly=True)
    arrays = READONLY_ROWS, ids, READONLY_ROWS, ROWS
    return compile_kernel(_compute, "compute_experts", *4 * (INTEGER,), *arrays)
