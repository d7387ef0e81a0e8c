"""A model whose n-gram table is made to leave memory, while all the rest of it stays there."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.block_device import DiskCounts, device_number, disk_counts, read_ahead_kib
from benchmarks.ngram_pages import Table
from benchmarks.page_cache import drop_pages, read_range, resident_pages
from benchmarks.report import Report
from shared.gguf.model import GGUFModel

_MAX_ABSENT = 0.02


class ColdTable:
    """The table of a model."""

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
