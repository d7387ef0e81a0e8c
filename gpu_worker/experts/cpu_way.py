"""The CPU way of the routed experts: activations go to the cpu_worker through its ring, sums come back."""

import time

import torch
from torch import Tensor

from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import ExpertHeader


class CpuExperts:
    """Submits layers to the cpu_worker's ring and collects their outputs."""

    def __init__(self, ring: RingClient, torch_device: torch.device, timeout_s: float) -> None:
        self._ring = ring
        self._device = torch_device
        self._timeout_s = timeout_s
        # Seconds spent waiting since the start; the caller takes differences.
        self.waited_s = 0.0

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Copies x [tokens, hidden] and its routes [tokens, k] into the next slot and hands it over."""
        slot = self._ring.next_slot(self._timeout_s, Role.CPU_WORKER)
        num_tokens = len(x)
        slot["header"][ExpertHeader.LAYER] = layer
        slot["header"][ExpertHeader.NUM_TOKENS] = num_tokens
        torch.from_numpy(slot["activations"][:num_tokens]).copy_(x)
        torch.from_numpy(slot["expert_ids"][:num_tokens]).copy_(expert_ids)
        torch.from_numpy(slot["expert_weights"][:num_tokens]).copy_(weights)
        return self._ring.submit()

    def collect(self, ticket: int) -> Tensor:
        """The weighted sums [tokens, hidden], a view that is valid until the slot is next filled.

        Raises WorkerFailedError, StepStalledError or SlotError.
        """
        started = time.perf_counter()
        slot = self._ring.wait(ticket, self._timeout_s, Role.CPU_WORKER)
        self.waited_s += time.perf_counter() - started
        num_tokens = int(slot["header"][ExpertHeader.NUM_TOKENS])
        return torch.from_numpy(slot["outputs"][:num_tokens]).to(self._device)
