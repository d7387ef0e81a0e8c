"""Writes down which experts the tokens of each step chose, for `strata simulate`."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.experts.counts import ExpertCounts
from gpu_worker.experts.interface import ExpertsWay
from shared.placement.trace import TraceWriter

_log = logging.getLogger(__name__)


class Recording:
    """Another way of experts, whose routes are written to a trace as they pass. On the CPU layers are called
    one by one for that, instead of all at once."""

    def __init__(self, way: ExpertsWay, writer: TraceWriter) -> None:
        self._way = way
        self._writer = writer
        self._num_prefill_tokens = 0
        self._routes: list[NDArray[np.int32]] = []

    @property
    def counts(self) -> ExpertCounts:
        """Those of the other way, as all that follow."""
        return self._way.counts

    @property
    def waited_s(self) -> float:
        return self._way.waited_s

    @property
    def transfer_waited_s(self) -> float:
        return self._way.transfer_waited_s

    @property
    def device_waited_s(self) -> float:
        return self._way.device_waited_s

    def begin_step(self, stops: Sequence[int], num_prefill_tokens: int) -> None:
        """As `ExpertsWay.begin_step`."""
        self._num_prefill_tokens = num_prefill_tokens
        self._routes.clear()
        self._way.begin_step(stops, num_prefill_tokens)

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Keeps the routes, and hands them on. Those of the prediction block are in no trace."""
        if layer < self._writer.num_layers:
            self._routes.append(expert_ids.cpu().numpy().astype(np.int32))
        return self._way.submit(layer, x, expert_ids, weights)

    def collect(self, ticket: int) -> Tensor:
        """As it comes."""
        return self._way.collect(ticket)

    def end_step(self, *, has_failed: bool = False) -> None:
        """Writes the routes of a step that has succeeded."""
        self._way.end_step(has_failed=has_failed)
        # Closed for good: the way after this one is given the same writer.
        if self._writer.is_closed or has_failed or not self._routes:
            return
        try:
            self._writer.append(np.stack(self._routes), self._num_prefill_tokens)
        except OSError as error:
            _log.error("routes are not recorded any more in %s: %s", self._writer.path, error.strerror)
            self._writer.close()
