"""The records of one layer's experts in a step: what waves and groups there are, and where their memory is.

All records and buffers lie in one piece of memory, which each call lays out anew. What is done with them is
for `cpu_worker.expert_program`, and `cpu_worker.expert_arrivals`.
"""

from typing import Any

import numpy as np

from cpu_worker.expert_pool import blobs_at, part_address, pool_at
from cpu_worker.expert_tasks import (
    GATHER,
    GROUP,
    GROUP_STRIDE,
    WAVE,
    WAVE_ROUTES,
    gather_at,
    group_at,
    layer_at,
    wave_at,
)
from shared.native.matrices import (
    matrix_at,
    plane_bytes,
    set_matrix,
    set_part_of_plane,
    set_plane,
    up_to_line,
)
from shared.native.memory import floats_at, ids_at, integers_at
from shared.native.program import ENTRY_BYTES
from shared.native.records import fields, reader
from shared.quants.jit import jitable
from shared.quants.matrix import MATRIX, PLANE

USE_HALF_LIFE_TOKENS = 128.0
"""After so many tokens a use of an expert counts half. A step counts as no more tokens than that, so that a
prompt whose experts are not those of the answer does not make all others forgotten
(`benchmarks.replacement`)."""
_MOST_USE_WEIGHT = 1e30

# Addresses in the memory, and what the layout follows from.
_PLAN = fields(
    "counts",  # i64 [num_experts]: where the routes of an expert end
    "tokens",  # i32 [routes], in the order of the experts
    "weights",  # f32 [routes]
    "gathered",  # i32 [routes]: routes of each wave that have to be gathered, counted from its first
    "groups",  # GROUP_STRIDE each
    "waves",  # WAVE_STRIDE each
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
plan_at = reader(_PLAN)

# Records behind a GROUP, and behind a WAVE.
_GATE = GROUP.itemsize
_UP = _GATE + MATRIX.itemsize
_X_PLANE = _UP + MATRIX.itemsize
_H_PLANE = _X_PLANE + PLANE.itemsize
assert _H_PLANE + PLANE.itemsize <= GROUP_STRIDE
WAVE_STRIDE = 256
GATHER_AT = WAVE.itemsize
_GATHERED_PLANE = GATHER_AT + GATHER.itemsize
assert _GATHERED_PLANE + PLANE.itemsize <= WAVE_STRIDE


@jitable
def lay_out(memory: int, layer_address: int, num_tokens: int, num_chosen: int) -> int:
    """Writes a _PLAN to the begin of the memory, the layout of the rest; returns the bytes of all."""
    plan, layer = plan_at(memory), layer_at(layer_address)
    hidden, width, num_experts = layer.hidden, layer.width, layer.num_experts
    most_routes = num_tokens * num_chosen
    # A group that fills a wave is divided; two waves that follow each other have more than one wave's routes.
    most_groups = min(most_routes, num_experts) + most_routes // WAVE_ROUTES
    most_waves = 2 * (most_routes // WAVE_ROUTES) + 1 + most_groups // groups_a_wave(layer_address)
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
    plan.entries = plan.waves + most_waves * WAVE_STRIDE
    plan.step_plane = plan.entries + (most_groups + 2 * most_waves + 1) * ENTRY_BYTES
    plan.step_codes = plan.step_plane + up_to_line(_PLANE_BYTES)
    plan.gather_buffers = plan.step_codes + plane_bytes(num_tokens, hidden)
    plan.h_buffers = plan.gather_buffers + 2 * plan.gather_bytes
    num_bytes: int = plan.h_buffers + 2 * plan.h_bytes - memory
    return num_bytes


@jitable
def sort_routes(memory: int, num_experts: int, expert_ids: Any, route_weights: Any) -> int:
    """Writes tokens and weights of the routes in the order of their experts, those of one expert in the order
    of the tokens; returns how many there are, or -1 - expert for one that does not exist."""
    plan = plan_at(memory)
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
    plan = plan_at(memory)
    address: int = plan.waves + number * WAVE_STRIDE
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
    gather = gather_at(address + GATHER_AT)
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
    plan, wave, gather = plan_at(memory), wave_at(wave_address), gather_at(wave_address + GATHER_AT)
    layer = layer_at(wave.layer)
    width, first = layer.width, wave.num_routes
    address = wave.groups + wave.num_groups * GROUP_STRIDE
    group = group_at(address)
    group.layer = wave.layer
    group.gate_matrix = address + _GATE
    group.up_matrix = address + _UP
    group.x_plane = address + _X_PLANE
    group.h_plane = address + _H_PLANE
    group.num_routes = count
    group.expert = expert
    group.is_due = 1
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
    set_matrix(group.gate_matrix, 0, layer.gate_row_bytes, group.x_plane, gate_out, width)
    set_matrix(group.up_matrix, 0, layer.up_row_bytes, group.x_plane, up_out, width)
    # The rounded h of the whole wave, and of it the rows of this group.
    set_plane(group.h_plane, h_buffer, h_buffer + 2 * plan.h_floats_bytes, plan.wave_rows, width)
    set_part_of_plane(group.h_plane, group.h_plane, first, count)
    wave.num_groups += 1
    wave.num_routes += count


@jitable
def set_weights(group_address: int) -> None:
    """Writes down where the weights of a group's expert are now."""
    group = group_at(group_address)
    layer, expert = layer_at(group.layer), group.expert
    if layer.blobs == 0:
        gate = layer.gate_weights + expert * layer.width * layer.gate_row_bytes
        up = layer.up_weights + expert * layer.width * layer.up_row_bytes
        down = layer.down_weights + expert * layer.hidden * layer.down_row_bytes
    else:
        blobs = blobs_at(layer.blobs)
        gate = part_address(layer.blobs, expert, blobs.gate_at, blobs.gate_offset, blobs.gate_bytes)
        up = part_address(layer.blobs, expert, blobs.up_at, blobs.up_offset, blobs.up_bytes)
        down = part_address(layer.blobs, expert, blobs.down_at, blobs.down_offset, blobs.down_bytes)
    matrix_at(group.gate_matrix).weights = gate
    matrix_at(group.up_matrix).weights = up
    group.down_weights = down


@jitable
def write_waves(memory: int, layer_address: int, out: int, most_groups: int) -> tuple[int, int]:
    """Writes all waves and groups, at most so many groups a wave, and counts the uses of experts; returns the
    numbers of waves and of experts that were chosen.

    Where a wave ends changes no result: groups are the same ones, and so is the order of all sums.
    """
    plan, layer = plan_at(memory), layer_at(layer_address)
    counts, num_experts = integers_at(plan.counts), layer.num_experts
    uses = floats_at(layer.uses)
    share = np.float32(_counted_tokens(plan.num_tokens) / plan.num_tokens)
    use_weight = floats_at(layer.use_weight)[0] * share
    num_waves = num_chosen = start = 0
    wave_address, groups = 0, plan.groups
    for expert in range(num_experts):
        end = counts[expert]
        if end > start:
            num_chosen += 1
            uses[expert] += use_weight * (end - start)
        while start < end:
            count = min(end - start, WAVE_ROUTES)
            if (
                num_waves == 0
                or wave_at(wave_address).num_routes + count > WAVE_ROUTES
                or wave_at(wave_address).num_groups == most_groups
            ):
                wave_address = _begin_wave(memory, layer_address, num_waves, start, groups, out)
                num_waves += 1
            _add_group(memory, wave_address, (num_waves - 1) & 1, expert, count)
            groups += GROUP_STRIDE
            start += count
    return num_waves, num_chosen


@jitable
def _counted_tokens(num_tokens: int) -> float:
    """As how many tokens those of a step count."""
    return min(float(num_tokens), USE_HALF_LIFE_TOKENS)


@jitable
def decay_uses(layer_address: int, num_tokens: int) -> None:
    """Lets what comes later count more, which is the same as to let what was before count less."""
    layer = layer_at(layer_address)
    weight = floats_at(layer.use_weight)
    weight[0] *= np.float32(2.0 ** (_counted_tokens(num_tokens) / USE_HALF_LIFE_TOKENS))
    if weight[0] > _MOST_USE_WEIGHT:
        uses = floats_at(layer.uses)
        for expert in range(layer.num_experts):
            uses[expert] /= weight[0]
        weight[0] = 1


@jitable
def groups_a_wave(layer_address: int) -> int:
    """Of a wave whose experts have to be waited for: half of the pool's places, the other half is for what
    comes next."""
    layer = layer_at(layer_address)
    if layer.blobs == 0:
        return WAVE_ROUTES
    half: int = pool_at(blobs_at(layer.blobs).pool).places_per_layer // 2
    return min(max(half, 1), WAVE_ROUTES)
