"""The CPU way of the routed experts: activations go to the cpu_worker through its ring, sums come back."""

import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.host_memory import to_device, to_host
from gpu_worker.experts.counts import ExpertCounts
from shared.errors import GenerationError
from shared.ring import Arrays, RingClient
from shared.run_directory import Role
from shared.work_slots import ExpertHeader


class _Views(NamedTuple):
    """A slot, as far as a step of so many tokens uses it."""

    header: memoryview
    activations: NDArray[np.float32]
    expert_ids: NDArray[np.int32]
    expert_weights: NDArray[np.float32]
    outputs: Tensor

    @classmethod
    def of(cls, slot: Arrays, num_tokens: int) -> "_Views":
        """The first `num_tokens` rows of the slot's arrays."""
        rows: dict[str, NDArray[Any]] = {
            name: slot[name][:num_tokens]
            for name in ("activations", "expert_ids", "expert_weights", "outputs")
        }
        # Words are written through a memoryview, which is many times as fast as through an array.
        return cls(
            slot["header"].data,
            rows["activations"],
            rows["expert_ids"],
            rows["expert_weights"],
            torch.from_numpy(rows["outputs"]),
        )


SLOT_ARRAYS = (
    *("header", "activations", "expert_ids", "expert_weights", "outputs"),
    *("disk_routes", "reads", "read_bytes", "failures"),
)


class CpuExperts:
    """Submits layers to the cpu_worker's ring and collects their outputs.

    Where layers are computed in machine code, that does both too, given `native_way`; `failure` is then what
    a wait of its has ended with.
    """

    def __init__(
        self, ring: RingClient, torch_device: torch.device, timeout_s: float, counts: ExpertCounts
    ) -> None:
        """`counts` are those of steps, as `ExpertsWay` says; their tokens may be more than a slot has."""
        self._ring = ring
        self.counts = counts
        offsets = (ring.offsets[name] for name in SLOT_ARRAYS)
        self.native_way = array("l", [ring.address, *offsets, round(timeout_s * 1e9), *self.counts.native])
        """The ring's address, where the arrays of its slots begin, the longest wait in ns, and the counts."""
        self._device = torch_device
        self._is_on_cpu = torch_device.type == "cpu"
        self._timeout_s = timeout_s
        # Views of the slots for steps of the size of the last one. To make them anew for every layer would
        # take longer than what they are used for.
        self._num_tokens = 0
        self._views: dict[int, _Views] = {}
        # Seconds spent waiting since the start; the caller takes differences. This way waits for nobody else.
        self.waited_s = 0.0
        self.transfer_waited_s = 0.0
        self.device_waited_s = 0.0

        self.computed_s = 0.0
        """Seconds in which the cpu_worker has computed, without its waits for the disk, since the start."""

    def begin_step(self, stops: Sequence[int], num_prefill_tokens: int) -> None:
        """As `ExpertsWay.begin_step`."""
        self.counts.begin(stops)

    def end_step(self, *, has_failed: bool = False) -> None:
        """Nothing is left of a step."""

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Copies x [tokens, hidden] and its routes [tokens, k] into the next slot and hands it over. Each of
        the three may be on the device or in host memory; negative ids are not the cpu_worker's. Raises as
        `collect` does where no slot becomes free."""
        started = time.perf_counter()
        try:
            slot = self._ring.next_slot(self._timeout_s, Role.CPU_WORKER)
        finally:
            self.waited_s += time.perf_counter() - started
        views = self._views_of(slot, x.shape[0])
        views.header[ExpertHeader.LAYER] = layer
        views.header[ExpertHeader.NUM_TOKENS] = self._num_tokens
        if not self._is_on_cpu:
            x, expert_ids, weights = to_host([x, expert_ids.to(torch.int32), weights])
        views.activations[:] = x.numpy()
        views.expert_ids[:] = expert_ids.numpy()
        views.expert_weights[:] = weights.numpy()
        ticket = self._ring.submit()
        # The cpu_worker computes meanwhile. It reads of the slot what is read here.
        self.counts.add_handed_over(layer, views.expert_ids)
        return ticket

    def collect(self, ticket: int) -> Tensor:
        """The weighted sums [tokens, hidden]: on the CPU a view that is valid until the slot is next filled,
        on any other device a copy.

        Raises WorkerFailedError, StepStalledError or SlotError; DiskError where, for want of experts, no
        sequence of the step can go on (`ExpertCounts`).
        """
        started = time.perf_counter()
        try:
            slot = self._ring.wait(ticket, self._timeout_s, Role.CPU_WORKER)
        finally:
            self.waited_s += time.perf_counter() - started
            if self._ring.is_done(ticket):
                # What was read for it is counted too where it has failed.
                self.counts.add(self._ring.slot(ticket))
        self.counts.check()
        busy_ns = slot["header"][ExpertHeader.COMPUTE_NS] - slot["header"][ExpertHeader.DISK_WAIT_NS]
        self.computed_s += int(busy_ns) * 1e-9
        return to_device(self._views_of(slot, self._num_tokens).outputs, self._device)

    def failure(self, ticket: int) -> GenerationError:
        """What `collect` would raise for a ticket whose wait has ended without a result."""
        return self._ring.failure(ticket, self._timeout_s, Role.CPU_WORKER)

    def _views_of(self, slot: Arrays, num_tokens: int) -> _Views:
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._views.clear()
        views = self._views.get(id(slot))
        if views is None:
            views = self._views[id(slot)] = _Views.of(slot, num_tokens)
        return views
