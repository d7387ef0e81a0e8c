"""The routed experts of a layer in three ways at a time: from slots of the device, by transfer, by the CPU.

For each layer the routes are planned (`shared.placement.planner`). What the CPU computes goes to the
cpu_worker first, and what is transferred to the stager, since both work by themselves; then the device
computes its hits. Whoever collects computes what is transferred as it arrives, waits for the cpu_worker, and
adds up.

**Prompts.** A chunk of fewer than `stream_min` tokens goes the same ways. A larger one needs nearly every
expert of every layer, so all that are not on the device are streamed through it, layer after layer in fixed
order, ahead of the routing that says who needs them: copies overlap with what is computed, and the CPU has no
part in it. For that the expert cache lends slots, as work space and for more landing buffers, until a step
comes that is not streamed.

**Windows.** A step without a prompt is a window. After each one the policy may exchange experts, and the
share of transfers follows what was measured.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.host_memory import to_host
from gpu_worker.experts.counts import ExpertCounts, Way
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.experts.placement import ExpertPlacement
from gpu_worker.experts.transfers import Arrival, Transfers
from shared.placement.layer_plan import LayerPlan
from shared.placement.planner import LayerPlanner, PlanRules

# The most blobs that are computed at once: what has landed is not kept waiting for more.
_MOST_AT_ONCE = 16


class ThreeWays:
    """The experts of steps, as `gpu_worker.model.interface.RoutedExperts`."""

    def __init__(
        self, placement: ExpertPlacement, cpu: CpuExperts, transfers: Transfers, max_tokens: int
    ) -> None:
        """Steps have up to `max_tokens` tokens."""
        self._placement = placement
        self._cache = placement.cache
        self._experts = placement.experts
        self._planner = LayerPlanner(
            placement.cache.table, placement.hotness, placement.hotness.num_used, max_tokens
        )
        self._cpu = cpu
        self._transfers = transfers
        # Seconds spent waiting since the start; the caller takes differences.
        self.transfer_waited_s = 0.0
        self.device_waited_s = 0.0
        self._rules = PlanRules()
        self._is_window = False
        self._streams = False
        self._ticket = 0
        # Of the layer at hand.
        self._layer = 0
        self._plan: LayerPlan | None
        self._cpu_ticket: int | None = None
        self._out: Tensor
        # Of a streamed step: layers asked for so far, and how many blobs of each have not been taken.
        self._num_layers_asked = 0
        self._blobs_left: list[int] = []

    @property
    def counts(self) -> ExpertCounts:
        """As `ExpertsWay` says, as all that follow."""
        return self._cpu.counts

    @property
    def waited_s(self) -> float:
        """For the cpu_worker."""
        return self._cpu.waited_s

    # Steps.

    def begin_step(self, stops: Sequence[int], num_prefill_tokens: int) -> None:
        """As `ExpertsWay.begin_step`."""
        self._cpu.begin_step(stops, num_prefill_tokens)
        placement, rules = self._placement, self._placement.rules
        self._is_window = num_prefill_tokens == 0
        self._streams = num_prefill_tokens >= rules.stream_min
        self._cache.pump()
        self._lend_work_space(stops[-1])
        if not self._streams and self._cache.num_kept:
            started = time.perf_counter()
            self._cache.load_kept()
            self.transfer_waited_s += time.perf_counter() - started
        self._ticket = self._cache.begin_step(is_held=self._streams)
        self._copied = self._transfers.copied_bytes, self._transfers.copied_s
        share = placement.link_share.share
        if self._is_window:
            self._rules = PlanRules(transfer_share=share, skip_rank=placement.skip_rank)
        elif self._streams:
            self._rules = PlanRules(transfer_share=1.0)
            self._num_layers_asked = 0
            self._blobs_left = []
            self._transfers.feed = self._ask_layer
            self._transfers.pump()
        else:
            cpu_share = rules.cpu_share
            self._rules = PlanRules(transfer_share=share if cpu_share is None else 1 - cpu_share)

    def end_step(self, *, has_failed: bool = False) -> None:
        """All of the step has been computed, or it has failed."""
        self._transfers.feed = None
        if has_failed:
            self._transfers.abandon()
        self._cache.end_step()
        if self._is_window and not has_failed:
            self._note_copies()
            self._placement.after_window()
        self._cache.pump()

    def _note_copies(self) -> None:
        """What the link has done in a window. The stager's part is left out: it brings one blob while another
        is copied."""
        self._transfers.pump()
        num_bytes, seconds = self._copied
        transfers = self._transfers
        self._placement.link_share.note_transfers(
            transfers.copied_bytes - num_bytes, transfers.copied_s - seconds
        )

    def _lend_work_space(self, num_tokens: int) -> None:
        """Lends slots to a step that is streamed, and takes them back from one that was."""
        rules, transfers = self._placement.rules, self._transfers
        # Asked, not remembered: whoever took this way before may have been lost in the middle of a prompt.
        claimed = self._placement.work_bytes
        wanted = 0
        if self._streams and rules.borrows:
            # What follows in the same prompt is not larger, and does with what there is.
            wanted = max(rules.work_space.num_bytes(num_tokens), claimed)
        if wanted == claimed:
            return
        if transfers.has_extra:
            transfers.set_extra(0)
        granted = self._placement.claim_work_space(wanted)
        ring_bytes = min(rules.work_space.ring_bytes, granted) if wanted else 0
        if count := ring_bytes // transfers.buffer_bytes:
            transfers.set_extra(count)

    # Layers.

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """As `RoutedExperts.submit`: begins all three ways of a layer. Those of the prediction block, which
        comes behind the layers that slots are for, are the CPU's."""
        self._cache.pump()
        if self._streams:
            self._transfers.pump()
        if layer >= self._cache.table.num_layers:
            self._plan, self._cpu_ticket = None, self._cpu.submit(layer, x, expert_ids, weights)
            return layer
        host_ids, host_weights, *host_x = self._on_host(x, expert_ids, weights)
        ids: NDArray[np.int32] = host_ids.numpy()
        plan = self._plan = self._planner.plan(
            layer, ids, self._ticket, self._rules, is_prompt=not self._is_window
        )
        self._layer, self._x, self._weights = layer, x, host_weights.reshape(-1).numpy()
        self._cpu_ticket = None
        if plan.num_cpu_groups:
            self._cpu_ticket = self._cpu.submit(
                layer, host_x[0], torch.from_numpy(plan.cpu_ids), host_weights
            )
        if plan.num_transfer_groups and not self._streams:
            self._transfers.ask(layer, plan.group_experts[plan.num_device_groups :].tolist())
        self.counts.add_ways(plan.token_device_routes, plan.token_transfer_routes, plan.token_skipped_routes)
        self._out = torch.zeros_like(x)
        if plan.num_device_groups:
            self._compute_hits(plan)
        return layer

    def collect(self, ticket: int) -> Tensor:
        """As `RoutedExperts.collect`. Raises as `CpuExperts.collect`, and what a transfer has failed with;
        DiskError where no sequence of the step can go on."""
        plan = self._plan
        if plan is None:
            assert self._cpu_ticket is not None, "what has no plan was handed over"
            return self._cpu.collect(self._cpu_ticket)
        if self._streams:
            self._take_stream(plan)
        elif plan.num_transfer_groups:
            self._take_transfers(plan, plan.num_transfer_groups)
        if self._cpu_ticket is None:
            self.counts.check()
            return self._out
        # What the cpu_worker has read is booked first, also where nobody can go on.
        computed_s = self._cpu.computed_s
        sums = self._cpu.collect(self._cpu_ticket)
        if self._is_window:
            num_bytes = plan.num_cpu_groups * self._experts.slot_bytes(self._layer)
            self._placement.link_share.note_cpu(num_bytes, self._cpu.computed_s - computed_s)
        return self._out.add_(sums) if plan.num_groups else sums

    def _on_host(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> list[Tensor]:
        """The routes in host memory, and x too where the CPU may compute; in one copy, which is what this
        thread waits for the device with."""
        started = time.perf_counter()
        wanted = [expert_ids.to(torch.int32), weights]
        if not self._streams:
            wanted.append(x)
        found = to_host(wanted)
        if x.device.type != "cpu":
            self.device_waited_s += time.perf_counter() - started
        return found

    def _compute_hits(self, plan: LayerPlan) -> None:
        started = time.perf_counter()
        num_groups = plan.num_device_groups
        buffers = [self._cache.buffer(slot) for slot in plan.group_slots[:num_groups].tolist()]
        starts = plan.group_starts[: num_groups + 1]
        self._compute(buffers, starts, plan.route_tokens[: starts[-1]], plan.route_places[: starts[-1]])
        self.counts.add_blobs(Way.DEVICE, self._layer, plan.route_tokens[starts[:-1]])
        if self._out.device.type == "cpu":
            # There, computing is what this thread waits for.
            self.device_waited_s += time.perf_counter() - started

    def _compute(
        self,
        buffers: Sequence[Tensor],
        starts: NDArray[np.int32],
        tokens: NDArray[np.int32],
        places: NDArray[np.int32],
    ) -> None:
        self._experts.compute(
            self._layer, buffers, starts.tolist(), tokens, self._weights[places], self._x, self._out
        )

    # What is transferred.

    def _ask_layer(self) -> None:
        """Has the next layer streamed, all of it that is not on the device."""
        layer = self._num_layers_asked
        slot_of = self._cache.table.slot_of
        if layer == len(slot_of):
            self._transfers.feed = None
            return
        missing = np.flatnonzero(slot_of[layer] < 0).tolist()
        self._num_layers_asked += 1
        self._blobs_left.append(len(missing))
        self._transfers.ask(layer, missing)

    def _take_stream(self, plan: LayerPlan) -> None:
        """Takes all of the layer that was streamed, and computes what was chosen."""
        while self._num_layers_asked <= self._layer:
            self._ask_layer()
        self._take_transfers(plan, self._blobs_left[self._layer])
        self._blobs_left[self._layer] = 0

    def _take_transfers(self, plan: LayerPlan, num_blobs: int) -> None:
        """Computes the next blobs as they arrive; those that nobody has chosen are let go."""
        first = plan.num_device_groups
        groups = {expert: first + i for i, expert in enumerate(plan.group_experts[first:].tolist())}
        while num_blobs:
            started = time.perf_counter()
            arrivals = self._transfers.take(min(num_blobs, _MOST_AT_ONCE))
            waited_s = time.perf_counter() - started
            self.transfer_waited_s += waited_s
            num_blobs -= len(arrivals)
            self._use(plan, arrivals, groups, waited_s)

    def _use(
        self, plan: LayerPlan, arrivals: Sequence[Arrival], groups: dict[int, int], waited_s: float
    ) -> None:
        """Computes blobs that have come, and books them."""
        starts, route_tokens, route_places = plan.group_starts, plan.route_tokens, plan.route_places
        buffers, tokens, places, firsts = [], [], [], []
        for arrival in arrivals:
            group = groups.get(arrival.expert)
            routes = slice(0, 0) if group is None else slice(int(starts[group]), int(starts[group + 1]))
            first = int(route_tokens[routes.start]) if group is not None else 0
            if any(arrival.num_reads):
                self.counts.add_reads(
                    self._layer, first, arrival.num_reads, arrival.read_bytes, waited_s / len(arrivals)
                )
            if arrival.error_number:
                lost = route_tokens[routes].tolist()
                self.counts.note_lost(self._layer, lost, arrival.expert, arrival.error_number)
                continue
            firsts.append(first)
            if group is not None and arrival.buffer is not None:
                buffers.append(arrival.buffer)
                tokens.append(route_tokens[routes])
                places.append(route_places[routes])
        if buffers:
            ends = np.cumsum([len(of_group) for of_group in tokens], dtype=np.int32)
            self._compute(
                buffers,
                np.concatenate([np.zeros(1, np.int32), ends]),
                np.concatenate(tokens),
                np.concatenate(places),
            )
        for arrival in arrivals:
            self._transfers.used(arrival)
        if firsts:
            self.counts.add_blobs(Way.TRANSFERRED, self._layer, np.array(firsts, np.int32))
