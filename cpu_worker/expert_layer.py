"""Computes the routed experts of one layer, from the mapped weights or from a pool.

For a token with routes (e_1, w_1) ... (e_k, w_k) the result is sum_i w_i * down_e(silu(gate_e x) * (up_e x)).
Tokens are grouped by expert, so each expert's weights are read once for all tokens that chose it. A token's
sum is taken in the order of its experts, so the result depends neither on timing nor on the other tokens.

One call is one native call (`cpu_worker.expert_plan`), and allocates nothing but memory that grows with the
largest step: about 4 kB a token, and 30 MB, for the real model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_worker.expert_plan import NOT_THERE, SMALLEST_MEMORY, TOO_LITTLE_MEMORY, compute
from cpu_worker.expert_pool import ExpertPool
from cpu_worker.expert_tasks import LAYER, down_task, gate_up_task, gather_task
from shared import quants
from shared.gguf.model import GGUFModel
from shared.native.records import record
from shared.native.task import address_of
from shared.native.team import Team
from shared.quants import BlockFormat
from shared.tensor_catalog import block_prefix

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One projection of all experts of a layer: encoded bytes [experts, rows, row_bytes] and their format."""

    raw: NDArray[np.uint8]
    format: BlockFormat

    @classmethod
    def open(cls, model: GGUFModel, name: str) -> "ExpertMatrices":
        """The mapped tensor of that name; nothing is copied or decoded."""
        return cls(model.rows(name), quants.block_format(model.info(name).type.type_id))


def formats_of(model: GGUFModel, num_layers: int) -> set[BlockFormat]:
    """The formats of all routed experts. Layers compile what they need when they are made; whoever wants to
    report on that warms these before."""
    return {
        quants.block_format(model.info(f"{block_prefix(layer)}ffn_{name}_exps.weight").type.type_id)
        for layer in range(num_layers)
        for name in ("gate", "up", "down")
    }


class ExpertLayer:
    """The routed experts of one layer."""

    def __init__(self, model: GGUFModel, layer: int, pool: ExpertPool | None = None) -> None:
        """Experts come from the pool, where there is one."""
        prefix = block_prefix(layer)
        self._gate = ExpertMatrices.open(model, f"{prefix}ffn_gate_exps.weight")
        self._up = ExpertMatrices.open(model, f"{prefix}ffn_up_exps.weight")
        self._down = ExpertMatrices.open(model, f"{prefix}ffn_down_exps.weight")
        self._num_experts, width, _ = self._gate.raw.shape
        self._hidden = self._down.raw.shape[1]
        self._pool = pool
        self._uses = np.zeros(self._num_experts, np.float32)
        self._use_weight = np.ones(1, np.float32)
        of_x = [matrices.format.activation_bytes for matrices in (self._gate, self._up)]
        self._record = record(
            LAYER,
            gate_task=quants.multiply_task(self._gate.format),
            up_task=quants.multiply_task(self._up.format),
            down_task=quants.multiply_task(self._down.format),
            quantise_task=quants.quantise_task(),
            gather=gather_task(),
            gate_up=gate_up_task(),
            down=down_task(),
            gate_weights=self._gate.raw,
            up_weights=self._up.raw,
            down_weights=self._down.raw,
            gate_row_bytes=self._gate.raw.shape[2],
            up_row_bytes=self._up.raw.shape[2],
            down_row_bytes=self._down.raw.shape[2],
            hidden=self._hidden,
            width=width,
            num_experts=self._num_experts,
            reads_floats=int(not all(of_x)),
            activation_bytes=max(of_x),
            rounds_h=int(quants.uses_codes(self._down.format)),
            blobs=pool.blobs_address(layer) if pool is not None else 0,
            uses=self._uses,
            use_weight=self._use_weight,
        )
        self.address = address_of(self._record)
        """Of the layer's record, for native code."""
        self._compute = compute()

    @property
    def uses(self) -> Floats:
        """How hot each expert is: the routes that led to it, each counting half after every
        `cpu_worker.expert_waves.USE_HALF_LIFE_TOKENS` tokens."""
        return self._uses / self._use_weight

    def compute(
        self, x: Floats, expert_ids: NDArray[np.int32], weights: Floats, out: Floats, team: Team
    ) -> int:
        """Writes the weighted sums for x [tokens, hidden] into out [tokens, hidden]; returns the number of
        experts that were computed. `expert_ids` and `weights` are [tokens, k]; routes with negative ids are
        someone else's and add nothing. All arrays are C-contiguous.

        Raises ValueError for an id beyond the last expert, or a shape that is not as said; `out` is then as
        it was. Raises WorkerFailedError where experts are not in the pool and there is nobody to bring them.
        Where one cannot be read, the tokens that chose it have sums that are worth nothing, and are booked
        (`ExpertPool.book_into`).
        """
        num_tokens = len(x)
        if x.shape != (num_tokens, self._hidden) or out.shape != x.shape:
            raise ValueError(f"activations {x.shape} and outputs {out.shape} for a width of {self._hidden}")
        if weights.shape != expert_ids.shape or len(expert_ids) != num_tokens:
            raise ValueError(
                f"experts {expert_ids.shape} and weights {weights.shape} for {num_tokens} tokens"
            )
        if num_tokens == 0:
            return 0
        num_bytes = max(team.workspace_bytes, SMALLEST_MEMORY)
        while True:
            memory = team.workspace(num_bytes)
            result = self._compute(self.address, team.address, memory, num_bytes, x, expert_ids, weights, out)
            if result < 0:
                raise ValueError(f"expert {-1 - result} of {self._num_experts}")
            if result == NOT_THERE:
                assert self._pool is not None
                raise self._pool.failure()
            if result < TOO_LITTLE_MEMORY:
                return result
            num_bytes = result - TOO_LITTLE_MEMORY
