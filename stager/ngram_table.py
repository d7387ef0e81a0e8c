"""The n-gram table of a model, and where its rows are read from.

It is tens of gigabytes, and a token needs a few rows of about 90 bytes from random places of it. It is never
loaded, unless it is small or that is asked for, and never mapped: a page fault is one read at a time, and one
behind the end of a file that was truncated ends the process.
"""

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFileError, ResourceError, UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.memory_budget import SMALL_TABLE_BYTES, read_memory, row_cache_bytes
from shared.native.records import Record
from shared.quants import block_format, gather_task, gathered_record
from shared.tensor_catalog import NGRAM_TABLE
from stager.probe import ProbedRates, probe_file
from stager.read_queue import (
    BUFFER_BYTES,
    NO_FAULTS,
    PAGE_BYTES,
    Faults,
    ReadQueue,
    open_for_reading,
    reads_of,
)
from stager.row_cache import RowCache

_log = logging.getLogger(__name__)

_LOADED_PIECE_BYTES = 1 << 20
# Direct I/O leaves the page cache to others, and is taken unless it is clearly slower.
_GOOD_ENOUGH = 0.8


class Way(StrEnum):
    """Where rows are read from: the disk itself, the disk through the page cache, or memory."""

    DIRECT = "direct"
    CACHED = "mmap"
    MEMORY = "ram"


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What the user wants; `cache_bytes` None for what memory allows."""

    io: str
    cache_bytes: int | None
    depth: int
    faults: Faults


DEFAULT_OPTIONS = TableOptions("auto", None, 64, NO_FAULTS)


class NgramTable:
    """The table of one model, open for reading."""

    def __init__(
        self,
        model: GGUFModel,
        options: TableOptions,
        report: Callable[[str, float], None] = lambda activity, progress: None,
    ) -> None:
        """Probes the disk, and chooses. Raises ModelFileError where the table cannot be read, ResourceError
        where it is to be loaded and does not fit, or was to be read in a way that the disk does not have."""
        self.info = model.info(NGRAM_TABLE)
        self.path = model.home(NGRAM_TABLE).path
        self._format = block_format(self.info.type.type_id)
        num_rows, self.row_width = self.info.shape
        self.row_bytes = self.info.num_bytes // num_rows
        self.file_offset = self.info.offset
        if self.row_bytes > BUFFER_BYTES - 2 * PAGE_BYTES:
            raise UnsupportedModelError(
                f"{self.path}: rows of the n-gram table have {self.row_bytes} bytes, this version reads rows "
                f"of at most {BUFFER_BYTES - 2 * PAGE_BYTES}"
            )
        self.depth = options.depth
        self.faults = options.faults
        self.rates: dict[Way, ProbedRates] = {}
        self._memory: NDArray[np.uint8] | None = None
        self._descriptors = self._open()
        try:
            self.way = self._choose(options, report)
            self.descriptor = self._descriptors.get(self.way, self._descriptors[Way.CACHED])
            self.cache: RowCache | None = None
            if self.way is Way.MEMORY:
                self._memory = self._load(report)
            else:
                report("taking memory for the row cache", 0.9)
                self.cache = RowCache(_cache_bytes(options, self.info.num_bytes), self.row_bytes)
        except BaseException:
            self.close()
            raise
        _log.info("%s", self.describe())

    def describe(self) -> str:
        """The choice and the numbers behind it, as a sentence."""
        rates = ", ".join(
            f"{way} {found.single:.0f} reads/s one at a time and {found.deep:.0f} at a depth of {self.depth}"
            for way, found in self.rates.items()
        )
        cached = f", {self.cache.num_places} rows in the cache" if self.cache is not None else ""
        probed = f"; probed: {rates}" if rates else ""
        size = self.info.num_bytes / 1e9
        return f"n-gram rows ({size:.2f} GB in {self.path.name}) by {self.way}{cached}{probed}"

    def capabilities(self) -> dict[str, int | float | str]:
        """The same for machines."""
        found: dict[str, int | float | str] = {"ple_io": str(self.way), "io_depth": self.depth}
        if self.cache is not None:
            found["ple_cache_rows"] = self.cache.num_places
        for way, rates in self.rates.items():
            name = "direct" if way is Way.DIRECT else "mapped"
            found[f"ple_probe_{name}_1"] = round(rates.single)
            found[f"ple_probe_{name}_{self.depth}"] = round(rates.deep)
        return found

    def gather(self) -> tuple[int, Record]:
        """For native code: a task that decodes rows, and its params but for the numbers of the rows, where
        they go, and, where the table is not in memory, where they come from."""
        memory = self._memory if self._memory is not None else np.zeros((0, self.row_bytes), np.uint8)
        return gather_task(self._format), gathered_record(self._format, memory)

    def close(self) -> None:
        """Closes the file."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _open(self) -> dict[Way, int]:
        descriptors = {Way.CACHED: open_for_reading(self.path, direct=False)}
        # Some file systems (tmpfs) have no direct I/O.
        with contextlib.suppress(OSError):
            descriptors[Way.DIRECT] = open_for_reading(self.path, direct=True)
        return descriptors

    def _choose(self, options: TableOptions, report: Callable[[str, float], None]) -> Way:
        if options.io == Way.MEMORY or (options.io == "auto" and self.info.num_bytes <= SMALL_TABLE_BYTES):
            return Way.MEMORY
        report("probing the disk", 0.5)
        rng = np.random.default_rng()
        for way, descriptor in self._descriptors.items():
            try:
                self.rates[way] = probe_file(descriptor, self.info, self.depth, self.faults, rng)
            except OSError as error:
                if way is Way.CACHED:
                    raise ModelFileError(
                        f"{self.path}: the n-gram table cannot be read: {error.strerror}"
                    ) from None
                _log.warning("%s: no direct I/O: %s", self.path, error.strerror)
        if options.io == Way.DIRECT and Way.DIRECT not in self.rates:
            raise ResourceError(
                f"{self.path}: --ple-io is direct, but the file system has no direct I/O; use auto or mmap"
            )
        if options.io != "auto":
            return Way(options.io)
        if Way.DIRECT not in self.rates:
            return Way.CACHED
        is_good = self.rates[Way.DIRECT].deep >= _GOOD_ENOUGH * self.rates[Way.CACHED].deep
        return Way.DIRECT if is_good else Way.CACHED

    def _load(self, report: Callable[[str, float], None]) -> NDArray[np.uint8]:
        """The table's rows, u8 [rows, row_bytes], in memory."""
        free = read_memory()
        room = max(0, free.available - free.floor)
        if self.info.num_bytes > room:
            raise ResourceError(
                f"--ple-io is ram, but the n-gram table has {self.info.num_bytes / 2**30:.1f} GiB, and "
                f"{room / 2**30:.1f} GiB of memory can be had for it ({free.floor / 2**30:.1f} GiB stay "
                "free); use auto, direct or mmap"
            )
        begin = self.info.offset // PAGE_BYTES * PAGE_BYTES
        end = self.info.offset + self.info.num_bytes
        memory = np.frombuffer(mmap.mmap(-1, end - begin + _LOADED_PIECE_BYTES), np.uint8)
        offsets = np.arange(begin, end, _LOADED_PIECE_BYTES)
        lengths = np.minimum(_LOADED_PIECE_BYTES, end - offsets)
        whole_pages = -(-lengths // PAGE_BYTES) * PAGE_BYTES
        addresses = memory.ctypes.data + offsets - begin
        ranges = np.stack([offsets, whole_pages], axis=1)
        reads = reads_of(self.descriptor, ranges, lengths, addresses)
        with ReadQueue(self.depth, self.faults) as queue:
            for start in range(0, len(reads), self.depth):
                report("loading the n-gram table", start / len(reads))
                some = reads[start : start + self.depth]
                queue.run(some)
                failed = some[some["result"] < 0]
                if len(failed):
                    reason = os.strerror(-int(failed[0]["result"]))
                    offset = int(failed[0]["offset"])
                    raise ModelFileError(f"{self.path}: cannot be read at byte {offset}: {reason}")
        skipped = self.info.offset - begin
        return memory[skipped : skipped + self.info.num_bytes].reshape(-1, self.row_bytes)


def _cache_bytes(options: TableOptions, table_bytes: int) -> int:
    """Raises ResourceError where what was asked for is not there."""
    memory = read_memory()
    wanted = row_cache_bytes(memory, table_bytes, Way.CACHED, options.cache_bytes)
    if wanted > memory.available:
        raise ResourceError(
            f"the cache of n-gram rows takes {wanted >> 20} MiB, but {memory.available >> 20} MiB of memory "
            "are available; set --ple-cache-mib lower"
        )
    return wanted
