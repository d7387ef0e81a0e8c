"""What a prompt costs whose n-gram rows are on the disk: Strata, llama.cpp and plain mapped reads.

    python -m benchmarks.cold_start [--profile iq2_xs] [--quick] [--json FILE]
    python -m benchmarks.cold_start --model FILE.gguf

The slice has a table of 7.4 GiB and few experts (`benchmarks.slices`), and is written first where it is
missing. The figure is the **cold penalty**: the time to the first token with no row of the table in memory,
less that of the same prompt asked again. Everything but the table is in memory all the time. The contenders
take turns on one disk:

- Strata, as `strata serve` starts it;
- llama.cpp's library in its lazy mode, where rows of the table are read when they are needed;
- plain mapped reads: the same rows touched one after the other in a file that is mapped as files are by
  default. There is no model in it, so its penalty is that of touching them cold, less touching them again.

Before a cold run the pages of the table are made to leave memory, and looked at: a run that begins with more
of its pages in memory than a few does not count. Prompts are random token ids, each used by nobody else.

A difference of two times of some seconds is only as good as these repeat. So a prompt waits a while for the
CPUs to be quiet, and one that was disturbed counts only where none was not. `penalty_resolution_s` is how far
two warm runs of one prompt differ, and no ratio is made with a penalty smaller than that.

Claims, medians over the rounds, each also with the prompt's length as `_512`; the plain name is that of the
length where it is worst: `cold_penalty_s`, `cold_penalty_ratio_llama_cpp` and `cold_penalty_ratio_mmap`
(their penalty over ours), `cold_penalty_share` (of the warm time to the first token), `limit_ratio` (the time
that the stager was reading over that of reading so many pages at the disk's deep rate, see
`benchmarks.disk_limit`, measured in every round), `bytes_per_row`, `reads_in_flight`, `warm_read_bytes` (that
the stager read for the repeated prompt), `attributed_share` (of the bytes that the system counts, what the
stack accounts for). Of decoding: `decode_gap_p95_cold_ms`, between two tokens whose rows are on the disk, and
`_warm_ms`, the same tokens again; `decode_later_p95_ms`, by how much tokens came later, noise included;
`decode_ngram_wait_ms`, what the stack says it waited for rows, per token. With a delay added to every read:
`delay_ratio`, the penalty of a prompt of 2048 tokens over its pages times the delay over the depth, and
`watchdog_fired`, 1 where the stack took that for a stall.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import add_json_argument, positive, positives
from benchmarks.block_device import DiskCounts, device_number, disk_counts, read_ahead_kib
from benchmarks.contenders import LlamaInProcess, Strata
from benchmarks.disk_limit import disk_limit
from benchmarks.ggml import LlamaUnavailableError, library_path
from benchmarks.llama_cpp import LAZY
from benchmarks.ngram_pages import Table, find_table, touch_mapped
from benchmarks.page_cache import drop_pages, read_range, resident_pages, resident_share
from benchmarks.processes import CpuWatch, disk_read_bytes, wait_for_quiet
from benchmarks.prompts import Prompts
from benchmarks.report import Report, describe_machine, median, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from benchmarks.streaming import AnswerError, Generation
from benchmarks.timings import RowReads, row_reads
from shared.errors import StrataError
from shared.gguf.model import GGUFModel

STRATA, LLAMA, MAPPED = "strata", "llama_cpp", "mmap"

EXPERTS, NGRAM_BASE = 32, 5_500_000
_CONTEXT = 2560
_DEPTH = 64
"""Reads that the stack has in flight unless it is told otherwise."""
DELAY_MS, _DELAY_WATCHDOG_S, _DELAY_PROMPT = 10.0, 2.0, 2048
_DELAY_FLAGS = (
    f"--io-delay-ms={DELAY_MS:g}",
    f"--io-depth={_DEPTH}",
    f"--watchdog-s={_DELAY_WATCHDOG_S:g}",
)
_WARM_UP_NEW = 4
_DECODE_PROMPT = 32
# Sampled, since a greedy random model soon says the same again and again, whose rows are then in memory; the
# same seed makes it say the same.
_DIVERSE: Mapping[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7}
MAX_RESIDENT = 0.03
"""Share of a prompt's pages in memory from which a run is not cold."""
_MAX_ABSENT = 0.02
MAX_FOREIGN_CPUS = 0.1
"""Beside more than this on average a run is disturbed: it counts only where no other does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    prompt_lengths: tuple[int, ...]
    warm_up: int
    """Tokens of a prompt before anything is timed."""
    num_warm: int
    """Times that a prompt is asked again."""
    num_new: int
    """Tokens that are decoded cold and warm."""
    has_delay: bool


QUICK = Plan(rounds=1, prompt_lengths=(512,), warm_up=32, num_warm=1, num_new=0, has_delay=False)
FULL = Plan(rounds=3, prompt_lengths=(512, 2048), warm_up=384, num_warm=2, num_new=48, has_delay=True)


@dataclass(frozen=True, slots=True)
class ColdRun:
    """One prompt, cold and then warm."""

    num_tokens: int
    num_pages: int
    """Of the file, that its rows lie on."""
    cold_s: float
    """To the first token."""
    warm_s: tuple[float, ...]
    resident_share: float
    """Of these pages, before the cold run."""
    table_share: float
    """Of the whole table."""
    read_bytes: int
    """From disks, by all processes of the contender, for the cold run."""
    warm_read_bytes: int
    """For the warm ones together, by the process that reads the table where there is one, or as the stack
    says where that is more."""
    reads_in_flight: float
    """As the disk counts them, for everybody."""
    foreign_cpus: float
    stack: RowReads | None = None
    """What the stack says of the cold run."""

    @property
    def penalty_s(self) -> float:
        """How much later the first token came."""
        return self.cold_s - median(self.warm_s)

    @property
    def is_cold(self) -> bool:
        """Whether hardly any of its pages was in memory."""
        return self.resident_share <= MAX_RESIDENT

    @property
    def is_quiet(self) -> bool:
        """Whether hardly anybody else used the CPUs meanwhile."""
        return self.foreign_cpus <= MAX_FOREIGN_CPUS


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """The same tokens decoded cold and warm: seconds between one and the next."""

    cold_gaps_s: tuple[float, ...]
    warm_gaps_s: tuple[float, ...]
    is_same_text: bool
    cold: RowReads


@dataclass(slots=True)
class Results:
    """What was measured."""

    runs: dict[str, list[ColdRun]] = field(default_factory=lambda: defaultdict(list))
    decodes: list[DecodeRun] = field(default_factory=list)
    deep_rates: list[float] = field(default_factory=list)
    """Of the disk, pages a second, one a round."""

    def of(self, name: str, num_tokens: int) -> list[ColdRun]:
        """The cold runs of a contender: undisturbed ones, or all where there are none."""
        cold = [run for run in self.runs.get(name, ()) if run.num_tokens == num_tokens and run.is_cold]
        return [run for run in cold if run.is_quiet] or cold


class Subject:
    """A model whose table is made to leave memory and looked at."""

    def __init__(self, path: Path, ngram: Table, report: Report) -> None:
        self.path = path
        self.table = ngram
        self._report = report
        self._disk = device_number(ngram.path)

    def warm_rest(self) -> None:
        """Brings everything but the table into memory."""
        before, behind = self._around()
        with GGUFModel(self.path) as model:
            for part in model.parts:
                if part.path != self.table.path:
                    read_range(part.path, 0, part.num_bytes)
        read_range(self.table.path, *before)
        read_range(self.table.path, *behind)

    def check_rest(self) -> None:
        """Notes where part of the rest has left memory: a cold run would read that too."""
        before, behind = self._around()
        absent = [~resident_pages(self.table.path, *part) for part in (before, behind) if part[1]]
        if absent and (share := float(np.concatenate(absent).mean())) > _MAX_ABSENT:
            self._report.note(f"{share:.0%} of the file beside the table was not in memory before a cold run")

    def drop_table(self, pids: Sequence[int]) -> None:
        """Takes the table from memory, and from these processes."""
        drop_pages(self.table.path, self.table.start, self.table.num_bytes, pids)

    def shares(self, token_ids: Sequence[int]) -> tuple[float, float]:
        """Of a prompt's pages, and of the whole table: what is in memory."""
        first_page = self.table.start // os.sysconf("SC_PAGESIZE")
        resident = resident_pages(self.table.path, self.table.start, self.table.num_bytes)
        own = resident[self.table.pages(token_ids) - first_page]
        return float(own.mean()), float(resident.mean())

    def disk(self) -> DiskCounts | None:
        """What its disk has done so far; None where it has none."""
        return disk_counts(self._disk) if self._disk is not None else None

    def reads_in_flight_since(self, before: DiskCounts | None) -> float:
        """See `DiskCounts`; 0 where there is no disk."""
        now = self.disk()
        return now.reads_in_flight_since(before) if now is not None and before is not None else 0.0

    def read_ahead_kib(self) -> int | None:
        """Of its disk."""
        return read_ahead_kib(self._disk) if self._disk is not None else None

    def _around(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Start and length of what lies before the table in its file, and of what lies behind it."""
        end = self.table.start + self.table.num_bytes
        return (0, self.table.start), (end, self.table.path.stat().st_size - end)


class Match:
    """Runs the contenders, one at a time, on prompts that nobody has had before."""

    def __init__(
        self, subject: Subject, prompts: Prompts, cpus: set[int], plan: Plan, patience_s: float
    ) -> None:
        """`patience_s`: how long a prompt waits for the CPUs to be quiet."""
        self.results = Results()
        self._subject = subject
        self._prompts = prompts
        self._cpus = cpus
        self._plan = plan
        self._patience_s = patience_s

    def strata(self, strata: Strata) -> None:
        """A turn of Strata's: prompts, and some tokens. Raises AnswerError."""
        strata.start()
        try:
            stager = [strata.process_id("stager")]
            self._warm_up(strata)
            for num_tokens in self._plan.prompt_lengths:
                run = self._measure(strata, num_tokens, stager)
                self._keep(STRATA, run)
            if self._plan.num_new:
                self.results.decodes.append(self._decode(strata))
        finally:
            strata.stop()

    def llama(self, llama: LlamaInProcess) -> None:
        """A turn of llama.cpp's. Raises AnswerError."""
        llama.start()
        try:
            self._warm_up(llama)
            for num_tokens in self._plan.prompt_lengths:
                self._keep(LLAMA, self._measure(llama, num_tokens, llama.pids()))
        finally:
            llama.stop()

    def mapped(self) -> None:
        """A turn of touching rows."""
        subject, pid = self._subject, os.getpid()
        for num_tokens in self._plan.prompt_lengths:
            token_ids = self._prompts.draw(num_tokens)
            subject.drop_table([])
            shares = subject.shares(token_ids)
            watch = CpuWatch(self._cpus, lambda: 0.0)
            counts, read_before = subject.disk(), disk_read_bytes([pid])
            cold_s = touch_mapped(subject.table, token_ids)
            in_flight = subject.reads_in_flight_since(counts)
            read_bytes = disk_read_bytes([pid]) - read_before
            warm_s = tuple(touch_mapped(subject.table, token_ids) for _ in range(self._plan.num_warm))
            run = ColdRun(
                num_tokens=num_tokens,
                num_pages=len(subject.table.pages(token_ids)),
                cold_s=cold_s,
                warm_s=warm_s,
                resident_share=shares[0],
                table_share=shares[1],
                read_bytes=read_bytes,
                warm_read_bytes=disk_read_bytes([pid]) - read_before - read_bytes,
                reads_in_flight=in_flight,
                foreign_cpus=watch.foreign_cpus(),
            )
            self._keep(MAPPED, run)

    def limit(self) -> None:
        """The disk's deep rate, now. Raises OSError."""
        where = self._subject.table
        rate = disk_limit(where.path, where.start, where.num_bytes)
        say(f"  the disk: {rate:.0f} random pages a second at depth")
        self.results.deep_rates.append(rate)

    def delayed(self, strata: Strata) -> tuple[ColdRun | None, str]:
        """A prompt of 2048 tokens with a delay before every read: what came of it, or the error. Raises
        AnswerError where the stack does not start."""
        strata.start()
        try:
            self._warm_up(strata)
            return self._measure(strata, _DELAY_PROMPT, [strata.process_id("stager")]), ""
        except AnswerError as error:
            return None, str(error)
        finally:
            strata.stop()

    def _warm_up(self, contender: Strata | LlamaInProcess) -> None:
        # Loading may have moved what was in memory: weights come back before anything is timed.
        self._subject.warm_rest()
        contender.generate(self._prompts.draw(self._plan.warm_up), _WARM_UP_NEW)

    def _measure(self, contender: Strata | LlamaInProcess, num_tokens: int, readers: list[int]) -> ColdRun:
        subject = self._subject
        token_ids = self._prompts.draw(num_tokens)
        pids = contender.pids()
        wait_for_quiet(self._cpus, MAX_FOREIGN_CPUS, self._patience_s)
        subject.drop_table(pids)
        subject.check_rest()
        shares = subject.shares(token_ids)
        watch = CpuWatch(self._cpus, contender.cpu_seconds)
        counts, read_before = subject.disk(), disk_read_bytes(pids)
        cold = contender.generate(token_ids, 1)
        in_flight = subject.reads_in_flight_since(counts)
        read_bytes = disk_read_bytes(pids) - read_before
        warm_before = disk_read_bytes(readers)
        warm = [contender.generate(token_ids, 1) for _ in range(self._plan.num_warm)]
        said_warm = [self._said(generation).num_bytes or 0 for generation in warm]
        return ColdRun(
            num_tokens=num_tokens,
            num_pages=len(subject.table.pages(token_ids)),
            cold_s=cold.first_token_s,
            warm_s=tuple(generation.first_token_s for generation in warm),
            resident_share=shares[0],
            table_share=shares[1],
            read_bytes=read_bytes,
            warm_read_bytes=max(disk_read_bytes(readers) - warm_before, *said_warm),
            reads_in_flight=in_flight,
            foreign_cpus=watch.foreign_cpus(),
            stack=self._said(cold),
        )

    def _said(self, generation: Generation) -> RowReads:
        return row_reads(generation.timings, self._subject.table.path.name)

    def _decode(self, strata: Strata) -> DecodeRun:
        """Some tokens with their rows on the disk, and again."""
        token_ids = self._prompts.draw(_DECODE_PROMPT)
        self._subject.drop_table(strata.pids())
        cold, warm = (strata.generate(token_ids, self._plan.num_new + 1, _DIVERSE) for _ in range(2))
        return DecodeRun(
            cold_gaps_s=_gaps(cold),
            warm_gaps_s=_gaps(warm),
            is_same_text=cold.text == warm.text,
            cold=self._said(cold),
        )

    def _keep(self, name: str, run: ColdRun) -> None:
        self.results.runs[name].append(run)
        remark = "" if run.is_cold else f"; NOT COLD, {run.resident_share:.1%} of its pages were in memory"
        if not run.is_quiet:
            remark += f"; beside {run.foreign_cpus:.2f} busy CPUs"
        say(
            f"  {name}: {run.num_tokens} tokens, cold {run.cold_s:.3f} s, warm {median(run.warm_s):.3f} s, "
            f"{run.read_bytes / 1e6:.1f} MB read{remark}"
        )


def _gaps(generation: Generation) -> tuple[float, ...]:
    return tuple(np.diff(generation.arrived_s).tolist())


def claims(results: Results, prompt_lengths: Sequence[int], rows_per_token: int) -> dict[str, float]:
    """What the runs say, for each length and as the worst of them."""
    found: dict[str, float] = {}
    worst: dict[str, list[float]] = defaultdict(list)
    for num_tokens in prompt_lengths:
        for name, value in _claims_of(results, num_tokens, rows_per_token).items():
            found[f"{name}_{num_tokens}"] = value
            worst[name].append(value)
    for name, values in worst.items():
        # Ratios to somebody else are the better the larger they are, and so are these.
        is_better_larger = "ratio_" in name or name in ("reads_in_flight", "attributed_share")
        found[name] = min(values) if is_better_larger else max(values)
    return found


def _claims_of(results: Results, num_tokens: int, rows_per_token: int) -> dict[str, float]:
    ours = results.of(STRATA, num_tokens)
    if not ours:
        return {}
    num_rows = num_tokens * rows_per_token
    penalty = median(run.penalty_s for run in ours)
    warm_s = median(second for run in ours for second in run.warm_s)
    repeats = [max(run.warm_s) - min(run.warm_s) for run in ours if len(run.warm_s) > 1]
    resolution = median(repeats) if repeats else 0.0
    found = {
        "cold_penalty_s": penalty,
        "cold_penalty_least_s": min(run.penalty_s for run in ours),
        "cold_penalty_most_s": max(run.penalty_s for run in ours),
        "penalty_resolution_s": resolution,
        "warm_first_token_s": warm_s,
        "cold_penalty_share": penalty / warm_s,
        "bytes_per_row": median(run.read_bytes / num_rows for run in ours),
        "reads_in_flight": median(_depth(run) for run in ours),
        "warm_read_bytes": max(run.warm_read_bytes for run in ours),
    }
    for name in (LLAMA, MAPPED):
        if theirs := results.of(name, num_tokens):
            their_penalty = median(run.penalty_s for run in theirs)
            found[f"{name}_cold_penalty_s"] = their_penalty
            found[f"{name}_bytes_per_row"] = median(run.read_bytes / num_rows for run in theirs)
            if (divisor := max(penalty, resolution)) > 0:
                found[f"cold_penalty_ratio_{name}"] = their_penalty / divisor
    limits = [_limit_ratio(run, median(results.deep_rates)) for run in ours if results.deep_rates]
    if known := [limit for limit in limits if limit is not None]:
        found["limit_ratio"] = median(known)
    # Of what the system counts for the whole stack; the rest nobody has accounted for.
    told = [run.stack.num_bytes / run.read_bytes for run in ours if run.stack and run.stack.num_bytes]
    if told:
        found["attributed_share"] = median(told)
    return found


def _limit_ratio(run: ColdRun, pages_per_s: float) -> float | None:
    """How much longer the stager read than the disk needs for so many pages at that rate; None where the
    stack does not say. Pages that it had not read ahead, since a step was faster, are left out."""
    if run.stack is None or not run.stack.staging_s:
        return None
    share = run.stack.staged_share if run.stack.staged_share is not None else 1.0
    return run.stack.staging_s * pages_per_s / (share * run.num_pages)


def _depth(run: ColdRun) -> float:
    """Reads in flight as the stack counts them; as the disk does where it says nothing."""
    return run.stack.depth if run.stack and run.stack.depth else run.reads_in_flight


def decode_claims(decodes: Sequence[DecodeRun]) -> dict[str, float]:
    """What decoding waited for rows."""
    if not decodes:
        return {}
    cold = median(float(np.percentile(run.cold_gaps_s, 95)) for run in decodes)
    warm = median(float(np.percentile(run.warm_gaps_s, 95)) for run in decodes)
    later = median(float(np.percentile(np.subtract(run.cold_gaps_s, run.warm_gaps_s), 95)) for run in decodes)
    found = {
        "decode_gap_p95_cold_ms": 1e3 * cold,
        "decode_gap_p95_warm_ms": 1e3 * warm,
        "decode_later_p95_ms": 1e3 * later,
    }
    if waits := [run.cold.wait_p95_s for run in decodes if run.cold.wait_p95_s is not None]:
        found["decode_ngram_wait_p95_ms"] = 1e3 * median(waits)
    # The prompt's part is in it too; it is of few tokens.
    if per_token := [
        run.cold.wait_s / len(run.cold_gaps_s) for run in decodes if run.cold.wait_s is not None
    ]:
        found["decode_ngram_wait_ms"] = 1e3 * median(per_token)
    return found


def delay_claims(run: ColdRun | None) -> dict[str, float]:
    """How a delayed prompt compares with reads that are always at full depth."""
    if run is None:
        return {"watchdog_fired": 1.0}
    ideal_s = run.num_pages * DELAY_MS / 1e3 / _DEPTH
    return {"delay_ratio": run.penalty_s / ideal_s, "delay_penalty_s": run.penalty_s, "watchdog_fired": 0.0}


def _as_table(results: Results) -> str:
    rows = []
    for name, runs in results.runs.items():
        for num_tokens in sorted({run.num_tokens for run in runs}):
            cold = results.of(name, num_tokens)
            all_runs = [run for run in runs if run.num_tokens == num_tokens]
            if not cold:
                rows.append([f"{name}, {num_tokens}", *["-"] * 5, f"0 of {len(all_runs)}"])
                continue
            penalties = [run.penalty_s for run in cold]
            rows.append(
                [
                    f"{name}, {num_tokens}",
                    f"{median(run.cold_s for run in cold):.3f}",
                    f"{median(second for run in cold for second in run.warm_s):.3f}",
                    f"{median(penalties):.3f}",
                    f"{min(penalties):.3f}..{max(penalties):.3f}",
                    f"{median(_depth(run) for run in cold):.1f}",
                    f"{len(cold)} of {len(all_runs)}",
                ]
            )
    return table(("seconds", "cold", "warm", "penalty", "least..most", "in flight", "counted"), rows)


def run(path: Path, parsed: argparse.Namespace, plan: Plan, report: Report) -> int:
    """Measures and prints; returns the exit code. Raises AnswerError, StrataError, OSError."""
    cpus = set(sorted(os.sched_getaffinity(0))[: parsed.threads])
    with GGUFModel(path) as model:
        ngram = find_table(model)
        if ngram is None:
            raise OSError(f"{path} has no n-gram table")
        prompts = Prompts(model, parsed.seed)
        report.model = {
            "name": model.name,
            "bytes": model.num_bytes,
            "table_bytes": ngram.num_bytes,
            "fingerprint": model.fingerprint(),
            "profile": parsed.profile,
        }
    subject = Subject(path, ngram, report)
    flags = shlex.split(parsed.strata_flags)
    strata = Strata(path, cpus, _CONTEXT, flags)
    llama = LlamaInProcess(path, cpus, _CONTEXT, [LAZY])
    match = Match(subject, prompts, cpus, plan, parsed.patience)
    subject.drop_table([])
    if (share := resident_share(ngram.path, ngram.start, ngram.num_bytes)) > MAX_RESIDENT:
        report.note(f"{share:.1%} of the table stays in memory: another program has mapped it")
    subject.warm_rest()
    turns = [lambda: match.strata(strata), lambda: match.llama(llama), match.mapped]
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        try:
            match.limit()
        except OSError as error:
            report.note(f"no limit: {error}")
        for turn in turns:
            turn()
        # Nobody always follows the same one.
        turns.append(turns.pop(0))
    results = match.results
    say(_as_table(results))
    report.details["runs"] = {name: [asdict(run) for run in runs] for name, runs in results.runs.items()}
    report.details["decodes"] = [asdict(decode) for decode in results.decodes]
    report.details["deep_rates"] = results.deep_rates
    report.details["read_ahead_kib"] = subject.read_ahead_kib()
    if results.deep_rates:
        report.claim("deep_reads_per_s", median(results.deep_rates))
    found = claims(results, plan.prompt_lengths, ngram.rows_per_token) | decode_claims(results.decodes)
    report.claim_all(found)
    if not any(run.stack and run.stack.staging_s for run in results.runs[STRATA]):
        report.note("no limit_ratio: this version of Strata does not say how long it read")
    if any(not decode.is_same_text for decode in results.decodes):
        report.note("the tokens decoded cold and warm were not the same: their gaps compare less well")
    code = _judge_coldness(results, report)
    if plan.has_delay:
        code |= _measure_delay(match, Strata(path, cpus, _CONTEXT, [*flags, *_DELAY_FLAGS]), report)
    return code


def _judge_coldness(results: Results, report: Report) -> int:
    for name, runs in results.runs.items():
        for num_tokens in sorted({run.num_tokens for run in runs}):
            counted = results.of(name, num_tokens)
            if counted and not counted[0].is_quiet:
                least = min(run.foreign_cpus for run in counted)
                report.note(f"DISTURBED: every run of {name}, {num_tokens}, least by {least:.2f} busy CPUs")
    warm = [run for runs in results.runs.values() for run in runs if not run.is_cold]
    if warm:
        report.note(f"NOT COLD: {len(warm)} runs do not count, since their pages were in memory")
    return int(bool(warm))


def _measure_delay(match: Match, strata: Strata, report: Report) -> int:
    say(f"with {DELAY_MS:g} ms before every read")
    try:
        delayed, error = match.delayed(strata)
    except AnswerError as failure:
        report.note(f"NOT MEASURED, the stack does not start with a delay: {failure}")
        return 1
    report.details["delayed"] = asdict(delayed) if delayed is not None else error
    report.claim_all(delay_claims(delayed))
    if delayed is None:
        report.note(f"WITH A DELAY the prompt failed: {error}")
        return 1
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    lengths = positives(text)
    if max(lengths) >= _CONTEXT:
        raise argparse.ArgumentTypeError(f"{max(lengths)} is too many, {_CONTEXT - 1} is the most")
    return lengths


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser, EXPERTS, NGRAM_BASE)
    parser.set_defaults(profile="iq2_xs")
    parser.add_argument(
        "--threads", type=positive, default=2, help="and CPUs, for each (default %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, help=f"default {FULL.rounds}; a quick run has one")
    lengths = ",".join(map(str, FULL.prompt_lengths))
    parser.add_argument("--prompts", type=_lengths, metavar="N,N", help=f"their tokens (default {lengths})")
    parser.add_argument("--quick", action="store_true", help="about a minute: 512 tokens once, wider error")
    parser.add_argument(
        "--patience",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="how long a prompt waits for a quiet machine (default %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default %(default)s)")
    parser.add_argument("--strata-flags", default="", metavar="FLAGS", help="more flags for `strata serve`")
    add_json_argument(parser)
    parsed = parser.parse_args()
    check_model_arguments(parser, parsed)
    plan = QUICK if parsed.quick else FULL
    if parsed.rounds is not None and not parsed.quick:
        plan = replace(plan, rounds=parsed.rounds)
    if parsed.prompts is not None:
        plan = replace(plan, prompt_lengths=parsed.prompts)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        library_path()
        path = model_path(parsed)
        settings = asdict(plan) | {
            "profile": parsed.profile,
            "threads": parsed.threads,
            "context": _CONTEXT,
            "seed": parsed.seed,
            "strata_flags": parsed.strata_flags,
            "delay_flags": list(_DELAY_FLAGS),
        }
        report = Report("cold_start", settings)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads each")
        began = time.monotonic()
        code = run(path, parsed, plan, report)
        say(f"{time.monotonic() - began:.0f} s")
    except (AnswerError, LlamaUnavailableError, StrataError, OSError) as error:
        print(f"cold_start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if parsed.json:
        report.write(parsed.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
