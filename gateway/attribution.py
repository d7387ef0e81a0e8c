"""What requests needed and where it came from: n-gram rows, routes to experts, reads of files.

The workers count for the request that needed it; here the counts are put together, of one request and of all
there ever were. By the way that routes went: `device`, from a slot of the expert cache; `ram`, by the
cpu_worker; `disk`, likewise, once it was read; `transferred` to the device for the step; `skipped`.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.messages import ExpertBytes, FileReads, PromptStaged, RequestTimings, RouteCounts


class Purpose(StrEnum):
    """Why something was read."""

    STAGING = "staging"
    """Ahead of time, because a prompt will need it."""
    STEP = "step"
    """By a step that could not go on without it."""


def added(first: FileReads, second: FileReads) -> FileReads:
    """The reads of one file, taken together."""
    return FileReads(
        file=first.file,
        num_reads=first.num_reads + second.num_reads,
        num_bytes=first.num_bytes + second.num_bytes,
        wait_s=first.wait_s + second.wait_s,
    )


def by_file(reads: Iterable[FileReads]) -> list[FileReads]:
    """One entry for each file that was read or waited for, in the order of their names."""
    totals: dict[str, FileReads] = {}
    for entry in reads:
        if entry.num_reads or entry.wait_s:
            totals[entry.file] = added(totals[entry.file], entry) if entry.file in totals else entry
    return [totals[file] for file in sorted(totals)]


def shares_of(routes: RouteCounts) -> dict[str, tuple[int, float]]:
    """Number and share of the routes by way, without ways that none took. The shares add up to 1."""
    counts: dict[str, int] = msgspec.structs.asdict(routes)
    num_routes = sum(counts.values())
    return {way: (count, count / num_routes) for way, count in counts.items() if count}


def expert_waits(timings: RequestTimings) -> dict[str, float]:
    """Seconds that steps waited for experts, by way; those of the cpu_worker, read or not, are `ram`."""
    return {
        "device": timings.device_wait_s,
        "ram": timings.expert_wait_s,
        "transferred": timings.transfer_wait_s,
    }


class Totals:
    """Everything that was needed since this process began, also by requests whose clients left."""

    def __init__(self) -> None:
        self.reads: dict[tuple[Purpose, str], FileReads] = {}
        self.num_ngram_rows = 0
        self.num_ngram_hits = 0
        self.num_routes = dict.fromkeys(RouteCounts.__struct_fields__, 0)
        self.expert_bytes = dict.fromkeys(ExpertBytes.__struct_fields__, 0)
        self.expert_wait_s = dict.fromkeys(ExpertBytes.__struct_fields__, 0.0)
        self.num_major_faults = 0
        self.num_reused_tokens = 0
        self.num_drafted: Counter[str] = Counter()
        """By source of the drafts."""
        self.num_accepted: Counter[str] = Counter()

    def finished(self, timings: RequestTimings) -> None:
        """A request's steps are over."""
        for reads in timings.disk:
            self._read(Purpose.STEP, reads)
        self.num_ngram_rows += timings.ngram_rows
        self.num_ngram_hits += timings.ngram_hits
        for way, count in msgspec.structs.asdict(timings.routes).items():
            self.num_routes[way] += count
        for way, num_bytes in msgspec.structs.asdict(timings.expert_bytes).items():
            self.expert_bytes[way] += num_bytes
        for way, seconds in expert_waits(timings).items():
            self.expert_wait_s[way] += seconds
        self.num_major_faults += timings.major_faults
        self.num_reused_tokens += timings.num_reused
        for counts in timings.drafts:
            self.num_drafted[counts.source] += counts.num_drafted
            self.num_accepted[counts.source] += counts.num_accepted

    def staged(self, staged: PromptStaged) -> None:
        """A prompt's rows are in memory."""
        self._read(Purpose.STAGING, staged.reads)

    def _read(self, purpose: Purpose, reads: FileReads) -> None:
        if reads.num_reads or reads.wait_s:
            key = (purpose, reads.file)
            self.reads[key] = added(self.reads[key], reads) if key in self.reads else reads
