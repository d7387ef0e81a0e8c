"""The mixture of experts as tasks: router and shared expert (`gpu_worker.model.moe` has the formulas)."""

import functools

import numpy as np
from numpy.typing import NDArray

from gpu_worker.native.script import Script
from gpu_worker.native.streams import Written
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Floats, Workspace, multiply
from shared.model_config import Qwen4ExpConfig
from shared.native.arithmetic import exp, silu
from shared.native.memory import floats_at, ids_at
from shared.native.records import fields, reader, record
from shared.quants.jit import compile_task
from shared.tensor_catalog import block_prefix

ROUTES = fields(
    "logits",  # f32 [tokens, num_experts]
    "expert_ids",  # i32 [tokens, num_used]
    "expert_weights",  # f32 [tokens, num_used]
    "num_experts",
    "num_used",
    scale=np.float32,
)
PRODUCTS = fields("gate", "up", "out", "width")

_routes_at = reader(ROUTES)
_products_at = reader(PRODUCTS)


def _choose_experts(params: int, start: int, stop: int, scratch: int) -> None:
    step = _routes_at(params)
    num_used = step.num_used
    for token in range(start, stop):
        logits = floats_at(step.logits + token * step.num_experts * 4)
        chosen = ids_at(step.expert_ids + token * num_used * 4)
        weights = floats_at(step.expert_weights + token * num_used * 4)
        # The best so far, largest first and NaN before all; a later expert needs more, not as much.
        num_chosen = 0
        for expert in range(step.num_experts):
            logit = logits[expert]
            if num_chosen == num_used:
                least = weights[num_used - 1]
                if least != least or logit <= least:
                    continue
            place = min(num_chosen, num_used - 1)
            while place > 0 and weights[place - 1] == weights[place - 1] and not logit <= weights[place - 1]:
                weights[place], chosen[place] = weights[place - 1], chosen[place - 1]
                place -= 1
            weights[place], chosen[place] = logit, expert
            num_chosen = min(num_chosen + 1, num_used)
        largest, total = weights[0], np.float32(0)
        for rank in range(num_used):
            weights[rank] = exp(weights[rank] - largest)
            total += weights[rank]
        for rank in range(num_used):
            weights[rank] *= np.divide(step.scale, total)


def _multiply_gated(params: int, start: int, stop: int, scratch: int) -> None:
    step = _products_at(params)
    width, first = step.width, start * step.width * 4
    gate, up, out = floats_at(step.gate + first), floats_at(step.up + first), floats_at(step.out + first)
    for i in range((stop - start) * width):
        out[i] = silu(gate[i]) * up[i]


@functools.cache
def choose_experts_task() -> int:
    """Params `ROUTES`, items tokens: the experts of largest logits and the softmax over these."""
    return compile_task(_choose_experts, "choose_experts")


@functools.cache
def multiply_gated_task() -> int:
    """Params `PRODUCTS`, items rows: SiLU of the gate times up."""
    return compile_task(_multiply_gated, "multiply_gated")


class MixtureOfExperts:
    """Router and shared expert of one layer."""

    def __init__(self, weights: Weights, layer: int, config: Qwen4ExpConfig) -> None:
        prefix = block_prefix(layer)
        self._config = config
        self._router = weights.matrix(f"{prefix}ffn_gate_inp.weight")
        self._shared_gate = weights.matrix(f"{prefix}ffn_gate_inp_shexp.weight")
        self._gate = weights.matrix(f"{prefix}ffn_gate_shexp.weight")
        self._up = weights.matrix(f"{prefix}ffn_up_shexp.weight")
        self._down = weights.matrix(f"{prefix}ffn_down_shexp.weight")

    def build(self, workspace: Workspace) -> None:
        """Takes its buffers. The routes are in `expert_ids` and `expert_weights` [capacity, num used]."""
        config, width = self._config, self._gate.num_rows
        self._x = workspace.plane("x", config.hidden)
        self._logits = workspace.floats("router", config.num_experts)
        self._shared_gate_out = workspace.floats("shared gate", 1)
        # Layers may differ in the width of their shared experts.
        self._gate_out = workspace.floats(f"shared expert gate {width}", width)
        self._up_out = workspace.floats(f"shared expert up {width}", width)
        self._inner = workspace.plane(f"shared expert {width}", width)
        self._shared = workspace.floats("shared expert", config.hidden)
        self.expert_weights: Floats = workspace.floats("expert weights", config.num_experts_used)
        self.expert_ids: NDArray[np.int32] = workspace.floats("expert ids", config.num_experts_used).view(
            np.int32
        )

    def emit_routes(self, script: Script) -> None:
        """Appends the choice of experts, from the plane `x`."""
        config = self._config
        products = (self._router, self._logits), (self._shared_gate, self._shared_gate_out)
        multiply(script, self._x, *products)
        script.barrier()
        params = record(
            ROUTES,
            logits=self._logits,
            expert_ids=self.expert_ids,
            expert_weights=self.expert_weights,
            num_experts=config.num_experts,
            num_used=config.num_experts_used,
            scale=config.expert_weights_scale,
        )
        script.add(choose_experts_task(), params, per_token=1, ns=2.0 * config.num_experts, keep=self)
        script.barrier()

    def emit_shared(self, script: Script) -> Written:
        """Appends the shared expert, from the plane `x`. The routed experts' sums are not in what the layer
        leaves to be written: their address is known when they are there."""
        multiply(script, self._x, (self._gate, self._gate_out), (self._up, self._up_out))
        script.barrier()
        width = self._gate.num_rows
        params = record(PRODUCTS, gate=self._gate_out, up=self._up_out, out=self._inner.floats, width=width)
        script.add(multiply_gated_task(), params, per_token=1, ns=1.0 * width, keep=self)
        script.barrier()
        multiply(script, self._inner, (self._down, self._shared))
        script.barrier()
        return Written(None, self._shared, self._shared_gate_out)
