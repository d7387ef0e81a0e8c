"""The mixture of experts: a router, routed experts as grouped matrix products, and one shared expert.

Tokens are sorted by expert, so each expert multiplies one contiguous slab. Autograd would keep a graph node
for every slab; the grouped product has its own backward pass instead, which reuses the sorted copies.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import DemoConfig


@dataclass(slots=True)
class Routing:
    """What the router of one layer decided, kept for the load-balancing loss."""

    probabilities: Tensor
    """`[T, num_experts]`"""
    chosen: Tensor
    """`[T, num_experts_per_tok]`"""


class Experts(nn.Module):
    """The routed experts' weights, stacked."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, hidden))


class SharedExpert(nn.Module):
    """The expert every token uses."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """A few of many experts for each token, and one shared expert for all."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The answer for `[T, H]`, and how it was routed."""
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(self.num_chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = grouped_experts(x, chosen, weights, self.experts.gate_up_proj, self.experts.down_proj)
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return routed + shared, Routing(probabilities, chosen)


class _GroupedExperts(torch.autograd.Function):
    """out[t] = Σ_k weight[t, k] · down_e( silu(gate_e · x[t]) ⊙ (up_e · x[t]) ),  e = chosen[t, k]"""

    @staticmethod
    def forward(
        context: Any, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        num_tokens, num_chosen = chosen.shape
        num_experts = gate_up.shape[0]
        order = torch.argsort(chosen.flatten())
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
        token = order // num_chosen
        sorted_x = x.index_select(0, token)
        sorted_weights = weights.flatten().index_select(0, order).unsqueeze(1)

        projected = _per_expert(sorted_x, gate_up.transpose(1, 2), counts)
        gate, up = projected.chunk(2, -1)
        gate_sigmoid = torch.sigmoid(gate)
        activated = gate * gate_sigmoid * up
        weighted = activated * sorted_weights
        answers = _per_expert(weighted, down.transpose(1, 2), counts)
        context.save_for_backward(
            sorted_x,
            sorted_weights,
            projected,
            gate_sigmoid,
            activated,
            weighted,
            gate_up,
            down,
            token,
            place,
        )
        context.counts = counts
        return _gather_back(answers, place, num_tokens)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (
            sorted_x,
            sorted_weights,
            projected,
            gate_sigmoid,
            activated,
            weighted,
            gate_up,
            down,
            token,
            place,
        ) = context.saved_tensors
        counts = context.counts
        num_tokens = gradient.shape[0]
        answer_gradient = gradient.index_select(0, token)
        down_gradient = _outer_per_expert(answer_gradient, weighted, down, counts)
        weighted_gradient = _per_expert(answer_gradient, down, counts)
        weights_gradient = (weighted_gradient * activated).sum(1).index_select(0, place)
        activated_gradient = weighted_gradient.mul_(sorted_weights)

        gate, up = projected.chunk(2, -1)
        projected_gradient = torch.empty_like(projected)
        gate_gradient, up_gradient = projected_gradient.chunk(2, -1)
        silu = gate * gate_sigmoid
        torch.mul(activated_gradient, silu, out=up_gradient)
        silu_slope = gate_sigmoid + silu * (1 - gate_sigmoid)
        torch.mul(activated_gradient * up, silu_slope, out=gate_gradient)
        gate_up_gradient = _outer_per_expert(projected_gradient, sorted_x, gate_up, counts)
        x_gradient = _gather_back(_per_expert(projected_gradient, gate_up, counts), place, num_tokens)
        return x_gradient, None, weights_gradient.view(num_tokens, -1), gate_up_gradient, down_gradient


def grouped_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' answers.

    Shapes: `x` `[T, H]`; `chosen` and `weights` `[T, k]`; `gate_up` `[experts, 2·F, H]`, gate rows first;
    `down` `[experts, H, F]`. Returns `[T, H]`.
    """
    result: Tensor = _GroupedExperts.apply(x, chosen, weights, gate_up, down)
    return result


def _per_expert(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """Multiplies each expert's slab of `rows` by its `[in, out]` matrix."""
    result = rows.new_empty(rows.shape[0], matrices.shape[2])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(rows[start : start + count], matrices[expert], out=result[start : start + count])
            start += count
    return result


def _outer_per_expert(left: Tensor, right: Tensor, like: Tensor, counts: list[int]) -> Tensor:
    """leftᵀ · right over each expert's slab: the gradient of its matrix."""
    result = torch.zeros_like(like)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(left[rows].t(), right[rows], out=result[expert])
            start += count
    return result


def _gather_back(rows: Tensor, place: Tensor, num_tokens: int) -> Tensor:
    """Undoes the sorting and sums the answers of one token."""
    return rows.index_select(0, place).view(num_tokens, -1, rows.shape[1]).sum(1)
