"""Plans of layers as machine code: the records, and the call (`shared.placement.planner`).

Routes are counted by expert, experts get their ways, groups their places, and then the routes are written:
two passes over the routes and some over the experts, of which there are few hundred.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types

from shared.native.memory import floats_at, ids_at, integers_at
from shared.native.records import fields, reader
from shared.placement.layer_plan import CPU, DEVICE, NUM_WAYS, SKIPPED, TRANSFER
from shared.quants.jit import INTEGER, compile_kernel, jitable

NO_EXPERT, NO_LAYER, TOO_MANY, WRONG_WIDTH = -1, -2, -3, -4
"""Why a plan is refused: what is returned instead of 0."""

PLAN = fields(
    # The table, and what is gathered of uses (`ResidencyTable`, `Hotness`).
    "slot_of",
    "read_marks",
    "last_used",
    "window_routes",
    "prompt_routes",
    "prompt_tokens",
    "num_layers",
    "num_experts",
    "num_used",
    "max_tokens",
    # Scratch, i32.
    "route_counts",  # [num_experts]
    "best_ranks",  # [num_experts]
    "ways",  # [num_experts]
    "cursors",  # [num_experts]: where the next route of an expert goes
    "groups_of_size",  # [max_tokens x num_used + 1]
    # The plan, i32.
    "cpu_ids",
    "group_experts",
    "group_slots",
    "group_starts",
    "route_tokens",
    "route_places",
    "token_routes",  # [3, max_tokens]: on the device, transferred, skipped
    # i64 [4] in the order of the ways.
    "group_totals",
    "route_totals",
    # What was refused.
    "wrong_token",
    "wrong_rank",
    carry=np.float64,  # of transfers that the share has promised, and not made
)
_plan_at = reader(PLAN)


@jitable
def _count_routes(address: int, expert_ids: Any) -> int:
    """How many routes each expert has, and its best rank; returns NO_EXPERT for one that does not exist."""
    plan = _plan_at(address)
    counts, best_ranks, num_experts = ids_at(plan.route_counts), ids_at(plan.best_ranks), plan.num_experts
    num_tokens, num_ranks = expert_ids.shape
    for expert in range(num_experts):
        counts[expert] = 0
        best_ranks[expert] = num_ranks
    for token in range(num_tokens):
        for rank in range(num_ranks):
            expert = expert_ids[token, rank]
            if expert >= num_experts:
                plan.wrong_token = token
                plan.wrong_rank = rank
                return NO_EXPERT
            if expert >= 0:
                counts[expert] += 1
                best_ranks[expert] = min(best_ranks[expert], rank)
    return 0


@jitable
def _choose_ways(address: int, layer: int, ticket: int, skip_rank: int) -> int:
    """Writes the ways of all experts that have routes, as if nothing were transferred, and marks slots and
    experts as used; returns how many groups the CPU has."""
    plan = _plan_at(address)
    num_experts = plan.num_experts
    counts, best_ranks, ways = ids_at(plan.route_counts), ids_at(plan.best_ranks), ids_at(plan.ways)
    slot_of = ids_at(plan.slot_of + 4 * layer * num_experts)
    last_used = integers_at(plan.last_used + 8 * layer * num_experts)
    read_marks = integers_at(plan.read_marks)
    num_missed = 0
    for expert in range(num_experts):
        if counts[expert] == 0:
            continue
        last_used[expert] = max(last_used[expert], ticket)
        slot = slot_of[expert]
        if slot >= 0:
            ways[expert] = DEVICE
            read_marks[slot] = max(read_marks[slot], ticket)
        elif skip_rank > 0 and best_ranks[expert] >= skip_rank:
            ways[expert] = SKIPPED
        else:
            ways[expert] = CPU
            num_missed += 1
    return num_missed


@jitable
def _choose_transfers(address: int, num_transfers: int) -> None:
    """Of the CPU's groups so many are transferred, those with most routes, then those of lowest expert."""
    plan = _plan_at(address)
    counts, ways, groups_of_size = ids_at(plan.route_counts), ids_at(plan.ways), ids_at(plan.groups_of_size)
    num_experts, largest = plan.num_experts, 0
    for expert in range(num_experts):
        largest = max(largest, counts[expert])
    for size in range(largest + 1):
        groups_of_size[size] = 0
    for expert in range(num_experts):
        if counts[expert] > 0 and ways[expert] == CPU:
            groups_of_size[counts[expert]] += 1
    # All larger groups than that, and as many of that size as are left.
    size, left = largest, num_transfers
    while size > 0 and groups_of_size[size] <= left:
        left -= groups_of_size[size]
        size -= 1
    for expert in range(num_experts):
        if counts[expert] == 0 or ways[expert] != CPU:
            continue
        if counts[expert] > size:
            ways[expert] = TRANSFER
        elif counts[expert] == size and left > 0:
            ways[expert] = TRANSFER
            left -= 1


@jitable
def _write_groups(address: int, layer: int) -> None:
    """Writes the groups of the device, then those that are transferred, and counts all."""
    plan = _plan_at(address)
    num_experts = plan.num_experts
    counts, ways, cursors = ids_at(plan.route_counts), ids_at(plan.ways), ids_at(plan.cursors)
    slot_of = ids_at(plan.slot_of + 4 * layer * num_experts)
    experts, slots, starts = ids_at(plan.group_experts), ids_at(plan.group_slots), ids_at(plan.group_starts)
    group_totals, route_totals = integers_at(plan.group_totals), integers_at(plan.route_totals)
    for way in range(NUM_WAYS):
        group_totals[way] = 0
        route_totals[way] = 0
    number = start = 0
    for written in range(2):
        for expert in range(num_experts):
            if counts[expert] == 0:
                continue
            way = ways[expert]
            if way == written:
                experts[number] = expert
                slots[number] = slot_of[expert] if way == DEVICE else -1
                starts[number] = start
                cursors[expert] = start
                number += 1
                start += counts[expert]
            if way == written or (written == 0 and way > TRANSFER):
                group_totals[way] += 1
                route_totals[way] += counts[expert]
    starts[number] = start


@jitable
def _write_routes(address: int, layer: int, expert_ids: Any, is_prompt: int) -> None:
    """Writes the routes of the groups and of the CPU, and gathers all for the count of uses."""
    plan = _plan_at(address)
    num_tokens, num_ranks = expert_ids.shape
    ways, cursors = ids_at(plan.ways), ids_at(plan.cursors)
    tokens, places, cpu_ids = ids_at(plan.route_tokens), ids_at(plan.route_places), ids_at(plan.cpu_ids)
    on_device, max_tokens = ids_at(plan.token_routes), plan.max_tokens
    transferred = ids_at(plan.token_routes + 4 * max_tokens)
    skipped = ids_at(plan.token_routes + 8 * max_tokens)
    gathered = plan.prompt_routes if is_prompt else plan.window_routes
    uses = floats_at(gathered + 4 * layer * plan.num_experts)
    if is_prompt:
        integers_at(plan.prompt_tokens)[layer] += num_tokens
    for token in range(num_tokens):
        num_device = num_transferred = num_skipped = 0
        for rank in range(num_ranks):
            expert, place = expert_ids[token, rank], token * num_ranks + rank
            cpu_ids[place] = -1
            if expert < 0:
                continue
            uses[expert] += np.float32(1)
            way = ways[expert]
            if way == CPU:
                cpu_ids[place] = expert
            elif way == SKIPPED:
                num_skipped += 1
            else:
                at = cursors[expert]
                cursors[expert] = at + 1
                tokens[at] = token
                places[at] = place
                if way == DEVICE:
                    num_device += 1
                else:
                    num_transferred += 1
        on_device[token] = num_device
        transferred[token] = num_transferred
        skipped[token] = num_skipped


def _plan_layer(
    address: int,
    layer: int,
    expert_ids: Any,
    ticket: int,
    transfer_share: float,
    most_transfers: int,
    skip_rank: int,
    is_prompt: int,
) -> int:
    plan = _plan_at(address)
    num_tokens, num_ranks = expert_ids.shape
    if not 0 <= layer < plan.num_layers:
        return NO_LAYER
    if num_tokens > plan.max_tokens:
        return TOO_MANY
    if num_ranks != plan.num_used:
        return WRONG_WIDTH
    refusal = _count_routes(address, expert_ids)
    if refusal != 0:
        return refusal
    num_missed = _choose_ways(address, layer, ticket, skip_rank)
    due = plan.carry + num_missed * transfer_share
    num_transfers = min(int(due), num_missed, most_transfers)
    # Where transfers are bounded the share cannot be met, and shall not be caught up with ever after.
    plan.carry = min(due - num_transfers, 1.0)
    if num_transfers > 0:
        _choose_transfers(address, num_transfers)
    _write_groups(address, layer)
    _write_routes(address, layer, expert_ids, is_prompt)
    return 0


@functools.cache
def plan_layer_kernel() -> Callable[[int, int, Any, int, float, int, int, int], int]:
    """`plan(PLAN address, layer, expert ids, ticket, share, most transfers, skip rank, is a prompt)`: 0, or a
    refusal."""
    routes = types.Array(types.int32, 2, "C", readonly=True)
    kinds = INTEGER, INTEGER, routes, INTEGER, types.float64, INTEGER, INTEGER, INTEGER
    return compile_kernel(_plan_layer, "plan_layer", *kinds)
