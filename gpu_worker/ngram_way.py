"""The way to n-gram features: windows of token ids go to the stager through its ring, features come back."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import NgramHeader


class StagedFeatures:
    """Asks the stager for the features of a step and collects them when their layer is reached."""

    def __init__(self, ring: RingClient, torch_device: torch.device, timeout_s: float) -> None:
        self._ring = ring
        self._device = torch_device
        self._timeout_s = timeout_s
        self._ticket = 0
        self._num_tokens = 0
        # Seconds spent waiting since the start; the caller takes differences.
        self.waited_s = 0.0

    def submit(self, windows: NDArray[np.int32]) -> None:
        """Asks for the features of windows [tokens, ngram_size], as `shared.work_slots` describes them."""
        slot = self._ring.next_slot(self._timeout_s, Role.STAGER)
        self._num_tokens = len(windows)
        slot["header"][NgramHeader.NUM_TOKENS] = self._num_tokens
        slot["windows"][: len(windows)] = windows
        self._ticket = self._ring.submit()

    def collect(self) -> Tensor:
        """The features [tokens, feature width], a view that is valid until the slot is next filled.

        Raises WorkerFailedError, StepStalledError or SlotError.
        """
        started = time.perf_counter()
        slot = self._ring.wait(self._ticket, self._timeout_s, Role.STAGER)
        self.waited_s += time.perf_counter() - started
        features = torch.from_numpy(slot["features"][: self._num_tokens])
        return features if self._device.type == "cpu" else features.to(self._device)
