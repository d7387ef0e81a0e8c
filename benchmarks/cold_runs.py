"""What was measured of prompts whose rows of the n-gram table were on the disk, and what that claims."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.report import median, table
from benchmarks.timings import RowReads

STRATA, LLAMA, MAPPED = "strata", "llama_cpp", "mmap"
"""The contenders."""
MAX_RESIDENT = 0.03
"""Share of a prompt's pages in memory from which a run is not cold."""
MAX_FOREIGN_CPUS = 0.1
"""Beside more than this on average a run is disturbed: it counts only where no other does."""


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
    disk_rate: float | None = None
    """Random pages that the disk read in a second, many at a time, just before the cold run."""
    stack: RowReads | None = None
    """What the stack says of the cold run."""
    warm_wait_s: float = 0.0
    """And of its wait for rows in a warm one: some are computed with."""

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
    resolution = _resolution(ours)
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
            found[f"{name}_penalty_resolution_s"] = _resolution(theirs)
            found[f"{name}_warm_first_token_s"] = median(second for run in theirs for second in run.warm_s)
            found[f"{name}_bytes_per_row"] = median(run.read_bytes / num_rows for run in theirs)
            # Where neither can be told from nothing, a ratio would be one of noise.
            if their_penalty > _resolution(theirs) and (divisor := max(penalty, resolution)) > 0:
                found[f"cold_penalty_ratio_{name}"] = their_penalty / divisor
    waits = [run.stack.wait_s - run.warm_wait_s for run in ours if run.stack and run.stack.wait_s is not None]
    if waits:
        found["cold_ngram_wait_s"] = median(waits)
    if known := [limit for limit in map(_limit_ratio, ours) if limit is not None]:
        found["limit_ratio"] = median(known)
    # Of what the system counts for the whole stack; the rest nobody has accounted for.
    told = [run.stack.num_bytes / run.read_bytes for run in ours if run.stack and run.stack.num_bytes]
    if told:
        found["attributed_share"] = median(told)
    return found


def _resolution(runs: Sequence[ColdRun]) -> float:
    """What a penalty has to be more than to be told from none: how far two warm runs of a prompt differ, and
    the less so the more prompts there were."""
    repeats = [max(run.warm_s) - min(run.warm_s) for run in runs if len(run.warm_s) > 1]
    return median(repeats) / len(repeats) ** 0.5 if repeats else 0.0


def _limit_ratio(run: ColdRun) -> float | None:
    """How much longer the stager read than the disk needs for so many pages; None where the stack or the disk
    does not say."""
    if run.stack is None or not run.stack.reading_s or run.disk_rate is None:
        return None
    return run.stack.reading_s * run.disk_rate / run.num_pages


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


def delay_claims(run: ColdRun | None, delay_s: float, depth: int) -> dict[str, float]:
    """How a prompt whose reads were delayed by so much compares with reads that are always at full depth."""
    if run is None:
        return {"watchdog_fired": 1.0}
    ideal_s = run.num_pages * delay_s / depth
    found = {"delay_penalty_s": run.penalty_s, "watchdog_fired": 0.0}
    waits = [run.penalty_s]
    if run.stack is not None and run.stack.wait_s is not None:
        found["delay_ngram_wait_s"] = run.stack.wait_s - run.warm_wait_s
        waits.append(found["delay_ngram_wait_s"])
    # The first token may come late for other reasons, and by chance early: the worse of the two counts.
    found["delay_ratio"] = max(waits) / ideal_s
    if run.stack is not None and run.stack.reading_s:
        found["delay_reading_ratio"] = run.stack.reading_s / ideal_s
    return found


def as_table(results: Results) -> str:
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
