"""What a token costs after so many others: part of `benchmarks.generation`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.contenders import Strata
from benchmarks.prompts import Prompts
from benchmarks.report import median, say, table
from benchmarks.undisturbed import Bench, Measured, running
from shared.gguf.model import GGUFModel


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """How much is measured."""

    rounds: int
    contexts: tuple[int, ...]
    """Tokens of prompts, rising; the first is what the others are compared with."""
    num_new: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one answer: the median of the times between tokens, and the time to its first."""

    token_s: float
    first_s: float


def context_claims(costs: Mapping[int, Sequence[Cost]]) -> dict[str, float]:
    """By thousands of tokens; `context_8k_ratio` is what a token costs after 8K tokens, over that after the
    shortest context."""
    medians = {context: median(cost.token_s for cost in runs) for context, runs in costs.items()}
    first = min(medians)
    found = {f"context_{_name(context)}_ms_per_token": 1e3 * value for context, value in medians.items()}
    return found | {
        f"context_{_name(context)}_ratio": value / medians[first]
        for context, value in medians.items()
        if context != first
    }


def _name(context: int) -> str:
    return f"{round(context / 1024)}k"


def measure_context(bench: Bench, path: Path, flags: Sequence[str], plan: ContextPlan) -> dict[str, float]:
    """Measures; returns the claims. Raises AnswerError."""
    say(f"context: tokens after {', '.join(map(str, plan.contexts))}, {path.name}")
    room = plan.num_new + 1
    strata = Strata(path, bench.cpus, plan.contexts[-1], [*flags, "--spec", "0", "--parallel", "1"])
    with GGUFModel(path) as model:
        prompts = Prompts(model, seed=4)

    def ask(token_ids: Sequence[int]) -> Cost:
        answer = strata.generate(token_ids, room)
        return Cost(median(np.diff(answer.arrived_s).tolist()), answer.first_token_s)

    measured: dict[int, list[Measured[Cost]]] = {context: [] for context in plan.contexts}
    with running(strata):
        ask(prompts.draw(plan.contexts[0] // 2))
        # A longer one begins with the shorter one, and comes again in each round: the stack remembers what it
        # has read, and reads what is new.
        whole = prompts.draw(plan.contexts[-1] - room)
        for _ in range(plan.rounds):
            for context, runs in measured.items():
                token_ids = whole[: context - room]
                runs.append(bench.measure((strata,), lambda token_ids=token_ids: ask(token_ids)))  # type: ignore[misc]
    say(
        table(
            ("tokens before", "ms per token", "first token, s", "busy CPUs"),
            [
                [
                    f"{context}",
                    f"{1e3 * each.value.token_s:.3f}",
                    f"{each.value.first_s:.2f}",
                    f"{each.foreign_cpus:.2f}",
                ]
                for context, runs in measured.items()
                for each in runs
            ],
        )
    )
    bench.report.details.setdefault("context", {})[path.name] = {
        str(context): [
            {"token_s": each.value.token_s, "first_s": each.value.first_s, "foreign_cpus": each.foreign_cpus}
            for each in runs
        ]
        for context, runs in measured.items()
    }
    return context_claims(
        {context: bench.counted(f"tokens after {context} others", runs) for context, runs in measured.items()}
    )
