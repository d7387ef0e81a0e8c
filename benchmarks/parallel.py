"""Several requests at once: part of `benchmarks.generation`.

Prompts are random, and what models answer to those repeats itself; so drafts are off, which would be right
more often than in answers that mean something.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import LlamaServer, Server, Strata
from benchmarks.prompts import Prompts
from benchmarks.report import median, say, table
from benchmarks.streaming import Generation
from benchmarks.undisturbed import Bench, Measured, running
from shared.gguf.model import GGUFModel

_SPARE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How much is measured."""

    rounds: int
    numbers: tuple[int, ...]
    """Of requests at a time, rising."""
    prompt_tokens: int
    num_new: int
    one_start: bool
    """Whether all numbers are asked of servers with as many slots as the largest one."""


@dataclass(frozen=True, slots=True)
class Together:
    """Requests that were sent at the same time."""

    num_requests: int
    num_tokens: int
    """That were generated."""
    seconds: float
    """From sending the first request to the last token of all."""
    expert_bytes: int
    """Of experts that the cpu_worker read for tokens that were generated, as the stack says; 0 where it does
    not."""

    @property
    def tokens_per_s(self) -> float:
        """Of all of them together, reading their prompts included."""
        return self.num_tokens / self.seconds

    @property
    def bytes_per_token(self) -> float:
        """Of experts, for a token that was generated."""
        return self.expert_bytes / self.num_tokens


def parallel_claims(
    ours: Mapping[int, Sequence[Together]], theirs: Mapping[int, Sequence[Together]]
) -> dict[str, float]:
    """By the number of requests; a ratio over 1: Strata is faster. `shared_reads_gain_N`: bytes of experts
    read per token with one request at a time, over those with N."""
    found: dict[str, float] = {}
    speeds = {number: median(each.tokens_per_s for each in runs) for number, runs in ours.items()}
    sizes = {number: median(each.bytes_per_token for each in runs) for number, runs in ours.items()}
    for number, speed in speeds.items():
        their_speed = median(each.tokens_per_s for each in theirs[number])
        found[f"parallel_{number}_ratio"] = speed / their_speed
        found[f"parallel_{number}_tokens_per_s"] = speed
        found[f"llama_cpp_parallel_{number}_tokens_per_s"] = their_speed
        if sizes[number] > 0:
            found[f"expert_mb_per_token_{number}"] = sizes[number] / 1e6
        if number > 1 and 1 in sizes and sizes[number] > 0:
            found[f"shared_reads_gain_{number}"] = sizes[1] / sizes[number]
    return found


def measure_parallel(bench: Bench, path: Path, flags: Sequence[str], plan: ParallelPlan) -> dict[str, float]:
    """Measures both with every number of requests; returns the claims. Raises AnswerError."""
    say(f"parallel: {plan.prompt_tokens} tokens are answered with {plan.num_new}, {path.name}")
    measured: dict[str, dict[int, list[Measured[Together]]]] = {"strata": {}, "llama.cpp server": {}}
    with GGUFModel(path) as model:
        # Not the same for both, but nobody knows any of them.
        prompts = Prompts(model, seed=2)
    groups = [plan.numbers] if plan.one_start else [(number,) for number in plan.numbers]
    for numbers in groups:
        strata, llama = servers(bench, path, flags, numbers[-1], plan.prompt_tokens + plan.num_new)
        with running(llama):
            for number_of_round in range(plan.rounds):
                # Strata does not run beside llama.cpp, to which its idle processes matter.
                _ask_all(bench, llama, prompts, numbers, plan, measured, warm_up=number_of_round == 0)
                with running(strata):
                    _ask_all(bench, strata, prompts, numbers, plan, measured, warm_up=True)
    say(
        table(
            ("tokens/s", "at once", "of all", "MB of experts a token", "busy CPUs"),
            [
                _row(name, each)
                for name, by_number in measured.items()
                for runs in by_number.values()
                for each in runs
            ],
        )
    )
    bench.report.details.setdefault("parallel", {})[path.name] = {
        name: {str(number): [_details(each) for each in runs] for number, runs in by_number.items()}
        for name, by_number in measured.items()
    }
    ours, theirs = (
        {
            number: bench.counted(f"{number} parallel requests of {name}", runs)
            for number, runs in by_number.items()
        }
        for name, by_number in measured.items()
    )
    return parallel_claims(ours, theirs)


def servers(
    bench: Bench, path: Path, flags: Sequence[str], number: int, num_tokens: int
) -> tuple[Strata, LlamaServer]:
    """Both, for so many requests at a time, each of so many tokens with its answer."""
    context = num_tokens + _SPARE_TOKENS
    strata = Strata(path, bench.cpus, context, [*flags, "--spec", "0", "--parallel", str(number)])
    # Each slot gets its part of the context.
    llama = LlamaServer(path, bench.cpus, number * context, ["--slots", str(number)])
    return strata, llama


def _ask_all(
    bench: Bench,
    server: Server,
    prompts: Prompts,
    numbers: Sequence[int],
    plan: ParallelPlan,
    measured: dict[str, dict[int, list[Measured[Together]]]],
    *,
    warm_up: bool,
) -> None:
    if warm_up:
        ask_at_once(server, [prompts.draw(plan.prompt_tokens) for _ in range(numbers[-1])], plan.num_new // 2)
    # What reading a prompt takes, to tell it from what its answer takes.
    alone = server.generate(prompts.draw(plan.prompt_tokens), 1)
    for number in numbers:
        drawn = [prompts.draw(plan.prompt_tokens) for _ in range(number)]
        each = bench.measure((server,), lambda drawn=drawn: ask_at_once(server, drawn, plan.num_new))  # type: ignore[misc]
        answers: list[Generation] = each.value
        first_at = min(answer.asked_at for answer in answers)
        last_at = max(answer.asked_at + answer.arrived_s[-1] for answer in answers)
        together = Together(
            number,
            sum(answer.num_tokens for answer in answers),
            last_at - first_at,
            max(0, sum(map(_expert_bytes, answers)) - number * _expert_bytes(alone)),
        )
        say(f"  {server.name}: {number} at once, {together.tokens_per_s:.1f} tokens/s")
        measured[server.name].setdefault(number, []).append(Measured(together, each.foreign_cpus))


def ask_at_once(server: Server, prompts: Sequence[list[int]], num_new: int) -> list[Generation]:
    """The answers to prompts that are sent at the same time. Raises AnswerError."""
    begin = threading.Barrier(len(prompts))

    def ask(prompt: list[int]) -> Generation:
        begin.wait()
        return server.generate(prompt, num_new)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def _expert_bytes(answer: Generation) -> int:
    timings: dict[str, Any] = answer.timings or {}
    found = timings.get("expert_bytes_n") or {}
    return int(found.get("ram", 0))


def _row(name: str, measured: Measured[Together]) -> list[str]:
    each = measured.value
    return [
        name,
        f"{each.num_requests}",
        f"{each.tokens_per_s:.1f}",
        f"{each.bytes_per_token / 1e6:.2f}" if each.expert_bytes else "-",
        f"{measured.foreign_cpus:.2f}",
    ]


def _details(measured: Measured[Together]) -> dict[str, Any]:
    each = measured.value
    return {
        "num_tokens": each.num_tokens,
        "seconds": each.seconds,
        "expert_bytes": each.expert_bytes,
        "foreign_cpus": measured.foreign_cpus,
    }
