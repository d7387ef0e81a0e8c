"""The memory of a CUDA device: a stream of copies beside the stream that computes.

Tensors come from torch's allocator, so that what is released serves as work space, and the other way round.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_worker.device.host_memory import host_tensor, lock_pages, unlock_pages
from gpu_worker.device.memory import Allowance, Bytes, Event, measure_link, places_of, stalled
from shared.native.task import address_of

# Not all of it has types.
_cuda: Any = torch.cuda
# Between two looks at an event. Events have no wait with a time limit of their own.
_LOOK_S = 20e-6


class _CudaEvent:
    """An event of a stream. A failed copy, as anything that fails on the device, is a RuntimeError from the
    next look on, and the device is of no use to this process after that."""

    def __init__(
        self, stream: torch.cuda.Stream, since: "_CudaEvent | None" = None, *, is_timed: bool = False
    ) -> None:
        """The end of what is in the stream so far; `since` is when its copies began, and both are timed."""
        self.event = _cuda.Event(enable_timing=is_timed or since is not None)
        self.event.record(stream)
        self._since = since

    def seconds(self) -> float:
        """As `gpu_worker.device.memory.Event` says."""
        return 0.0 if self._since is None else float(self._since.event.elapsed_time(self.event)) / 1e3

    def is_done(self) -> bool:
        """As `gpu_worker.device.memory.Event` says."""
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> None:
        """The same."""
        deadline = time.monotonic() + timeout_s
        while not self.event.query():
            if time.monotonic() > deadline:
                raise stalled(timeout_s)
            time.sleep(_LOOK_S)


class CudaMemory:
    """Memory of a CUDA device, within a budget and what is free on it."""

    def __init__(self, torch_device: torch.device, budget_bytes: int) -> None:
        self.torch_device = torch_device
        self._allowance = Allowance(torch_device, budget_bytes)
        self._copies: torch.cuda.Stream = _cuda.Stream(torch_device)
        self._pinned: dict[int, Bytes] = {}

    def free_bytes(self) -> int:
        """The least of what is left of the budget, and of what the device and torch's allocator have free."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
        held_bytes = reserved_bytes - torch.cuda.memory_allocated(self.torch_device)
        return min(self._allowance.free_bytes, free_bytes + held_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        free_bytes = self.free_bytes()
        self._allowance.check(num_bytes, free_bytes)
        try:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            # What torch holds is in pieces, or another program was faster.
            raise self._allowance.refusal(num_bytes, free_bytes) from error
        # The allocator may hand out what compute that was issued before still uses; compute comes after that
        # by itself, copies do not.
        self._copies.wait_stream(self._compute)
        return self._allowance.take(tensor)

    def release(self, tensor: Tensor) -> None:
        """The memory is torch's once the last tensor of it is gone, and the copies under way have ended."""
        self._allowance.give_back(tensor)
        tensor.record_stream(self._copies)

    def copy_in(
        self,
        parts: Sequence[Bytes],
        target: Tensor,
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """As `gpu_worker.device.memory.DeviceMemory` says. Asynchronous for arrays that are pinned."""
        places = places_of(parts, target, offsets, are_written=False)
        began = self._begin(after)
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            for part, at in zip(parts, places, strict=True):
                target[at : at + part.nbytes].copy_(host_tensor(part), non_blocking=True)
        return _CudaEvent(self._copies, began)

    def copy_out(
        self,
        source: Tensor,
        parts: Sequence[Bytes],
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """As `gpu_worker.device.memory.DeviceMemory` says. Asynchronous for arrays that are pinned."""
        places = places_of(parts, source, offsets, are_written=True)
        began = self._begin(after)
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            for part, at in zip(parts, places, strict=True):
                host_tensor(part).copy_(source[at : at + part.nbytes], non_blocking=True)
        return _CudaEvent(self._copies, began)

    def host_buffer(self, num_bytes: int) -> Bytes:
        """In locked pages, which torch keeps for the next one who asks."""
        buffer: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return buffer

    def record(self) -> Event:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        return _CudaEvent(self._compute)

    def compute_waits_for(self, event: Event) -> None:
        """The device waits; the host goes on at once."""
        assert isinstance(event, _CudaEvent)
        self._compute.wait_event(event.event)

    def pin(self, array: Bytes) -> None:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        if lock_pages(array, self.torch_device):
            self._pinned[address_of(array)] = array

    def unpin(self, array: Bytes) -> None:
        """The same. Waits for the copies under way, which may be of that array."""
        if self._pinned.pop(address_of(array), None) is not None:
            self._copies.synchronize()
            unlock_pages(array, self.torch_device)

    def link_probe(self, num_bytes: int) -> float:
        """GB/s of one large copy at a time."""
        return measure_link(self, num_bytes)

    def close(self) -> None:
        """As `gpu_worker.device.memory.DeviceMemory` says."""
        for array in list(self._pinned.values()):
            self.unpin(array)
        self._copies.synchronize()

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def _begin(self, after: Event | None) -> _CudaEvent:
        if after is not None:
            assert isinstance(after, _CudaEvent)
            self._copies.wait_event(after.event)
        return _CudaEvent(self._copies, is_timed=True)
