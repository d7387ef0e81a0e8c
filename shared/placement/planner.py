"""Which way each route of a layer takes: the device, a transfer to it, the CPU, or none.

Routes of one expert are a *group*, and a group goes one way. An expert that is resident is computed on the
device. Of those that are missed, a share is transferred to the device and computed there, those first that
most tokens want, since a transfer costs the same for one token as for many; the CPU computes the others.

`LayerPlanner.plan` is one call into machine code for each layer of each step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from shared.native.memory import floats_at, ids_at, integers_at
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.placement.hotness import MOST_PROMPT_TOKENS, Hotness
from shared.placement.layer_plan import CPU, DEVICE, NUM_WAYS, SKIPPED, TRANSFER, LayerPlan
from shared.placement.table import ResidencyTable
from shared.quants.jit import INTEGER, compile_kernel, jitable

SKIPS_NONE_FROM = 0.9
"""Coverage from which on no routes are skipped: so few are missed that leaving them out gains nothing. The
original engine's value."""

_NO_EXPERT, _NO_LAYER, _TOO_MANY, _WRONG_WIDTH = -1, -2, -3, -4

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
    "groups_of_size",  # [max_tokens + 1]
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


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What becomes of experts that are missed."""

    transfer_share: float = 0.0
    """The share of missed groups that are transferred, 0 to 1. It is met over time: what is left of one layer
    goes to the next one."""
    most_transfers: int = 1 << 30
    """Of one layer in one step."""
    skip_rank: int = 0
    """A missed expert that no token ranks among its first so many is left out; 0 leaves out none."""

    def __post_init__(self) -> None:
        if not 0 <= self.transfer_share <= 1:
            raise ValueError(f"the share of transfers is {self.transfer_share}; it can be 0 to 1")
        if self.most_transfers < 0 or self.skip_rank < 0:
            raise ValueError(
                f"{self.most_transfers} transfers at most, ranks from {self.skip_rank} on: neither can be "
                "negative"
            )


def skip_rank_at(coverage: float, skip_rank: int) -> int:
    """What `PlanRules.skip_rank` is to be where so many experts are resident (`ResidencyTable.coverage`)."""
    return 0 if coverage >= SKIPS_NONE_FROM else skip_rank


@jitable
def _count_routes(address: int, expert_ids: Any) -> int:
    """How many routes each expert has, and its best rank; returns _NO_EXPERT for one that does not exist."""
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
                return _NO_EXPERT
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
    num_experts, largest = plan.num_experts, plan.max_tokens
    for size in range(largest + 1):
        groups_of_size[size] = 0
    for expert in range(num_experts):
        if counts[expert] > 0 and ways[expert] == CPU:
            groups_of_size[min(counts[expert], largest)] += 1
    # All larger groups than that, and as many of that size as are left.
    size, left = largest, num_transfers
    while size > 0 and groups_of_size[size] <= left:
        left -= groups_of_size[size]
        size -= 1
    for expert in range(num_experts):
        if counts[expert] == 0 or ways[expert] != CPU:
            continue
        if min(counts[expert], largest) > size:
            ways[expert] = TRANSFER
        elif min(counts[expert], largest) == size and left > 0:
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
def _write_routes(address: int, layer: int, expert_ids: Any) -> None:
    """Writes the routes of the groups and of the CPU, and gathers all for the count of uses."""
    plan = _plan_at(address)
    num_tokens, num_ranks = expert_ids.shape
    ways, cursors = ids_at(plan.ways), ids_at(plan.cursors)
    tokens, places, cpu_ids = ids_at(plan.route_tokens), ids_at(plan.route_places), ids_at(plan.cpu_ids)
    on_device, max_tokens = ids_at(plan.token_routes), plan.max_tokens
    transferred = ids_at(plan.token_routes + 4 * max_tokens)
    skipped = ids_at(plan.token_routes + 8 * max_tokens)
    is_prompt = num_tokens > MOST_PROMPT_TOKENS
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
) -> int:
    plan = _plan_at(address)
    num_tokens, num_ranks = expert_ids.shape
    if not 0 <= layer < plan.num_layers:
        return _NO_LAYER
    if num_tokens > plan.max_tokens:
        return _TOO_MANY
    if num_ranks != plan.num_used:
        return _WRONG_WIDTH
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
    _write_routes(address, layer, expert_ids)
    return 0


@functools.cache
def _plan_layer_kernel() -> Callable[[int, int, Any, int, float, int, int], int]:
    routes = types.Array(types.int32, 2, "C", readonly=True)
    kinds = INTEGER, INTEGER, routes, INTEGER, types.float64, INTEGER, INTEGER
    return compile_kernel(_plan_layer, "plan_layer", *kinds)


class LayerPlanner:
    """Makes plans against one table; counts uses of experts. Calls come from the table's thread."""

    def __init__(self, table: ResidencyTable, hotness: Hotness, num_used: int, max_tokens: int) -> None:
        """Steps have up to `max_tokens` tokens, which use `num_used` experts each. Raises ValueError for a
        hotness of other experts than the table's."""
        if hotness.counts.shape != table.slot_of.shape:
            raise ValueError(
                f"uses are of {hotness.counts.shape} layers and experts, slots of {table.slot_of.shape}"
            )
        self._plan = LayerPlan(table.num_experts, num_used, max_tokens)
        scratch = {
            name: np.zeros(table.num_experts, np.int32)
            for name in ("route_counts", "best_ranks", "ways", "cursors")
        }
        scratch["groups_of_size"] = np.zeros(max_tokens + 1, np.int32)
        self._table = table
        self._kept = hotness, scratch
        self._record = record(
            PLAN,
            slot_of=table.slot_of,
            read_marks=table.read_marks,
            last_used=hotness.last_used,
            window_routes=hotness.window_routes,
            prompt_routes=hotness.prompt_routes,
            prompt_tokens=hotness.prompt_tokens,
            num_layers=table.num_layers,
            num_experts=table.num_experts,
            num_used=num_used,
            max_tokens=max_tokens,
            **scratch,
            **self._plan.arrays(),
        )
        self._address = address_of(self._record)
        self._run = _plan_layer_kernel()

    def plan(self, layer: int, expert_ids: NDArray[np.int32], ticket: int, rules: PlanRules) -> LayerPlan:
        """The ways of a layer's routes. `expert_ids`: int32 [tokens, num_used], contiguous, each token's best
        expert first; negative ones are nobody's. Slots that are used get the ticket as a mark of reading.

        Raises ValueError for a layer or an expert that there is not, too many tokens, or a ticket whose work
        has ended; nothing is marked then.
        """
        self._table.check_ticket(ticket)
        refusal = self._run(
            self._address,
            layer,
            expert_ids,
            ticket,
            rules.transfer_share,
            rules.most_transfers,
            rules.skip_rank,
        )
        if refusal:
            raise self._refused(refusal, layer, expert_ids)
        self._plan.num_tokens = len(expert_ids)
        return self._plan

    def _refused(self, refusal: int, layer: int, expert_ids: NDArray[np.int32]) -> ValueError:
        made = self._record[0]
        if refusal == _NO_LAYER:
            return ValueError(f"there is no layer {layer}; there are {made['num_layers']}")
        if refusal == _TOO_MANY:
            return ValueError(
                f"layer {layer}: a step of {len(expert_ids)} tokens; plans are made for up to "
                f"{made['max_tokens']}"
            )
        if refusal == _WRONG_WIDTH:
            return ValueError(
                f"layer {layer}: {expert_ids.shape[1]} experts a token; plans are made for {made['num_used']}"
            )
        token, rank = int(made["wrong_token"]), int(made["wrong_rank"])
        return ValueError(
            f"layer {layer}: token {token} has expert {expert_ids[token, rank]} at rank {rank}; "
            f"there are {made['num_experts']}"
        )
