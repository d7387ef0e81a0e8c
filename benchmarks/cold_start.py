"""What a prompt costs whose n-gram rows are on the disk: Strata, llama.cpp and plain mapped reads.

    python -m benchmarks.cold_start [--profile iq2_xs] [--quick] [--json FILE]
    python -m benchmarks.cold_start --model FILE.gguf --read-iops 37000

The slice has a table of 7.4 GiB and few experts (`benchmarks.slices`), and is written first where it is
missing. The figure is the **cold penalty**: the time to the first token with no row of the table in memory,
less that of the same prompt asked again. Everything but the table is in memory all the time. The contenders
take turns on one disk:

- Strata, as `strata serve` starts it;
- llama.cpp's library in its lazy mode, where rows of the table are read when they are needed;
- plain mapped reads: the same rows touched one after the other in a file that is mapped as files are by
  default. There is no model in it, so its penalty is that of touching them cold, less touching them again.

A virtual machine's disk may be its host's memory today and a disk tomorrow: `--read-iops` sets how many reads
a second there are, for all of them alike.

Before a cold run the pages of the table are made to leave memory, and looked at: a run that begins with more
of its pages in memory than a few does not count. Prompts are random token ids, each used by nobody else.

A difference of two times of some seconds is only as good as these repeat. So a turn has several prompts where
they are short, a prompt waits a while for the CPUs to be quiet, and one that was disturbed counts only where
none was not. `penalty_resolution_s` is how far two warm runs of one prompt differ, over the root of the
number of prompts. No ratio is made with a penalty of ours that is smaller than that, and none at all where
theirs is.

Claims, medians over the rounds, each also with the prompt's length as `_512`; the plain name is that of the
length where it is worst: `cold_penalty_s`, `cold_penalty_ratio_llama_cpp` and `cold_penalty_ratio_mmap`
(their penalty over ours), `cold_penalty_share` (of the warm time to the first token), `cold_ngram_wait_s`
(how much longer the stack says it waited for rows than in a warm run), `limit_ratio` (the time that the
stager was reading over that of reading so many pages at the disk's deep rate, see `benchmarks.disk_limit`,
measured before every prompt), `bytes_per_row`, `reads_in_flight`, `warm_read_bytes` (that the stager read
for the repeated prompt), `attributed_share` (of the bytes that the system counts, what the stack accounts
for). Of decoding: `decode_gap_p95_cold_ms`, between two tokens whose rows are on the disk, and `_warm_ms`,
the same tokens again; `decode_later_p95_ms`, by how much tokens came later, noise included;
`decode_ngram_wait_ms`, what the stack says it waited for rows, per token, and `decode_ngram_wait_p95_ms`.
With a delay added to every read: `delay_ratio`, the penalty of a prompt of 2048 tokens, or what the stack
says it waited where that is more, over its pages times the delay over the depth; `delay_reading_ratio`, the
same of the time that the stager was reading; and `watchdog_fired`, 1 where the stack took that for a stall.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import add_match_arguments, positive, positives
from benchmarks.block_device import device_number
from benchmarks.cgroups import SlowDisk
from benchmarks.cold_runs import (
    LLAMA,
    MAPPED,
    MAX_FOREIGN_CPUS,
    MAX_RESIDENT,
    STRATA,
    ColdRun,
    DecodeRun,
    Results,
    as_table,
    claims,
    decode_claims,
    delay_claims,
)
from benchmarks.cold_table import ColdTable
from benchmarks.contenders import LlamaInProcess, Strata
from benchmarks.disk_limit import disk_limit, disk_rate_now
from benchmarks.ggml import library_path
from benchmarks.llama_cpp import LAZY
from benchmarks.ngram_pages import find_table, touch_mapped
from benchmarks.page_cache import resident_share
from benchmarks.processes import CpuWatch, disk_read_bytes, wait_for_quiet
from benchmarks.prompts import Prompts
from benchmarks.report import Report, describe_machine, measured, median, say
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from benchmarks.streaming import AnswerError, Generation
from benchmarks.timings import RowReads, row_reads
from shared.gguf.model import GGUFModel

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


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    prompt_lengths: tuple[int, ...]
    warm_up: int
    """Tokens of a prompt before anything is timed: a whole step, so that no timed one is the first to use its
    memory."""
    num_warm: int
    """Times that a prompt is asked again."""
    num_new: int
    """Tokens that are decoded cold and warm."""
    has_delay: bool
    tokens_a_turn: int
    """Of each length so many prompts that they have as many tokens together."""

    def prompts(self) -> list[int]:
        """The lengths of all prompts of a turn."""
        return [
            num_tokens
            for num_tokens in self.prompt_lengths
            for _ in range(max(1, self.tokens_a_turn // num_tokens))
        ]


QUICK = Plan(
    rounds=1,
    prompt_lengths=(512,),
    warm_up=512,
    num_warm=2,
    num_new=0,
    has_delay=False,
    tokens_a_turn=0,
)
FULL = Plan(
    rounds=3,
    prompt_lengths=(512, 2048),
    warm_up=512,
    num_warm=2,
    num_new=48,
    has_delay=True,
    tokens_a_turn=2048,
)


class Match:
    """Runs the contenders, one at a time, on prompts that nobody has had before."""

    def __init__(
        self, cold_table: ColdTable, prompts: Prompts, cpus: set[int], plan: Plan, patience_s: float
    ) -> None:
        """`patience_s`: how long a prompt waits for the CPUs to be quiet."""
        self.results = Results()
        self._cold_table = cold_table
        self._prompts = prompts
        self._cpus = cpus
        self._plan = plan
        self._patience_s = patience_s

    def strata(self, strata: Strata) -> None:
        """A turn of Strata's: prompts, and some tokens. Raises AnswerError."""
        try:
            strata.start()
            stager = [strata.process_id("stager")]
            self._warm_up(strata)
            for num_tokens in self._plan.prompts():
                self._keep(STRATA, self._measure(strata, num_tokens, stager))
            if self._plan.num_new:
                self.results.decodes.append(self._decode(strata))
        finally:
            strata.stop()

    def llama(self, llama: LlamaInProcess) -> None:
        """A turn of llama.cpp's. Raises AnswerError."""
        try:
            llama.start()
            self._warm_up(llama)
            for num_tokens in self._plan.prompts():
                self._keep(LLAMA, self._measure(llama, num_tokens, llama.pids()))
        finally:
            llama.stop()

    def mapped(self) -> None:
        """A turn of touching rows."""
        cold_table, pid = self._cold_table, os.getpid()
        for num_tokens in self._plan.prompt_lengths:
            token_ids = self._prompts.draw(num_tokens)
            cold_table.drop_table([])
            shares = cold_table.shares(token_ids)
            watch = CpuWatch(self._cpus, lambda: 0.0)
            counts, read_before = cold_table.disk(), disk_read_bytes([pid])
            cold_s = touch_mapped(cold_table.table, token_ids)
            in_flight = cold_table.reads_in_flight_since(counts)
            read_bytes = disk_read_bytes([pid]) - read_before
            warm_s = tuple(touch_mapped(cold_table.table, token_ids) for _ in range(self._plan.num_warm))
            run = ColdRun(
                num_tokens=num_tokens,
                num_pages=len(cold_table.table.pages(token_ids)),
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
        where = self._cold_table.table
        rate = disk_limit(where.path, where.start, where.num_bytes)
        say(f"  the disk: {rate:.0f} random pages a second at depth")
        self.results.deep_rates.append(rate)

    def delayed(self, strata: Strata) -> tuple[ColdRun | None, str]:
        """A prompt of 2048 tokens with a delay before every read: what came of it, or the error. Raises
        AnswerError where the stack does not start."""
        try:
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
        self._cold_table.warm_rest()
        contender.generate(self._prompts.draw(self._plan.warm_up), _WARM_UP_NEW)

    def _measure(self, contender: Strata | LlamaInProcess, num_tokens: int, readers: list[int]) -> ColdRun:
        cold_table = self._cold_table
        token_ids = self._prompts.draw(num_tokens)
        pids = contender.pids()
        wait_for_quiet(self._cpus, MAX_FOREIGN_CPUS, self._patience_s)
        cold_table.drop_table(pids)
        cold_table.check_rest()
        shares = cold_table.shares(token_ids)
        where = cold_table.table
        disk_rate = disk_rate_now(where.path, where.start, where.num_bytes)
        watch = CpuWatch(self._cpus, contender.cpu_seconds)
        counts, read_before = cold_table.disk(), disk_read_bytes(pids)
        cold = contender.generate(token_ids, 1)
        in_flight = cold_table.reads_in_flight_since(counts)
        read_bytes = disk_read_bytes(pids) - read_before
        warm_before = disk_read_bytes(readers)
        warm = [contender.generate(token_ids, 1) for _ in range(self._plan.num_warm)]
        said_warm = [self._said(generation).num_bytes or 0 for generation in warm]
        return ColdRun(
            num_tokens=num_tokens,
            num_pages=len(cold_table.table.pages(token_ids)),
            cold_s=cold.first_token_s,
            warm_s=tuple(generation.first_token_s for generation in warm),
            resident_share=shares[0],
            table_share=shares[1],
            read_bytes=read_bytes,
            warm_read_bytes=max(disk_read_bytes(readers) - warm_before, *said_warm),
            reads_in_flight=in_flight,
            foreign_cpus=watch.foreign_cpus(),
            disk_rate=disk_rate,
            stack=self._said(cold),
            warm_wait_s=median(self._said(generation).wait_s or 0.0 for generation in warm),
        )

    def _said(self, generation: Generation) -> RowReads:
        return row_reads(generation.timings, self._cold_table.table.path.name)

    def _decode(self, strata: Strata) -> DecodeRun:
        """Some tokens with their rows on the disk, and again."""
        token_ids = self._prompts.draw(_DECODE_PROMPT)
        self._cold_table.drop_table(strata.pids())
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
    cold_table = ColdTable(path, ngram, report)
    flags = shlex.split(parsed.strata_flags)
    strata = Strata(path, cpus, _CONTEXT, flags)
    llama = LlamaInProcess(path, cpus, _CONTEXT, [LAZY])
    match = Match(cold_table, prompts, cpus, plan, parsed.patience)
    cold_table.drop_table([])
    if (share := resident_share(ngram.path, ngram.start, ngram.num_bytes)) > MAX_RESIDENT:
        report.note(f"{share:.1%} of the table stays in memory: another program has mapped it")
    cold_table.warm_rest()
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
    say(as_table(results))
    report.details["runs"] = {name: [asdict(run) for run in runs] for name, runs in results.runs.items()}
    report.details["decodes"] = [asdict(decode) for decode in results.decodes]
    report.details["deep_rates"] = results.deep_rates
    report.details["read_ahead_kib"] = cold_table.read_ahead_kib()
    if results.deep_rates:
        report.claim("deep_reads_per_s", median(results.deep_rates))
    found = claims(results, plan.prompt_lengths, ngram.rows_per_token) | decode_claims(results.decodes)
    report.claim_all(found)
    for name in (LLAMA, MAPPED):
        for num_tokens in plan.prompt_lengths:
            if f"cold_penalty_ratio_{name}_{num_tokens}" not in found:
                report.note(
                    f"no ratio to {name} with {num_tokens} tokens: its penalty cannot be told from noise"
                )
    if not any(run.stack and run.stack.reading_s for run in results.runs[STRATA]):
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
    report.claim_all(delay_claims(delayed, DELAY_MS / 1e3, _DEPTH))
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
    lengths = ",".join(map(str, FULL.prompt_lengths))
    parser.add_argument("--prompts", type=_lengths, metavar="N,N", help=f"their tokens (default {lengths})")
    parser.add_argument("--quick", action="store_true", help="about a minute: 512 tokens once, wider error")
    parser.add_argument(
        "--read-iops",
        type=positive,
        metavar="N",
        help="reads a second that the disk does, for all; takes root",
    )
    add_match_arguments(
        parser, rounds=FULL.rounds, patience_s=20.0, who_waits="a prompt waits for a quiet machine"
    )
    parsed = parser.parse_args()
    check_model_arguments(parser, parsed)
    plan = QUICK if parsed.quick else FULL
    if parsed.rounds is not None and not parsed.quick:
        plan = replace(plan, rounds=parsed.rounds)
    if parsed.prompts is not None:
        plan = replace(plan, prompt_lengths=parsed.prompts)
    settings = asdict(plan) | {
        "profile": parsed.profile,
        "threads": parsed.threads,
        "context": _CONTEXT,
        "read_iops": parsed.read_iops,
        "seed": parsed.seed,
        "strata_flags": parsed.strata_flags,
        "delay_flags": list(_DELAY_FLAGS),
    }
    report = Report("cold_start", settings)

    def measure() -> int:
        library_path()
        path = model_path(parsed)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads each")
        began = time.monotonic()
        disk: AbstractContextManager[object] = nullcontext()
        if parsed.read_iops is not None:
            name = f"strata-benchmark-{os.getpid()}"
            disk = SlowDisk(name, parsed.read_iops, device_number(path))
        with disk:
            code = run(path, parsed, plan, report)
        say(f"{time.monotonic() - began:.0f} s")
        return code

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
