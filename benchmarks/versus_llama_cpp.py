"""Strata against llama.cpp: both serve one GGUF file on the same CPUs, and are asked in turn.

    python -m benchmarks.versus_llama_cpp --profile iq2_xs [--quick] [--json FILE]
    python -m benchmarks.versus_llama_cpp --model FILE.gguf [--profile NAME]

A profile is a slice of the real model (`benchmarks.slices`); it is written first where it is missing. Prompts
are random token ids, none used twice, so that no prefix is known already. Times are those of the client: to
the first token, and from there to the last. Two things stand for llama.cpp: its server, as a user would have
it, and its library called without one; a ratio named plainly is against the faster of the two. Memory is what
processes hold at most apart from mapped pages of files (VmHWM minus RssFile, summed).

The machine must be quiet: a single busy thread of somebody else's makes llama.cpp many times slower and
Strata less (`benchmarks.processes.CpuWatch`). So every request waits for quiet, and one that was disturbed
nevertheless is repeated and does not count. Where nothing undisturbed is left there is no claim, and the exit
code is 1.

At the end the predictions of both are held against exact arithmetic, and where Strata is further from it than
it may be (see `benchmarks.quality`) the exit code is 1, whatever the speed.

Claims: `decode_ratio`, `prefill_512_ratio`, `prefill_2048_ratio`, `first_token_ratio` (over 1: Strata is
faster), `memory_ratio` (under 1: Strata takes less); the same with `_server` and `_in_process` against one of
the two; the medians that they are quotients of; and, of models that no cache holds,
`read_limit_tokens_per_s`, at which memory delivers what a token reads, and `decode_read_share`, Strata's part
of that (over 1 where a cache keeps some of it).
"""

import argparse
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import add_match_arguments, positive
from benchmarks.contenders import Contender, LlamaInProcess, LlamaServer, Strata
from benchmarks.ggml import library_path
from benchmarks.page_cache import warm_page_cache
from benchmarks.processes import CpuWatch, wait_for_quiet
from benchmarks.prompts import Prompts
from benchmarks.quality import (
    PORTABLE,
    NoReferenceError,
    Quality,
    compare,
    divergences,
    has_portable_kernels,
    strata_logits,
)
from benchmarks.read_limit import read_bytes_per_s, token_bytes
from benchmarks.report import Report, describe_machine, measured, median, memory_bytes, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from benchmarks.streaming import AnswerError, Generation
from shared.gguf.model import GGUFModel

DECODE, PREFILL_512, PREFILL_2048 = "decode", "prefill_512", "prefill_2048"
_PREFILL_TOKENS = {PREFILL_512: 512, PREFILL_2048: 2048}
KINDS = (DECODE, PREFILL_512, PREFILL_2048)
_LEAST_READ_BYTES = 400 << 20
_DECODE_PROMPT = 32
_QUALITY_PROMPT = 48
_WARM_UP_PROMPT, _WARM_UP_NEW = 384, 4
# The longest prompt and the longest answer, and some room.
_CONTEXT = 2560

_QUICK_S = 60.0
# Starting Strata, its shorter requests, and judging.
_QUICK_REST_S = 25.0
# Each of llama.cpp's processes keeps a rearranged copy of much of the weights beside the mapped file.
_SPARE_BYTES = 3 << 30
MAX_FOREIGN_CPUS = 0.06
"""A request beside more than this does not count. Beside 0.05 no effect was seen, beside 0.12 llama.cpp was
13 % slower."""
_MAX_TRIES = 3


class BusyError(Exception):
    """The machine does not become quiet; the text says what it does instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    num_new: int
    """Tokens after the prompt that decode speed is taken from, and one more."""
    is_quick: bool


QUICK = Plan(rounds=1, num_new=32, is_quick=True)
FULL = Plan(rounds=5, num_new=64, is_quick=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One request and what it was measured beside."""

    generation: Generation
    foreign_cpus: float
    """CPUs that were busy with something else, on average."""

    @property
    def counts(self) -> bool:
        """Whether it was undisturbed."""
        return self.foreign_cpus <= MAX_FOREIGN_CPUS


@dataclass(slots=True)
class Results:
    """What was measured of each contender, by its name and the kind of request."""

    runs: dict[str, dict[str, list[Run]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def counted(self, name: str, kind: str) -> list[Generation]:
        """Of the undisturbed runs."""
        return [run.generation for run in self.runs[name].get(kind, ()) if run.counts]

    def medians(self, kind: str, value: Callable[[Generation], float]) -> dict[str, float]:
        """Of every contender; empty unless all of them have an undisturbed run, since what is best of some
        says nothing of the best."""
        counted = {name: self.counted(name, kind) for name in self.runs}
        if not all(counted.values()):
            return {}
        return {name: median(map(value, generations)) for name, generations in counted.items()}

    def missing(self) -> list[str]:
        """What was asked for and has no undisturbed run."""
        return [
            f"{kind} of {name} (least beside {min(run.foreign_cpus for run in runs):.2f} busy CPUs)"
            for name, kinds in self.runs.items()
            for kind, runs in kinds.items()
            if not any(run.counts for run in runs)
        ]


class Match:
    """Runs the contenders, one at a time. Use as a context manager: leaving ends them all.

    Strata never runs beside another one. Its four idle processes take 0.05 of a CPU to say that they are
    well, and llama.cpp beside them was some 6 % slower (28.7 tokens/s, 30.6 alone). llama.cpp uses nothing
    while it is idle, so it may stay loaded.
    """

    def __init__(
        self, prompts: Prompts, cpus: set[int], stays_up: Collection[Contender], patience_s: float
    ) -> None:
        """`stays_up`: those that go on running between their turns. `patience_s`: how long a request waits
        for the machine to be quiet."""
        self.results = Results()
        self._prompts = prompts
        self._cpus = cpus
        self._stays_up = stays_up
        self._patience_s = patience_s
        self._started: list[Contender] = []

    def __enter__(self) -> "Match":
        return self

    def __exit__(self, *_: object) -> None:
        for contender in self._started:
            contender.stop()

    def measure(
        self, contender: Contender, kinds: Sequence[str], num_new: int, logits_of: Sequence[int] | None = None
    ) -> NDArray[np.float32] | None:
        """Its turn: a prompt of each kind, and then, where asked for, the logits of one. Raises AnswerError,
        BusyError."""
        if not contender.is_running:
            self._start(contender)
        try:
            for kind in kinds:
                self._measure(contender, kind, num_new)
            memory = self.results.memory_bytes
            memory[contender.name] = max(memory.get(contender.name, 0), contender.memory_bytes())
            if logits_of is not None and isinstance(contender, Strata | LlamaInProcess):
                return contender.logits(logits_of)
            return None
        finally:
            if contender not in self._stays_up:
                contender.stop()

    def _start(self, contender: Contender) -> None:
        began = time.monotonic()
        if contender not in self._started:
            self._started.append(contender)
        contender.start()
        contender.generate(self._prompts.draw(_WARM_UP_PROMPT), _WARM_UP_NEW)
        say(f"{contender.name}: started and warm after {time.monotonic() - began:.1f} s")

    def _measure(self, contender: Contender, kind: str, num_new: int) -> None:
        """Asks until a run is undisturbed, a few times at most."""
        for _ in range(_MAX_TRIES):
            self._wait_for_quiet()
            # Never one that has been used: a prefix that is known already would be no work.
            prompt = self._prompts.draw(_PREFILL_TOKENS.get(kind, _DECODE_PROMPT))
            watch = CpuWatch(self._cpus, contender.cpu_seconds)
            generation = contender.generate(prompt, num_new + 1 if kind == DECODE else 1)
            run = Run(generation, watch.foreign_cpus())
            self.results.runs[contender.name][kind].append(run)
            remark = "" if run.counts else f", disturbed by {run.foreign_cpus:.2f} busy CPUs"
            say(f"  {contender.name}: {kind} {_speed(kind, generation):.2f} tokens/s{remark}")
            if run.counts:
                return

    def _wait_for_quiet(self) -> None:
        foreign_cpus = wait_for_quiet(self._cpus, MAX_FOREIGN_CPUS, self._patience_s)
        if foreign_cpus > MAX_FOREIGN_CPUS:
            # Going on would measure nothing, and disturb whoever else is measuring.
            raise BusyError(
                f"something else has kept the CPUs busy for {self._patience_s:g} s, "
                f"{foreign_cpus:.2f} of {len(self._cpus)} at the end; --patience waits longer"
            )


def _speed(kind: str, generation: Generation) -> float:
    return generation.decode_tokens_per_s if kind == DECODE else generation.prefill_tokens_per_s


def speed_claims(results: Results) -> dict[str, float]:
    """The medians of every contender, and Strata's against those of llama.cpp."""
    tables: dict[str, dict[str, float]] = {
        kind: results.medians(kind, lambda generation, kind=kind: _speed(kind, generation))  # type: ignore[misc]
        for kind in KINDS
    }
    # As a speed, so that more is better everywhere.
    tables["first_token"] = results.medians(DECODE, lambda generation: 1 / generation.first_token_s)
    found: dict[str, float] = {}
    for kind, medians in tables.items():
        for name, value in medians.items():
            if kind == "first_token":
                found[f"{_claim_name(name)}_first_token_ms"] = 1e3 / value
            else:
                found[f"{_claim_name(name)}_{kind}_tokens_per_s"] = value
        found |= _ratios(kind, medians, best=max)
    memory = {name: float(count) for name, count in results.memory_bytes.items()}
    found |= {f"{_claim_name(name)}_memory_mib": count / 2**20 for name, count in memory.items()}
    return found | _ratios("memory", memory, best=min)


def _ratios(
    kind: str, values: Mapping[str, float], best: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    ours = values.get("strata")
    theirs = {_claim_name(name): value for name, value in values.items() if name != "strata"}
    if ours is None or not theirs:
        return {}
    found = {f"{kind}_ratio": ours / best(list(theirs.values()))}
    for name, value in theirs.items():
        found[f"{kind}_ratio_{name.removeprefix('llama_cpp_')}"] = ours / value
    return found


def _claim_name(name: str) -> str:
    return name.replace(".", "_").replace(" ", "_")


@dataclass(slots=True)
class Logits:
    """Of one prompt, [tokens, vocabulary] each."""

    strata: NDArray[np.float32] | None = None
    llama_cpp: NDArray[np.float32] | None = None


def measure(
    match: Match, contenders: Sequence[Contender], plan: Plan, token_ids: Sequence[int] | None
) -> Logits:
    """All rounds, and in the last one the logits of `token_ids`. Raises AnswerError, BusyError."""
    logits = Logits()
    order = list(contenders)
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        is_last = number == plan.rounds - 1
        for contender in order:
            found = match.measure(contender, KINDS, plan.num_new, token_ids if is_last else None)
            _keep(logits, contender, found)
        # Nobody always follows the same one.
        order.append(order.pop(0))
    return logits


def measure_quickly(
    match: Match,
    strata: Strata,
    llama: LlamaInProcess,
    plan: Plan,
    token_ids: Sequence[int] | None,
    report: Report,
) -> Logits:
    """One turn for each; what would not be done in a minute is left out. Raises AnswerError,
    BusyError."""
    logits = Logits()
    kinds: tuple[str, ...] = (DECODE, PREFILL_512)
    _keep(logits, llama, match.measure(llama, kinds, plan.num_new, token_ids))
    longer = _PREFILL_TOKENS[PREFILL_2048] / _PREFILL_TOKENS[PREFILL_512]
    counted = match.results.counted(llama.name, PREFILL_512)
    # As if Strata were no faster.
    needed_s = 2 * longer * counted[-1].first_token_s if counted else _QUICK_S
    if time.time() - report.started_at + needed_s + _QUICK_REST_S > _QUICK_S:
        report.note(f"left out of this quick run: {PREFILL_2048}, for which the minute is too short")
    else:
        match.measure(llama, (PREFILL_2048,), plan.num_new)
        kinds = KINDS
    _keep(logits, strata, match.measure(strata, kinds, plan.num_new, token_ids))
    return logits


def _keep(logits: Logits, contender: Contender, found: NDArray[np.float32] | None) -> None:
    if found is not None and contender.name == "strata":
        logits.strata = found
    elif found is not None:
        logits.llama_cpp = found


def judge(logits: Logits, model: Path, token_ids: Sequence[int], report: Report) -> Quality | None:
    """Both against exact arithmetic; None where this version of Strata has none. Raises AnswerError,
    NoReferenceError."""
    if logits.strata is None or logits.llama_cpp is None:
        raise AnswerError("there are no logits to judge")
    report.claim("kl_strata_to_llama_cpp", float(divergences(logits.strata, logits.llama_cpp).mean()))
    if not has_portable_kernels():
        report.note(
            f"quality is not judged: this version of Strata has no {PORTABLE[0]} to compute exactly with"
        )
        return None
    quality = compare(strata_logits(model, token_ids, PORTABLE), logits.strata, logits.llama_cpp)
    report.claim("kl_strata", quality.strata)
    report.claim("kl_llama_cpp", quality.llama_cpp)
    report.claim("top1_strata", quality.strata_top1)
    report.claim("top1_llama_cpp", quality.llama_cpp_top1)
    return quality


def claim_read_limit(path: Path, cpus: set[int], report: Report) -> None:
    """How fast memory would let anybody decode, and how near to that Strata came."""
    with GGUFModel(path) as model:
        needed = token_bytes(model)
        if needed < _LEAST_READ_BYTES:
            report.note(f"no read limit: the {needed / 1e6:.0f} MB that a token reads may lie in caches")
            return
        bytes_per_s = read_bytes_per_s(model, cpus)
    report.details["read_limit"] = {"token_bytes": needed, "bytes_per_s": bytes_per_s}
    limit = bytes_per_s / needed
    say(f"a token reads {needed / 1e6:.0f} MB, {len(cpus)} threads read {bytes_per_s / 1e9:.1f} GB/s")
    report.claim("read_limit_tokens_per_s", limit)
    if decoded := report.claims.get("strata_decode_tokens_per_s"):
        report.claim("decode_read_share", decoded / limit)


def _as_table(results: Results) -> str:
    rows = []
    for name, kinds in sorted(results.runs.items()):
        for kind, runs in kinds.items():
            speeds = sorted(_speed(kind, generation) for generation in results.counted(name, kind))
            cells = (
                [f"{median(speeds):.2f}", f"{speeds[0]:.2f}", f"{speeds[-1]:.2f}"] if speeds else ["-"] * 3
            )
            rows.append([f"{name}, {kind}", *cells, f"{len(speeds)} of {len(runs)}"])
    return table(("tokens/s", "median", "least", "most", "counted"), rows)


def _details(results: Results) -> dict[str, Any]:
    return {
        name: {kind: [_run_details(kind, run) for run in runs] for kind, runs in kinds.items()}
        for name, kinds in results.runs.items()
    }


def _run_details(kind: str, run: Run) -> dict[str, Any]:
    generation = run.generation
    return {
        "num_prompt_tokens": generation.num_prompt_tokens,
        "num_tokens": generation.num_tokens,
        "first_token_s": generation.first_token_s,
        "tokens_per_s": _speed(kind, generation),
        "arrived_s": [round(second, 5) for second in generation.arrived_s],
        "own_timings": generation.timings,
        "foreign_cpus": run.foreign_cpus,
        "counts": run.counts,
    }


def run(path: Path, parsed: argparse.Namespace, plan: Plan, report: Report) -> int:
    """Measures and prints; returns the exit code. Raises AnswerError, StrataError."""
    cpus = set(sorted(os.sched_getaffinity(0))[: parsed.threads])
    if len(cpus) < parsed.threads:
        report.note(f"{parsed.threads} CPUs are asked for, this process may use {len(cpus)}")
    with GGUFModel(path) as model:
        warm_page_cache(model, report)
        prompts = Prompts(model, parsed.seed)
        report.model = {
            "name": model.name,
            "bytes": model.num_bytes,
            "fingerprint": model.fingerprint(),
            "profile": parsed.profile,
            "layers": int(model.metadata["qwen4exp.block_count"]),  # type: ignore[arg-type]
        }
        num_bytes = model.num_bytes
    strata = Strata(path, cpus, _CONTEXT, shlex.split(parsed.strata_flags))
    llama = LlamaInProcess(path, cpus, _CONTEXT)
    server = LlamaServer(path, cpus, _CONTEXT)
    loaded: tuple[Contender, ...] = (llama,) if plan.is_quick else (llama, server)
    if num_bytes * (1 + len(loaded)) + _SPARE_BYTES > memory_bytes("MemAvailable"):
        report.note("memory is too small to keep llama.cpp loaded: it is started anew for every turn")
        loaded = ()
    token_ids = None if parsed.skip_quality else prompts.draw(_QUALITY_PROMPT)
    code = 0
    logits: Logits | None = None
    with Match(prompts, cpus, loaded, parsed.patience) as match:
        try:
            if plan.is_quick:
                report.note("quick: llama.cpp is its library alone, without its server")
                logits = measure_quickly(match, strata, llama, plan, token_ids, report)
            else:
                logits = measure(match, (strata, llama, server), plan, token_ids)
        except BusyError as error:
            report.note(f"NOT MEASURED TO THE END: {error}")
            code = 1
    results = match.results
    say(_as_table(results))
    report.details["runs"] = _details(results)
    report.claim_all(speed_claims(results))
    claim_read_limit(path, cpus, report)
    if missing := results.missing():
        report.note(f"NOT MEASURED, the machine is too busy with something else: {'; '.join(missing)}")
        code = 1
    quality = None
    if token_ids is None:
        report.note("quality is not judged, as asked for")
    elif logits is not None:
        try:
            quality = judge(logits, path, token_ids, report)
        except NoReferenceError as error:
            report.note(f"QUALITY NOT JUDGED: {error}")
            code = 1
    if quality is not None and not quality.is_equal:
        report.note(
            f"QUALITY: Strata's predictions are {quality.strata:.2g} from exact ones, llama.cpp's "
            f"{quality.llama_cpp:.2g}: its speed does not count"
        )
        code = 1
    return code


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--new-tokens",
        type=positive,
        metavar="N",
        help=f"decoded for one measurement (default {FULL.num_new})",
    )
    parser.add_argument("--quick", action="store_true", help="under a minute on a quiet machine, wider error")
    parser.add_argument("--skip-quality", action="store_true", help="measure speed alone")
    add_match_arguments(
        parser,
        rounds=FULL.rounds,
        patience_s=120.0,
        who_waits="a request waits for a quiet machine, beyond any minute",
    )
    parsed = parser.parse_args()
    check_model_arguments(parser, parsed)
    plan = QUICK if parsed.quick else FULL
    if parsed.rounds is not None and not plan.is_quick:
        plan = replace(plan, rounds=parsed.rounds)
    if parsed.new_tokens is not None:
        plan = replace(plan, num_new=parsed.new_tokens)
    settings = {
        "profile": parsed.profile,
        "threads": parsed.threads,
        "rounds": plan.rounds,
        "num_new": plan.num_new,
        "decode_prompt": _DECODE_PROMPT,
        "context": _CONTEXT,
        "is_quick": plan.is_quick,
        "seed": parsed.seed,
        "strata_flags": parsed.strata_flags,
    }
    report = Report("versus_llama_cpp", settings)

    def measure() -> int:
        library_path()
        path = model_path(parsed)
        # The minute of a quick run begins once the model is there.
        report.started_at = time.time()
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads each")
        return run(path, parsed, plan, report)

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
