"""A model that is twice as large as the memory: Strata and llama.cpp, each alone in a control group.

    python -m benchmarks.low_memory [--profile iq2_xs] [--quick] [--json FILE]
    python -m benchmarks.low_memory --model FILE.gguf --share 0.4 --read-iops 2000

Each run starts a contender in a fresh group that may have so much of the model's bytes as memory, its own and
the page cache together; before that every page of the model's files leaves memory, or the group would be
given them for nothing. It reads a prompt that needs every expert, so that the memory is full of what comes
next or does not, then decodes a few tokens, then its processes and its group are gone. This takes root, since
groups do. `--read-iops` limits the reads a second too: a slow disk.

llama.cpp is its library, without a server and without repacked weights: a copy of them would be most of the
memory, and pages of a mapped file can be given back.

A run waits a while for the CPUs to be quiet, and one that was disturbed counts only where none was not.

Claims, medians over the runs: `decode_ratio` (over 1: Strata is faster), and for each contender
`NAME_decode_tokens_per_s`, `NAME_decode_spread` (most less least, as a share of the median),
`NAME_prefill_s`, `NAME_mb_per_token` (read from the disk while decoding) and `NAME_oom_kills`;
`routed_mb_per_token`, the experts that a token is routed to: what would be read if none of them were in
memory and all else were. Where a process was killed for want of memory the exit code is 1.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.arguments import add_match_arguments, positive
from benchmarks.block_device import device_number
from benchmarks.cgroups import CGROUP_ROOT, MemoryGroup, cgroup_version
from benchmarks.contenders import LlamaInProcess, Strata
from benchmarks.ggml import library_path
from benchmarks.llama_cpp import PLAIN
from benchmarks.page_cache import drop_pages, resident_share
from benchmarks.processes import CpuWatch, ReadWatch, disk_read_bytes, wait_for_quiet
from benchmarks.prompts import Prompts
from benchmarks.read_limit import expert_bytes
from benchmarks.report import Report, describe_machine, measured, median, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from benchmarks.streaming import AnswerError, Generation
from shared.gguf.model import GGUFModel, part_paths

STRATA, LLAMA = "strata", "llama_cpp"
_CONTEXT = 512
_PROMPT = 16
_FULL_PROMPT = 256
"""Tokens that are routed to all of 512 experts together, nearly."""
_MAX_RESIDENT = 0.01
MAX_FOREIGN_CPUS = 0.3
"""Beside more than this on average a run is disturbed: it counts only where no other does. The kernel's own
work for some hundred MB a token is in it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    num_new: int
    """Tokens after the first one."""


QUICK = Plan(rounds=1, num_new=6)
FULL = Plan(rounds=5, num_new=16)


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """One contender in a group."""

    tokens_per_s: float
    prefill_s: float
    """To the first token of the prompt before it."""
    read_bytes: float
    """From disks, from the first token to the last."""
    num_new: int
    oom_kills: int
    peak_bytes: int | None
    foreign_cpus: float

    @property
    def mb_per_token(self) -> float:
        """Read for each token."""
        return self.read_bytes / self.num_new / 1e6

    @property
    def is_quiet(self) -> bool:
        """Whether hardly anybody else used the CPUs meanwhile."""
        return self.foreign_cpus <= MAX_FOREIGN_CPUS


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a contender is put into."""

    files: Sequence[Path]
    limit_bytes: int
    read_iops: int | None
    cpus: set[int]

    def drop_files(self) -> float:
        """Makes all pages of the model leave memory; returns the share that does not. Raises OSError."""
        sizes = [path.stat().st_size for path in self.files]
        for path, size in zip(self.files, sizes, strict=True):
            drop_pages(path, 0, size)
        shares = [resident_share(path, 0, size) for path, size in zip(self.files, sizes, strict=True)]
        return sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)

    def group(self) -> MemoryGroup:
        """One for a run. Raises CgroupError."""
        device = device_number(self.files[0])
        return MemoryGroup(f"strata-benchmark-{os.getpid()}", self.limit_bytes, self.read_iops, device)


def measure(
    contender: Strata | LlamaInProcess, surroundings: Surroundings, prompts: Prompts, num_new: int
) -> MemoryRun:
    """Starts it in a group, lets it decode, and ends it. Raises AnswerError, whose text says so where it was
    killed for want of memory, CgroupError and OSError."""
    with surroundings.group() as group:
        contender.groups = group.procs
        try:
            contender.start()
            watch = CpuWatch(surroundings.cpus, contender.cpu_seconds)
            prefill_s = contender.generate(prompts.draw(_FULL_PROMPT), 1).first_token_s
            # Found once: to look for them again and again takes time.
            pids = contender.pids()
            with ReadWatch(lambda: disk_read_bytes(pids)) as reads:
                generation = contender.generate(prompts.draw(_PROMPT), num_new + 1)
            return MemoryRun(
                tokens_per_s=generation.decode_tokens_per_s,
                prefill_s=prefill_s,
                read_bytes=_read_while_decoding(reads, generation),
                num_new=num_new,
                oom_kills=group.oom_kills(),
                peak_bytes=group.peak_bytes(),
                foreign_cpus=watch.foreign_cpus(),
            )
        except AnswerError as error:
            if kills := group.oom_kills():
                raise AnswerError(f"OUT OF MEMORY, {kills} processes were killed: {error}") from error
            raise
        finally:
            contender.stop()


def _read_while_decoding(reads: ReadWatch, generation: Generation) -> float:
    return reads.bytes_between(generation.arrived_s[0], generation.arrived_s[-1])


def undisturbed(runs: Sequence[MemoryRun]) -> Sequence[MemoryRun]:
    """Those of them, or all where there are none."""
    return [run for run in runs if run.is_quiet] or runs


def claims(runs: Mapping[str, Sequence[MemoryRun]]) -> dict[str, float]:
    """What the runs say; no ratio where a contender has none."""
    found: dict[str, float] = {}
    for name, all_runs in runs.items():
        if not all_runs:
            continue
        measured = undisturbed(all_runs)
        speeds = [run.tokens_per_s for run in measured]
        found[f"{name}_decode_tokens_per_s"] = median(speeds)
        found[f"{name}_decode_spread"] = (max(speeds) - min(speeds)) / median(speeds)
        found[f"{name}_prefill_s"] = median(run.prefill_s for run in measured)
        found[f"{name}_mb_per_token"] = median(run.mb_per_token for run in measured)
        found[f"{name}_oom_kills"] = sum(run.oom_kills for run in all_runs)
    if runs.get(STRATA) and runs.get(LLAMA):
        theirs = found[f"{LLAMA}_decode_tokens_per_s"]
        found["decode_ratio"] = found[f"{STRATA}_decode_tokens_per_s"] / theirs
    return found


def _as_table(runs: Mapping[str, Sequence[MemoryRun]]) -> str:
    rows = []
    for name, all_runs in runs.items():
        measured = undisturbed(all_runs)
        speeds = sorted(run.tokens_per_s for run in measured) or [float("nan")]
        reads = [run.mb_per_token for run in measured] or [float("nan")]
        cells = (median(speeds), speeds[0], speeds[-1], median(reads))
        rows.append([name, *(f"{cell:.2f}" for cell in cells), f"{len(measured)} of {len(all_runs)}"])
    return table(("tokens/s", "median", "least", "most", "MB a token", "counted"), rows)


def run(path: Path, parsed: argparse.Namespace, plan: Plan, report: Report) -> int:
    """Measures and prints; returns the exit code. Raises CgroupError, StrataError, OSError."""
    cpus = set(sorted(os.sched_getaffinity(0))[: parsed.threads])
    with GGUFModel(path) as model:
        prompts = Prompts(model, parsed.seed)
        num_bytes, routed = model.num_bytes, expert_bytes(model)
        report.model = {
            "name": model.name,
            "bytes": num_bytes,
            "fingerprint": model.fingerprint(),
            "profile": parsed.profile,
        }
    surroundings = Surroundings(part_paths(path), int(parsed.share * num_bytes), parsed.read_iops, cpus)
    report.settings["limit_bytes"] = surroundings.limit_bytes
    say(f"{num_bytes / 1e9:.2f} GB of model, {surroundings.limit_bytes / 1e9:.2f} GB of memory")
    contenders: dict[str, Strata | LlamaInProcess] = {
        STRATA: Strata(path, cpus, _CONTEXT, shlex.split(parsed.strata_flags)),
        LLAMA: LlamaInProcess(path, cpus, _CONTEXT, [PLAIN]),
    }
    order = list(contenders)
    runs: dict[str, list[MemoryRun]] = {name: [] for name in contenders}
    code = 0
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        for name in order:
            wait_for_quiet(cpus, MAX_FOREIGN_CPUS, parsed.patience)
            if (share := surroundings.drop_files()) > _MAX_RESIDENT:
                report.note(f"{share:.1%} of the model stays in memory: {name} has that much more of it")
            try:
                measured = measure(contenders[name], surroundings, prompts, plan.num_new)
            except AnswerError as error:
                report.note(f"{name} FAILED: {error}")
                code = 1
                continue
            runs[name].append(measured)
            remark = "" if measured.is_quiet else f"; beside {measured.foreign_cpus:.2f} busy CPUs"
            say(
                f"  {name}: {measured.tokens_per_s:.2f} tokens/s, {measured.mb_per_token:.0f} MB read a "
                f"token; {_FULL_PROMPT} tokens before took {measured.prefill_s:.1f} s{remark}"
            )
        # Nobody always follows the same one.
        order.append(order.pop(0))
    say(_as_table(runs))
    report.details["runs"] = {name: [asdict(run) for run in measured] for name, measured in runs.items()}
    report.claim("routed_mb_per_token", routed / 1e6)
    report.claim_all(claims(runs))
    for name, measured_runs in runs.items():
        if measured_runs and not undisturbed(measured_runs)[0].is_quiet:
            least = min(run.foreign_cpus for run in measured_runs)
            report.note(f"DISTURBED: every run of {name}, least by {least:.2f} busy CPUs")
    if any(run.oom_kills for measured in runs.values() for run in measured):
        report.note("OUT OF MEMORY: processes were killed in a group")
        code = 1
    return code


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0 and up to 1")
    return value


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser)
    parser.set_defaults(profile="iq2_xs")
    parser.add_argument(
        "--share", type=_share, default=0.5, help="of the model's bytes (default %(default)s)"
    )
    parser.add_argument("--read-iops", type=positive, metavar="N", help="reads a second that the disk does")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help=f"decoded (default {FULL.num_new})")
    parser.add_argument("--quick", action="store_true", help="one run each and fewer tokens, wider error")
    add_match_arguments(
        parser, rounds=FULL.rounds, patience_s=20.0, who_waits="a run waits for a quiet machine"
    )
    parsed = parser.parse_args()
    check_model_arguments(parser, parsed)
    plan = QUICK if parsed.quick else FULL
    if parsed.rounds is not None and not parsed.quick:
        plan = replace(plan, rounds=parsed.rounds)
    if parsed.new_tokens is not None:
        plan = replace(plan, num_new=parsed.new_tokens)
    settings = asdict(plan) | {
        "profile": parsed.profile,
        "share": parsed.share,
        "read_iops": parsed.read_iops,
        "threads": parsed.threads,
        "context": _CONTEXT,
        "prompt": _PROMPT,
        "full_prompt": _FULL_PROMPT,
        "seed": parsed.seed,
        "strata_flags": parsed.strata_flags,
    }
    report = Report("low_memory", settings)

    def measure() -> int:
        library_path()
        settings["cgroup_version"] = cgroup_version(CGROUP_ROOT)
        path = model_path(parsed)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads each")
        return run(path, parsed, plan, report)

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
