"""What running answers notice of a long prompt that is read beside them: part of `benchmarks.generation`.

Drafts are off, as in `benchmarks.parallel`.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import Server
from benchmarks.parallel import servers
from benchmarks.prompts import Prompts
from benchmarks.report import BenchmarkError, median, say, table
from benchmarks.streaming import Generation
from benchmarks.undisturbed import Bench, Measured, running
from shared.gguf.model import GGUFModel

_NUM_STREAMS = 2
_STREAM_PROMPT = 32
_MOST_TOKENS = 8192
"""Of a stream, which is broken off before."""
_LEAST_GAP_S = 0.0002
"""No step is as short: of pieces that lie closer the client took the first one late."""


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """How much is measured."""

    rounds: int
    prompt_tokens: int
    calm_s: float
    """For which answers run before the prompt comes."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Seconds between one piece of text of a running answer and the next, of all answers: without a prompt
    and while it was read; and to the first token of such a prompt: alone and beside the answers."""

    calm_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    alone_first_s: float
    beside_first_s: float


def interference_claims(ours: Sequence[Interference], theirs: Sequence[Interference]) -> dict[str, float]:
    """What the runs say: of gaps what 19 of 20 are not longer than."""
    found: dict[str, float] = {}
    for prefix, runs in (("", ours), ("llama_cpp_", theirs)):
        if runs:
            found |= {
                f"{prefix}itl_p95_ms_during_prefill": 1e3 * median(_p95(each.beside_s) for each in runs),
                f"{prefix}itl_p95_ms_calm": 1e3 * median(_p95(each.calm_s) for each in runs),
                f"{prefix}prefill_alone_s": median(each.alone_first_s for each in runs),
                f"{prefix}prefill_beside_s": median(each.beside_first_s for each in runs),
            }
    return found


def _p95(gaps_s: Sequence[float]) -> float:
    return float(np.percentile(gaps_s, 95))


def measure_interference(
    bench: Bench, path: Path, flags: Sequence[str], plan: InterferencePlan
) -> dict[str, float]:
    """Measures both; returns the claims. Raises AnswerError."""
    say(f"a prompt of {plan.prompt_tokens} tokens beside {_NUM_STREAMS} running answers, {path.name}")
    context = max(plan.prompt_tokens, _STREAM_PROMPT + _MOST_TOKENS)
    strata, llama = servers(bench, path, flags, _NUM_STREAMS + 1, context)
    with GGUFModel(path) as model:
        prompts = Prompts(model, seed=3)
    measured: dict[str, list[Measured[Interference]]] = {strata.name: [], llama.name: []}
    for _ in range(plan.rounds):
        for server in (strata, llama):
            with running(server):
                server.generate(prompts.draw(plan.prompt_tokens // 2), 8)
                runs = measured[server.name]
                runs.append(bench.measure((server,), lambda server=server: _interfere(server, prompts, plan)))  # type: ignore[misc]
    say(
        table(
            ("ms", "gap p95 before", "while it is read", "gaps", "prompt alone", "beside", "busy CPUs"),
            [_row(name, each) for name, runs in measured.items() for each in runs],
        )
    )
    bench.report.details.setdefault("interference", {})[path.name] = {
        name: [_details(each) for each in runs] for name, runs in measured.items()
    }
    ours, theirs = (
        bench.counted(f"a prompt beside answers of {name}", measured[name])
        for name in (strata.name, llama.name)
    )
    return interference_claims(ours, theirs)


def _interfere(server: Server, prompts: Prompts, plan: InterferencePlan) -> Interference:
    alone = server.generate(prompts.draw(plan.prompt_tokens), 1)
    stop = threading.Event()
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        try:
            answering = [
                pool.submit(server.generate, prompts.draw(_STREAM_PROMPT), _MOST_TOKENS, stop=stop)
                for _ in range(_NUM_STREAMS)
            ]
            time.sleep(plan.calm_s)
            beside = server.generate(prompts.draw(plan.prompt_tokens), 1)
        finally:
            # With the next token, which ends the last gap.
            stop.set()
        answers = [future.result() for future in answering]
    asked_at = beside.asked_at
    read_at = asked_at + beside.first_token_s
    # Until then one of them waits for the prompt of another.
    all_run_at = max(answer.asked_at + answer.first_token_s for answer in answers)
    calm = [gap for answer in answers for gap in gaps_within(answer, all_run_at, asked_at)]
    during = [gap for answer in answers for gap in gaps_within(answer, asked_at, read_at)]
    if not calm or not during:
        raise BenchmarkError(f"{server.name}: no answer ran before the prompt, or none beside it")
    return Interference(tuple(calm), tuple(during), alone.first_token_s, beside.first_token_s)


def gaps_within(answer: Generation, start: float, stop: float) -> list[float]:
    """Those that end after `start` and begin before `stop`, by `time.perf_counter`, whole."""
    moments = [answer.asked_at + second for second in answer.arrived_s]
    gaps = [after - before for before, after in pairwise(moments) if after > start and before < stop]
    return [gap for gap in gaps if gap >= _LEAST_GAP_S]


def _row(name: str, measured: Measured[Interference]) -> list[str]:
    each = measured.value
    return [
        name,
        f"{1e3 * _p95(each.calm_s):.1f}",
        f"{1e3 * _p95(each.beside_s):.1f}",
        f"{len(each.beside_s)}",
        f"{1e3 * each.alone_first_s:.0f}",
        f"{1e3 * each.beside_first_s:.0f}",
        f"{measured.foreign_cpus:.2f}",
    ]


def _details(measured: Measured[Interference]) -> dict[str, Any]:
    each = measured.value
    return {
        "calm_gaps_s": [round(gap, 5) for gap in each.calm_s],
        "beside_gaps_s": [round(gap, 5) for gap in each.beside_s],
        "alone_first_s": each.alone_first_s,
        "beside_first_s": each.beside_first_s,
        "foreign_cpus": measured.foreign_cpus,
    }
