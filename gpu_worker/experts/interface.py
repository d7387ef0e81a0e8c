"""What the engine asks of whoever sees to the routed experts, beside what the model asks."""

from collections.abc import Sequence
from typing import Protocol

from gpu_worker.experts.counts import ExpertCounts
from gpu_worker.model.interface import RoutedExperts


class ExpertsWay(RoutedExperts, Protocol):
    """The routed experts of steps, one step after the other."""

    @property
    def counts(self) -> ExpertCounts:
        """What was computed in which way, of the step at hand."""

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the cpu_worker since the start; the caller takes differences."""

    @property
    def transfer_waited_s(self) -> float:
        """Likewise for blobs that are transferred to the device."""

    @property
    def device_waited_s(self) -> float:
        """Likewise for the device."""

    def begin_step(self, stops: Sequence[int], num_prefill_tokens: int) -> None:
        """A step begins, of sequences whose last tokens come before those places; so many of the tokens are
        of prompts."""

    def end_step(self, *, has_failed: bool = False) -> None:
        """It has been computed, or has failed."""
