"""Muon for matrices, Adam for the rest, shared between worker processes.

Muon (Jordan et al. 2024; scaled as in Liu et al. 2025, "Muon is scalable for LLM training") replaces a
matrix's averaged gradient by the nearest orthogonal matrix, found by a few Newton-Schulz steps. It learns
rare facts in fewer steps than Adam, for about a fifth more time here.

Parameters, gradients and moments lie in shared memory. Every worker fills gradients of its own; then each
updates its part of the parameters from the mean of all gradients. The caller places a barrier before and
after `step`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self

import torch
from torch import Tensor, nn


class Rule(Enum):
    """How a parameter is updated."""

    MUON = auto()
    ADAM = auto()


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Rates are for the peak of the schedule."""

    matrix_rate: float = 3e-3
    """Muon's, where an update has the root mean square that 0.2 Adam steps have."""
    embedding_rate: float = 4e-3
    vector_rate: float = 2e-3
    weight_decay: float = 0.02
    """Of matrices."""
    momentum: float = 0.95
    adam_betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-10

    def scaled(self, factor: float) -> Self:
        """The same with every rate multiplied."""
        return replace(
            self,
            matrix_rate=self.matrix_rate * factor,
            embedding_rate=self.embedding_rate * factor,
            vector_rate=self.vector_rate * factor,
        )


@dataclass(slots=True)
class _Entry:
    """One parameter with everything its update needs."""

    name: str
    parameter: Tensor
    gradients: list[Tensor]
    """One for each worker."""
    moments: list[Tensor]
    rule: Rule
    rate: float
    weight_decay: float
    cost: float
    """Of one update, in any unit."""


_TABLES = ("embed", "lm_head")
_GATES = ("conv1d", "mlp.gate.", "shared_expert_gate", "block_inject_weight", "in_proj_a", "in_proj_b")


def rule_of(name: str, parameter: Tensor) -> Rule:
    """Tables, gates and everything that is no matrix go to Adam."""
    is_special = any(part in name for part in _TABLES + _GATES)
    return Rule.ADAM if parameter.dim() < 2 or is_special else Rule.MUON


class SharedOptimizer:
    """The optimizer of all workers; created once, before they start."""

    def __init__(self, module: nn.Module, hyperparameters: Hyperparameters, num_workers: int) -> None:
        self._hyperparameters = hyperparameters
        self._entries: list[_Entry] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.data.share_memory_()
            rule = rule_of(name, parameter)
            num_moments = 1 if rule is Rule.MUON else 2

            def shared(like: Tensor = parameter) -> Tensor:
                return torch.zeros_like(like.data).share_memory_()

            self._entries.append(
                _Entry(
                    name,
                    parameter.data,
                    [shared() for _ in range(num_workers)],
                    [shared() for _ in range(num_moments)],
                    rule,
                    self._rate(name, rule),
                    hyperparameters.weight_decay if rule is Rule.MUON else 0.0,
                    parameter.numel() * (min(parameter.shape[-2:]) if rule is Rule.MUON else 1),
                )
            )

    def _rate(self, name: str, rule: Rule) -> float:
        if rule is Rule.MUON:
            return self._hyperparameters.matrix_rate
        is_table = any(part in name for part in _TABLES)
        return self._hyperparameters.embedding_rate if is_table else self._hyperparameters.vector_rate

    def attach(self, module: nn.Module, worker: int) -> None:
        """Lets `module`, which shares the parameters, accumulate into the gradients of `worker`."""
        parameters = dict(module.named_parameters())
        for entry in self._entries:
            parameters[entry.name].grad = entry.gradients[worker]

    def state(self) -> dict[str, Tensor]:
        """Moments by name, to be saved."""
        return {
            f"{entry.name} {order}": moment
            for entry in self._entries
            for order, moment in enumerate(entry.moments)
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        for name, moment in self.state().items():
            moment.copy_(state[name])

    def share_of(self, worker: int, num_workers: int) -> Sequence[int]:
        """Which entries a worker updates: about equal work for each."""
        loads = [0.0] * num_workers
        shares: list[list[int]] = [[] for _ in range(num_workers)]
        for place in sorted(range(len(self._entries)), key=lambda place: -self._entries[place].cost):
            lightest = loads.index(min(loads))
            loads[lightest] += self._entries[place].cost
            shares[lightest].append(place)
        return shares[worker]

    @torch.no_grad()
    def step(self, places: Sequence[int], step_number: int, rate_factor: float) -> None:
        """Updates the given entries; `step_number` counts from 1. Clears their gradients."""
        for place in places:
            entry = self._entries[place]
            gradient = entry.gradients[0]
            for other in entry.gradients[1:]:
                gradient.add_(other)
            gradient.div_(len(entry.gradients))
            if entry.weight_decay:
                entry.parameter.mul_(1 - entry.rate * rate_factor * entry.weight_decay)
            if entry.rule is Rule.MUON:
                self._muon(entry, gradient, rate_factor)
            else:
                self._adam(entry, gradient, step_number, rate_factor)
            for stale in entry.gradients:
                stale.zero_()

    def _muon(self, entry: _Entry, gradient: Tensor, rate_factor: float) -> None:
        (average,) = entry.moments
        average.mul_(self._hyperparameters.momentum).add_(gradient)
        direction = orthogonalized(gradient.add(average, alpha=self._hyperparameters.momentum))
        size = 0.2 * math.sqrt(max(entry.parameter.shape[-2:]))
        entry.parameter.add_(direction, alpha=-entry.rate * rate_factor * size)

    def _adam(self, entry: _Entry, gradient: Tensor, step_number: int, rate_factor: float) -> None:
        first, second = entry.moments
        beta_first, beta_second = self._hyperparameters.adam_betas
        first.lerp_(gradient, 1 - beta_first)
        second.mul_(beta_second).addcmul_(gradient, gradient, value=1 - beta_second)
        correction = math.sqrt(1 - beta_second**step_number) / (1 - beta_first**step_number)
        denominator = second.sqrt().add_(self._hyperparameters.epsilon)
        entry.parameter.addcdiv_(first, denominator, value=-entry.rate * rate_factor * correction)


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al.: five steps bring singular values near one, quickly rather than exactly."""


def orthogonalized(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix to each of `[…, rows, columns]`, roughly."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    first, third, fifth = _NEWTON_SCHULZ
    for _ in range(num_steps):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x.mT if is_tall else x
