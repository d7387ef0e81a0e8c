"""Memory of the device, copies between it and the host, and the order of copies and compute.

Compute and copies are two queues. What is put into one runs in order; between the two, events say what has
to come first::

    read = memory.record()                          compute that reads the slot has been issued
    copied = memory.copy_in(parts, slot, after=read)
    memory.compute_waits_for(copied)                compute issued from here on finds the new bytes

On the CPU (`cpu_memory`) compute is synchronous, and one thread copies; on CUDA (`cuda_memory`) both are
streams. One thread issues all of it.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import ResourceError, StepStalledError, StrataError

Bytes = NDArray[np.uint8]

_PROBES = 3
_PROBE_TIMEOUT_S = 60.0


class Event(Protocol):
    """A point in one of the queues. It has happened when everything before it is done."""

    def is_done(self) -> bool:
        """Whether it has happened. Raises what has made a copy before it fail."""

    def wait(self, timeout_s: float) -> None:
        """Returns when it has happened. Raises StepStalledError where it has not within that time, and what
        has made a copy before it fail."""

    def seconds(self) -> float:
        """How long the copies of `copy_in` or `copy_out` took themselves, without what they waited for; 0 for
        any other event. It has happened."""


def has_ended(event: Event) -> bool:
    """Whether it has happened, or never will: a copy that has failed is over too. Who waits for it, or
    computes with it, is told why."""
    try:
        return event.is_done()
    except (StrataError, RuntimeError):
        return True


class DeviceMemory(Protocol):
    """Memory of one device, as much of it as the owner was given."""

    torch_device: torch.device

    def free_bytes(self) -> int:
        """What `allocate` can still have."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the device, uint8 [num_bytes], of no particular values, from a page or a 256-byte border
        on. Raises ResourceError where there is less."""

    def release(self, tensor: Tensor) -> None:
        """Gives back what `allocate` returned, itself and not a view. What was issued before may still use
        it; nothing else may, through whatever view."""

    def copy_in(
        self,
        parts: Sequence[Bytes],
        target: Tensor,
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """Issues copies of host arrays, each uint8 [num_bytes] and contiguous, into `target` uint8 [bytes]:
        each to its offset, without offsets one behind the other. They begin once `after` has happened.

        The arrays must stay, and keep their values, until the event has happened. Raises ValueError for a
        part that does not fit.
        """

    def copy_out(
        self,
        source: Tensor,
        parts: Sequence[Bytes],
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        """The same from `source` into host arrays, which have the values once the event has happened."""

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Host memory, uint8 [num_bytes], that copies to and from the device are fast with."""

    def record(self) -> Event:
        """The end of all compute that has been issued so far."""

    def compute_waits_for(self, event: Event) -> None:
        """Compute that is issued from now on runs after the event. Where the host has to wait for that, it
        raises what has made a copy fail."""

    def pin(self, array: Bytes) -> None:
        """Makes copies from and to a host array as fast as they can be. Where that is refused they are slower
        and no longer asynchronous; this is logged."""

    def unpin(self, array: Bytes) -> None:
        """Undoes `pin`; before the array's memory is given back."""

    def link_probe(self, num_bytes: int) -> float:
        """The rate of copies from the host, in GB/s, measured with so many bytes, which are taken from what
        is free meanwhile; 64 MiB take long enough. Raises ResourceError where they are not to be had."""

    def close(self) -> None:
        """Waits for the copies under way, and undoes what is still pinned."""


class Allowance:
    """How much of a device's memory one owner may take, and has taken."""

    def __init__(self, torch_device: torch.device, budget_bytes: int) -> None:
        self._torch_device = torch_device
        self.budget_bytes = budget_bytes
        # By address: of what was allocated and not released yet.
        self._taken: dict[int, int] = {}
        self.taken_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return self.budget_bytes - self.taken_bytes

    def check(self, num_bytes: int, free_bytes: int) -> None:
        """Raises ResourceError where more is asked for than is free, ValueError for no bytes at all."""
        if num_bytes < 1:
            raise ValueError(f"{num_bytes} bytes of {self._torch_device} memory were asked for")
        if num_bytes > free_bytes:
            raise self.refusal(num_bytes, free_bytes)

    def refusal(self, num_bytes: int, free_bytes: int) -> ResourceError:
        """The error of an allocation that cannot be."""
        return ResourceError(
            f"{num_bytes / 2**20:.1f} MiB of memory of the device {self._torch_device} were asked for, "
            f"{max(free_bytes, 0) / 2**20:.1f} MiB are free (of {self.budget_bytes / 2**20:.1f} MiB that may "
            "be used); lower --max-context, --prefill or --expert-cache, or give more with --vram-budget"
        )

    def take(self, tensor: Tensor) -> Tensor:
        """Books a tensor that was allocated."""
        self._taken[tensor.data_ptr()] = tensor.nbytes
        self.taken_bytes += tensor.nbytes
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Books it as released. Raises ValueError for what is not booked."""
        address = tensor.data_ptr()
        if self._taken.get(address) != tensor.nbytes:
            raise ValueError(f"{tensor.nbytes} bytes at {address:#x} were not allocated here, or not at once")
        del self._taken[address]
        self.taken_bytes -= tensor.nbytes


def places_of(
    parts: Sequence[Bytes], memory: Tensor, offsets: Sequence[int] | None, *, are_written: bool
) -> Sequence[int]:
    """Where in the memory each part goes to, or comes from. Raises ValueError for one that does not fit, is
    not contiguous, or cannot be written where it is to be."""
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(f"copies need uint8 [bytes], not {memory.dtype} {list(memory.shape)}")
    if offsets is None:
        offsets = [0, *accumulate(part.nbytes for part in parts)][: len(parts)]
    for part, at in zip(parts, offsets, strict=True):
        if part.dtype != np.uint8 or part.ndim != 1 or not part.flags.c_contiguous:
            raise ValueError(f"copies need contiguous uint8 [bytes], not {part.dtype} {list(part.shape)}")
        if are_written and not part.flags.writeable:
            raise ValueError(f"an array of {part.nbytes} bytes that cannot be written to")
        if not 0 <= at <= memory.nbytes - part.nbytes:
            raise ValueError(f"{part.nbytes} bytes at {at} are not within the {memory.nbytes} there are")
    return offsets


def stalled(timeout_s: float) -> StepStalledError:
    """The error of a wait for an event that has not happened in time."""
    return StepStalledError(
        f"copies to or from the device have not ended within {timeout_s:g} s (--watchdog-s)"
    )


def measure_link(memory: DeviceMemory, num_bytes: int) -> float:
    """The rate of `copy_in` in GB/s: the best of a few copies, after one that warms up."""
    target = memory.allocate(num_bytes)
    source: Bytes = np.ones(num_bytes, np.uint8)
    memory.pin(source)
    try:
        shortest_s = float("inf")
        for number in range(1 + _PROBES):
            started = time.perf_counter()
            memory.copy_in([source], target).wait(_PROBE_TIMEOUT_S)
            took_s = time.perf_counter() - started
            if number > 0:
                shortest_s = min(shortest_s, took_s)
    finally:
        memory.unpin(source)
        memory.release(target)
    return num_bytes / shortest_s / 1e9
