"""The way to n-gram features: windows of token ids go to the stager through its ring, features come back."""

import time
from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.host_memory import to_device
from shared.errors import GenerationError
from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import NgramHeader

_NONE = -1
"""No ticket."""


@dataclass(frozen=True, slots=True)
class RowReads:
    """`num_hits` rows were in memory, `num_reads` reads of `num_bytes` brought others; `error_number` is the
    errno of one that failed, 0 for none."""

    num_hits: int
    num_reads: int
    num_bytes: int
    error_number: int


class StagedFeatures:
    """Asks the stager for the features of a step and collects them when their layer is reached.

    Where layers are computed in machine code, that collects them, given `native_way` and `ticket`; `failure`
    is then what its wait has ended with.
    """

    def __init__(
        self, ring: RingClient, torch_device: torch.device, timeout_s: float, file: str, rows_per_token: int
    ) -> None:
        """`file` is the name of the one that holds the table, for whom it concerns."""
        self._ring = ring
        self.file = file
        self.rows_per_token = rows_per_token
        self.native_way = array("l", [ring.address, ring.offsets["features"], round(timeout_s * 1e9)])
        """The ring's address, where the features of its slots begin, and the longest wait in ns."""
        self._device = torch_device
        self._timeout_s = timeout_s
        self.ticket = _NONE
        self._num_tokens = 0
        # Seconds spent waiting since the start; the caller takes differences.
        self.waited_s = 0.0
        self._waited_before = 0.0

    def submit(self, windows: NDArray[np.int32]) -> None:
        """Asks for the features of windows [tokens, ngram_size], as `shared.work_slots` describes them."""
        self.ticket = _NONE
        slot = self._ring.next_slot(self._timeout_s, Role.STAGER)
        self._num_tokens = len(windows)
        slot["header"][NgramHeader.NUM_TOKENS] = self._num_tokens
        slot["windows"][: len(windows)] = windows
        self._waited_before = self.waited_s
        self.ticket = self._ring.submit()

    @property
    def has_come(self) -> bool:
        """Whether the last step's features are there."""
        return self.ticket != _NONE and self._ring.is_done(self.ticket)

    def reads(self, start: int, stop: int) -> "RowReads":
        """How the rows of some tokens of the last step came, once they are there. Valid until `submit`."""
        slot = self._ring.slot(self.ticket)
        hits, reads, num_bytes, failures = (
            slot[name][start:stop] for name in ("hits", "reads", "read_bytes", "failures")
        )
        return RowReads(
            num_hits=int(hits.sum()),
            num_reads=int(reads.sum()),
            num_bytes=int(num_bytes.sum()),
            error_number=int(failures.max()),
        )

    @property
    def read_s(self) -> float:
        """Seconds in which rows of the last step were being read."""
        return int(self._ring.slot(self.ticket)["header"][NgramHeader.DISK_WAIT_NS]) * 1e-9

    @property
    def disk_wait_s(self) -> float:
        """Those of them in which the step has waited."""
        return min(self.waited_s - self._waited_before, self.read_s)

    def failure(self) -> GenerationError:
        """What `collect` would raise, where the wait for the ticket has ended without a result."""
        return self._ring.failure(self.ticket, self._timeout_s, Role.STAGER)

    def collect(self) -> Tensor:
        """The features [tokens, feature width], a view that is valid until the slot is next filled.

        Raises WorkerFailedError, StepStalledError or SlotError.
        """
        started = time.perf_counter()
        try:
            slot = self._ring.wait(self.ticket, self._timeout_s, Role.STAGER)
        finally:
            self.waited_s += time.perf_counter() - started
        return to_device(torch.from_numpy(slot["features"][: self._num_tokens]), self._device)
