"""Reads ranges of files into memory, many at the same time, past the page cache where the file system allows
it.

A range is read as the whole pages it touches, since that is what direct I/O reads. Where a file cannot be
read directly it is read through the page cache, whose pages are given back at once: what is read here is kept
by whoever asked for it.
"""

import errno
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

_NUM_THREADS = 16

OnDone = Callable[[int, int, int], None]
"""Called for each read, by any thread: its index, the system calls it took, and the bytes that were read, or
-errno (ENODATA where the file ends before the range does)."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """Bytes `offset` to `offset + num_bytes` of a file. `into` begins on a page and has all the pages that
    the range touches: the byte at `offset` comes to lie `offset % mmap.PAGESIZE` bytes from its begin."""

    path: Path
    offset: int
    num_bytes: int
    into: memoryview


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    is_direct: bool


class FileReader:
    """Threads that read; there are none before the first read. `read` may be called by several threads."""

    def __init__(self, num_threads: int = _NUM_THREADS) -> None:
        self._queue: queue.SimpleQueue[tuple[FileRead, int, OnDone] | None] = queue.SimpleQueue()
        self._files: dict[Path, _OpenFile] = {}
        self._lock = threading.Lock()
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []

    def read(self, reads: Sequence[FileRead], on_done: OnDone) -> None:
        """Begins all of these reads, in their order, and returns at once."""
        with self._lock:
            for number in range(len(self._threads), self._num_threads):
                self._threads.append(threading.Thread(target=self._run, name=f"reader {number}", daemon=True))
                self._threads[-1].start()
        for index, read in enumerate(reads):
            self._queue.put((read, index, on_done))

    def close(self) -> None:
        """Ends the threads, when what they were given is done."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            os.close(file.descriptor)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            read, index, on_done = job
            try:
                num_calls, num_bytes = self._read(read)
            except OSError as error:
                num_calls, num_bytes = 1, -(error.errno or errno.EIO)
            on_done(index, num_calls, num_bytes)

    def _read(self, read: FileRead) -> tuple[int, int]:
        file = self._open(read.path)
        if file.is_direct:
            try:
                return _read_pages(file.descriptor, read)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            file = self._reopen(read.path)
        return _read_cached(file.descriptor, read)

    def _open(self, path: Path) -> _OpenFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open(path)
            return self._files[path]

    def _reopen(self, path: Path) -> _OpenFile:
        """Through the page cache from now on."""
        with self._lock:
            file = self._files[path]
            if file.is_direct:
                _log.info("%s: direct reads are refused; it is read through the page cache", path)
                # The other descriptor may be in use by other threads; it is closed with the process.
                file = self._files[path] = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), False)
            return file


def _open(path: Path) -> _OpenFile:
    try:
        return _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), False)


def _read_pages(descriptor: int, read: FileRead) -> tuple[int, int]:
    """Whole pages, directly. What comes in several pieces is continued at a page."""
    start = read.offset // mmap.PAGESIZE * mmap.PAGESIZE
    needed = read.offset + read.num_bytes - start
    pages = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
    num_calls = num_bytes = done = 0
    while done < needed:
        begun = done // mmap.PAGESIZE * mmap.PAGESIZE
        count = os.preadv(descriptor, [read.into[begun:pages]], start + begun)
        num_calls += 1
        num_bytes += count
        if begun + count <= done:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        done = begun + count
    return num_calls, num_bytes


def _read_cached(descriptor: int, read: FileRead) -> tuple[int, int]:
    """Only the range, through the page cache."""
    into = read.into[read.offset % mmap.PAGESIZE :][: read.num_bytes]
    num_calls = done = 0
    while done < read.num_bytes:
        count = os.preadv(descriptor, [into[done:]], read.offset + done)
        num_calls += 1
        if count == 0:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        done += count
    os.posix_fadvise(descriptor, read.offset, read.num_bytes, os.POSIX_FADV_DONTNEED)
    return num_calls, done
