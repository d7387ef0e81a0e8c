"""Replays a trace of routes: what would have been where, had the model run with other slots and rules.

The table, plans, policies and shares are those of the engine; what is made up is time. A load that is
begun after a window takes so many windows, and rates of the link and the CPU are given. Slots are not lent to
prompts.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.placement.hotness import Counts, Hotness
from shared.placement.layer_plan import CPU, DEVICE, NUM_WAYS, SKIPPED, TRANSFER
from shared.placement.link_share import LinkShare
from shared.placement.planner import LayerPlanner, PlanRules, skip_rank_at
from shared.placement.policies import DECAY, EVERY, MOST_SWAPS, policy_named
from shared.placement.profile import assign_slots, fill_order
from shared.placement.rates import ASSUMED_CPU, ASSUMED_LINK
from shared.placement.swaps import begin_swap
from shared.placement.table import ResidencyTable
from shared.placement.trace import TraceHeader, TraceStep

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is tried. Settings are those of the engine that are named alike."""

    policy: str
    num_slots: int
    pcie_frac: float | None = None
    route_tail_skip: int = 0
    adapt_every: int = EVERY
    adapt_decay: float = DECAY
    adapt_swaps: int = MOST_SWAPS
    prefill_stream_min: int = 1024
    load_windows: int = 1
    """A load that is begun after a window can be read after so many more."""
    link_gb_s: float = ASSUMED_LINK / _GIGA
    """Of transfers, in 1e9 bytes a second; decides with the next one where `pcie_frac` is not given."""
    cpu_gb_s: float = ASSUMED_CPU / _GIGA
    """Of experts that the CPU computes."""


@dataclass(slots=True)
class Tally:
    """Routes of steps by the way they took, and what was transferred for them."""

    num_steps: int = 0
    num_tokens: int = 0
    routes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_WAYS, np.int64))
    transfer_bytes: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """Of all routes; they add up to 1, or are all 0 where there are no routes."""
        total = max(1, int(self.routes.sum()))
        named = {"device": DEVICE, "transferred": TRANSFER, "cpu": CPU, "skipped": SKIPPED}
        return {name: int(self.routes[way]) / total for name, way in named.items()}


class Replay:
    """One scenario, step after step."""

    def __init__(
        self,
        header: TraceHeader,
        scenario: Scenario,
        blob_bytes: NDArray[np.int64],
        profile: Counts | None = None,
    ) -> None:
        """`blob_bytes`: int64 [layers], of one expert. Slots begin with what the profile, float32 [layers,
        experts], has as hottest; without one with the first experts of every layer."""
        shape = header.num_layers, header.num_experts
        counts = np.zeros(shape, np.float32) if profile is None else profile
        slot_layers, slot_experts = assign_slots(fill_order(counts), blob_bytes, num_slots=scenario.num_slots)
        self.scenario = scenario
        self.table = ResidencyTable(slot_layers, *shape)
        for slot, expert in enumerate(slot_experts.tolist()):
            self.table.begin_load(slot, expert)
            self.table.publish(slot)
        self._hotness = Hotness(*shape, header.num_used)
        if profile is not None:
            self._hotness.start_from(profile)
        self._num_used = header.num_used
        self._most_tokens = 0
        self._planner = self._planner_for(scenario.prefill_stream_min)
        self._policy = policy_named(
            scenario.policy,
            self._hotness,
            every=scenario.adapt_every,
            decay=scenario.adapt_decay,
            most=scenario.adapt_swaps,
        )
        self.link_share = LinkShare(scenario.pcie_frac, scenario.link_gb_s)
        self._blob_bytes = np.asarray(blob_bytes, np.int64)
        self._loading: list[tuple[int, int]] = []  # Windows that are left, and the slot.
        self._ticket = 0
        self.decode, self.prefill = Tally(), Tally()
        self.num_swaps = self.swap_bytes = 0
        # Of each window without prompt tokens: routes of resident experts, and all.
        self._window_routes: list[tuple[int, int]] = []

    def step(self, step: TraceStep) -> None:
        """The next one. One with prompt tokens is a prompt's, whatever else is decoded in it; the others are
        windows."""
        tally = self.prefill if step.num_prefill_tokens else self.decode
        before = tally.routes.copy()
        tally.num_steps += 1
        tally.num_tokens += step.num_tokens
        if step.num_prefill_tokens >= self.scenario.prefill_stream_min:
            self._stream(step, tally)
        else:
            self._plan(step, tally)
        self.table.finished(self._ticket)
        if not step.num_prefill_tokens:
            routes = tally.routes - before
            self._window_routes.append((int(routes[DEVICE]), int(routes.sum())))
            self._end_window()
        self._ticket += 1

    def _plan(self, step: TraceStep, tally: Tally) -> None:
        is_prompt = step.num_prefill_tokens > 0
        skip_rank = 0 if is_prompt else skip_rank_at(self.table.coverage, self.scenario.route_tail_skip)
        rules = PlanRules(self.link_share.share, skip_rank=skip_rank)
        planner = self._planner_for(step.num_tokens)
        for layer, expert_ids in enumerate(step.expert_ids):
            plan = planner.plan(layer, expert_ids, self._ticket, rules, is_prompt=is_prompt)
            tally.routes += (
                plan.num_device_routes,
                plan.num_transfer_routes,
                plan.num_cpu_routes,
                plan.num_skipped_routes,
            )
            blob_bytes = int(self._blob_bytes[layer])
            transferred, computed = plan.num_transfer_groups * blob_bytes, plan.num_cpu_groups * blob_bytes
            tally.transfer_bytes += transferred
            if not is_prompt:
                self.link_share.note_transfers(transferred, transferred / self.scenario.link_gb_s / _GIGA)
                self.link_share.note_cpu(computed, computed / self.scenario.cpu_gb_s / _GIGA)

    def _planner_for(self, num_tokens: int) -> LayerPlanner:
        if num_tokens > self._most_tokens:
            self._most_tokens = max(num_tokens, 2 * self._most_tokens)
            self._planner = LayerPlanner(self.table, self._hotness, self._num_used, self._most_tokens)
        return self._planner

    def _stream(self, step: TraceStep, tally: Tally) -> None:
        """All experts of a layer that are not resident go through the device, whoever wants them."""
        is_resident = self.table.slot_of >= 0
        for layer, expert_ids in enumerate(step.expert_ids):
            chosen = expert_ids[expert_ids >= 0]
            num_resident = int(is_resident[layer, chosen].sum())
            tally.routes[DEVICE] += num_resident
            tally.routes[TRANSFER] += chosen.size - num_resident
            tally.transfer_bytes += int((~is_resident[layer]).sum()) * int(self._blob_bytes[layer])
            self._hotness.add(layer, expert_ids, self._ticket, is_prompt=True)

    def _end_window(self) -> None:
        self.link_share.after_window()
        self._loading = [(left - 1, slot) for left, slot in self._loading]
        for swap in self._policy.after_window(self.table):
            if begin_swap(self.table, swap):
                self.num_swaps += 1
                self.swap_bytes += int(self._blob_bytes[swap.layer])
                self._loading.append((self.scenario.load_windows, swap.slot))
        for left, slot in self._loading:
            if left <= 0:
                self.table.publish(slot)
        self._loading = [(left, slot) for left, slot in self._loading if left > 0]

    def hit_rate(self, start: float = 0.0, stop: float = 1.0) -> float:
        """Of the windows without prompt tokens between these parts of all, such as 0.75 and 1: the share of
        routes whose expert was resident."""
        count = len(self._window_routes)
        windows = self._window_routes[int(start * count) : math.ceil(stop * count)]
        return sum(hits for hits, _ in windows) / max(1, sum(total for _, total in windows))

    def summary(self) -> dict[str, Any]:
        """Everything that was counted, for JSON."""
        tallies = {
            name: {
                "num_steps": tally.num_steps,
                "num_tokens": tally.num_tokens,
                "num_routes": int(tally.routes.sum()),
                "shares": tally.shares,
                "transfer_bytes": tally.transfer_bytes,
            }
            for name, tally in (("decode", self.decode), ("prefill", self.prefill))
        }
        return {
            "policy": self.scenario.policy,
            "num_slots": self.table.num_slots,
            "coverage": self.table.num_slots / self.table.slot_of.size,
            **tallies,
            "hit_rate": self.hit_rate(),
            "first_quarter_hit_rate": self.hit_rate(0, 0.25),
            "last_quarter_hit_rate": self.hit_rate(0.75, 1),
            "num_swaps": self.num_swaps,
            "swap_bytes": self.swap_bytes,
            "pcie_frac": self.link_share.share,
        }
