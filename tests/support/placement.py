"""Placement in plain Python: what the machine code of plans is compared with, and tables to plan against."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.placement.hotness import Hotness
from shared.placement.layer_plan import LayerPlan
from shared.placement.planner import LayerPlanner, PlanRules
from shared.placement.table import ResidencyTable


def empty_table(slots_per_layer: Sequence[int], num_experts: int) -> ResidencyTable:
    """With that many slots in each layer."""
    layers = np.repeat(np.arange(len(slots_per_layer)), slots_per_layer).astype(np.int32)
    return ResidencyTable(layers, len(slots_per_layer), num_experts)


def admit(table: ResidencyTable, slot: int, expert: int) -> None:
    """Makes the expert resident."""
    table.begin_load(slot, expert)
    table.publish(slot)


def planner_of(table: ResidencyTable, num_used: int, max_tokens: int) -> tuple[LayerPlanner, Hotness]:
    """A planner, and where it counts uses."""
    hotness = Hotness(table.num_layers, table.num_experts, num_used)
    return LayerPlanner(table, hotness, num_used, max_tokens), hotness


def ids_of(*tokens: Sequence[int]) -> NDArray[np.int32]:
    """The experts of each token."""
    return np.array(tokens, np.int32)


@dataclass(slots=True)
class NaivePlan:
    """Groups by expert: the places of their routes."""

    device: dict[int, list[int]] = field(default_factory=dict)
    transfer: dict[int, list[int]] = field(default_factory=dict)
    cpu: dict[int, list[int]] = field(default_factory=dict)
    skipped: dict[int, list[int]] = field(default_factory=dict)


class NaivePlanner:
    """Says what `LayerPlanner` shall say, the plain way."""

    def __init__(self) -> None:
        self._carry = 0.0

    def plan(self, table: ResidencyTable, layer: int, ids: NDArray[np.int32], rules: PlanRules) -> NaivePlan:
        groups: dict[int, list[int]] = {}
        for place, expert in enumerate(ids.ravel().tolist()):
            if expert >= 0:
                groups.setdefault(expert, []).append(place)
        made = NaivePlan()
        for expert, places in sorted(groups.items()):
            best = min(place % ids.shape[1] for place in places)
            if table.slot_of[layer, expert] >= 0:
                made.device[expert] = places
            elif rules.skip_rank and best >= rules.skip_rank:
                made.skipped[expert] = places
            else:
                made.cpu[expert] = places
        due = self._carry + len(made.cpu) * rules.transfer_share
        count = min(int(due), len(made.cpu), rules.most_transfers)
        self._carry = min(due - count, 1.0)
        chosen = sorted(made.cpu, key=lambda expert: (-len(made.cpu[expert]), expert))[:count]
        made.transfer = {expert: made.cpu.pop(expert) for expert in sorted(chosen)}
        return made


def check_plan(plan: LayerPlan, naive: NaivePlan, ids: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
    """`slots`: of the layer's experts, int32 [experts]."""
    num_used = ids.shape[1]
    groups = [*naive.device.items(), *naive.transfer.items()]
    assert plan.group_experts.tolist() == [expert for expert, _ in groups]
    assert plan.group_slots.tolist() == [*slots[list(naive.device)], *[-1] * len(naive.transfer)]
    starts = plan.group_starts.tolist()
    places = plan.route_places.tolist()
    assert [places[a:b] for a, b in itertools.pairwise(starts)] == [p for _, p in groups]
    assert plan.route_tokens.tolist() == [place // num_used for place in places]
    expected = np.full(ids.size, -1)
    for expert, cpu_places in naive.cpu.items():
        expected[cpu_places] = expert
    assert np.array_equal(np.maximum(plan.cpu_ids.ravel(), -1), expected)
    kinds = (naive.device, naive.transfer, naive.cpu, naive.skipped)
    assert (
        plan.num_device_groups,
        plan.num_transfer_groups,
        plan.num_cpu_groups,
        plan.num_skipped_groups,
    ) == tuple(len(kind) for kind in kinds)
    routes = (
        plan.num_device_routes,
        plan.num_transfer_routes,
        plan.num_cpu_routes,
        plan.num_skipped_routes,
    )
    assert routes == tuple(sum(map(len, kind.values())) for kind in kinds)
    assert sum(routes) == (ids >= 0).sum()
    counted = (plan.token_device_routes, plan.token_transfer_routes, plan.token_skipped_routes)
    for kind, per_token in zip((kinds[0], kinds[1], kinds[3]), counted, strict=True):
        tokens = [place // num_used for found in kind.values() for place in found]
        assert per_token.tolist() == np.bincount(tokens, minlength=len(ids)).tolist()
