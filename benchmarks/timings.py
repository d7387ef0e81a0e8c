"""What the `timings` of Strata's answers say of reads. The one place that knows their names; what a version
does not report is None."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowReads:
    """How the rows of the n-gram table came that a request needed."""

    wait_s: float | None
    """How long its steps waited for rows."""
    wait_p95_s: float | None
    """Of its tokens' waits, what 19 of 20 were not longer than."""
    reading_s: float | None
    """How long the stager was reading for it, ahead or for its steps, which may be the same time."""
    depth: float | None
    """Reads in flight meanwhile."""
    num_reads: int | None
    """Of the table's file, ahead or not."""
    num_bytes: int | None


def row_reads(timings: Mapping[str, Any] | None, file: str) -> RowReads:
    """Of an answer, `file` being the name of the file with the table."""
    found = timings or {}
    staged = found.get("staged") or {}
    entries = [entry for entry in found.get("disk") or () if entry.get("file") == file]
    says_reads = "disk_bytes_n" in found
    reading_ms = [found["ngram_read_ms"]] if "ngram_read_ms" in found else []
    reading_ms += [staged["ms"]] if "ms" in staged else []
    num_reads = sum(entry["reads_n"] for entry in entries)
    return RowReads(
        wait_s=_seconds(found.get("ngram_wait_ms")),
        wait_p95_s=_seconds(found.get("ngram_wait_p95_ms")),
        reading_s=_seconds(max(reading_ms)) if reading_ms else None,
        depth=staged.get("depth"),
        num_reads=num_reads if says_reads else None,
        num_bytes=sum(entry["bytes_n"] for entry in entries) if says_reads else None,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
