"""Computes the routed experts of one layer from the mapped weights.

For a token with routes (e_1, w_1) ... (e_k, w_k) the result is sum_i w_i * down_e(silu(gate_e x) * (up_e x)).
Tokens are grouped by expert, so each expert's weights are read once for all tokens that chose it. Groups may
finish in any order on any thread; the sum over a token's routes is taken afterwards in the order of the
routes, so the result does not depend on timing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shared import quants
from shared.gguf.model import GGUFModel
from shared.quants import BlockFormat
from shared.task_pool import TaskPool
from shared.tensor_catalog import block_prefix

Floats = NDArray[np.float32]

# Multiply-adds that keep a thread busy for about a millisecond. Less is not worth waking another one for,
# which takes 50 us at best and a time slice where the CPUs are busy.
_MIN_WORK_TO_SHARE = 4_000_000


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One projection of all experts of a layer: encoded bytes [experts, rows, row_bytes] and their format."""

    raw: NDArray[np.uint8]
    format: BlockFormat

    @classmethod
    def open(cls, model: GGUFModel, name: str) -> "ExpertMatrices":
        """The mapped tensor of that name; nothing is copied or decoded."""
        return cls(model.rows(name), quants.block_format(model.info(name).type.type_id))

    def multiply(self, expert: int, x: Floats) -> Floats:
        """x [tokens, width] times one expert's matrix: [tokens, rows]."""
        out = np.empty((len(x), self.raw.shape[1]), np.float32)
        quants.matmul(self.format, self.raw[expert], x, out)
        return out


@dataclass(frozen=True, slots=True)
class RoutedGroup:
    """One expert and its routes: `routes` indexes the flat [tokens * k] routes, `tokens` the tokens."""

    expert: int
    routes: NDArray[np.intp]
    tokens: NDArray[np.intp]


def group_by_expert(expert_ids: NDArray[np.int32]) -> Iterator[RoutedGroup]:
    """The groups of `expert_ids` [tokens, k]; negative entries are someone else's and left out."""
    flat = expert_ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[np.searchsorted(flat[order], 0) :]
    experts, starts = np.unique(flat[order], return_index=True)
    for expert, routes in zip(experts.tolist(), np.split(order, starts[1:]), strict=False):
        yield RoutedGroup(expert, routes, routes // expert_ids.shape[1])


class ExpertLayer:
    """The routed experts of one layer."""

    def __init__(self, model: GGUFModel, layer: int) -> None:
        prefix = block_prefix(layer)
        self._gate = ExpertMatrices.open(model, f"{prefix}ffn_gate_exps.weight")
        self._up = ExpertMatrices.open(model, f"{prefix}ffn_up_exps.weight")
        self._down = ExpertMatrices.open(model, f"{prefix}ffn_down_exps.weight")
        num_experts, width, hidden = self._gate.raw.shape[0], self._gate.raw.shape[1], self._down.raw.shape[1]
        self._num_experts = num_experts
        self._work_per_route = 3 * width * hidden

    @property
    def formats(self) -> set[BlockFormat]:
        """The formats its matrices are stored in."""
        return {self._gate.format, self._up.format, self._down.format}

    def compute(
        self, x: Floats, expert_ids: NDArray[np.int32], weights: Floats, out: Floats, pool: TaskPool
    ) -> int:
        """Writes the weighted sums for x [tokens, hidden] into out [tokens, hidden]; returns the number of
        groups. `expert_ids` and `weights` are [tokens, k]."""
        num_tokens, num_routes = expert_ids.shape
        groups = list(group_by_expert(expert_ids))
        if groups and groups[-1].expert >= self._num_experts:
            raise ValueError(f"expert {groups[-1].expert} of {self._num_experts}")
        # The largest first, so that the last to finish is a small one.
        groups.sort(key=lambda group: len(group.routes), reverse=True)
        routed = np.zeros((num_tokens * num_routes, x.shape[1]), np.float32)

        def run(group: RoutedGroup) -> None:
            routed[group.routes] = self._expert(group.expert, x[group.tokens])

        tasks = [partial(run, group) for group in groups]
        if self._work_per_route * expert_ids.size < _MIN_WORK_TO_SHARE:
            for task in tasks:
                task()
        else:
            pool.run(tasks)
        by_route = routed.reshape(num_tokens, num_routes, x.shape[1])
        np.multiply(by_route[:, 0], weights[:, :1], out=out)
        for rank in range(1, num_routes):
            out += by_route[:, rank] * weights[:, rank : rank + 1]
        return len(groups)

    def _expert(self, expert: int, x: Floats) -> Floats:
        gate, up = self._gate.multiply(expert, x), self._up.multiply(expert, x)
        return self._down.multiply(expert, silu(gate) * up)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x), without overflow warnings for large negative values."""
    decayed = np.exp(-np.abs(x))
    gated: Floats = x * np.where(x >= 0, np.float32(1), decayed) / (1 + decayed)
    return gated
