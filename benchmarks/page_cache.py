"""Which parts of files are in memory, and how they come there or are made to leave.

The page cache does not let go of pages that a process has mapped and touched: those are taken from the
process first. What is said to be cold has to be looked at (`resident_share`), not hoped for.
"""

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, memory_bytes
from shared.gguf.model import GGUFModel

_READ_BYTES = 16 << 20
_PAGE_BYTES = mmap.PAGESIZE
# x86-64, as the rest of the package. glibc has had no function for it for long.
_PROCESS_MADVISE, _MADV_PAGEOUT = 440, 21
# What one call advises at most is a little less than 2 GiB.
_ADVISED_BYTES = 1 << 30
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+\s+(.*)")

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def warm_page_cache(model: GGUFModel, report: Report) -> None:
    """Reads the whole file, and says so where it cannot stay in memory."""
    num_bytes = model.num_bytes
    room = memory_bytes("MemAvailable")
    if num_bytes > room:
        report.note(
            f"the model has {num_bytes / 1e9:.1f} GB and does not fit into the {room / 1e9:.1f} GB of memory "
            "that are available: what follows measures the disk too"
        )
        return
    for part in model.parts:
        read_range(part.path, 0, part.num_bytes)


def read_range(path: Path, start: int, num_bytes: int) -> None:
    """Brings a part of a file into memory."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes > 0 and (count := file.readinto(buffer[: min(num_bytes, _READ_BYTES)])):
            num_bytes -= count


def resident_pages(path: Path, start: int, num_bytes: int) -> NDArray[np.bool_]:
    """Of each page that a part of a file touches, whether it is in memory. Raises OSError."""
    first = start // _PAGE_BYTES * _PAGE_BYTES
    length = start + num_bytes - first
    states = np.zeros(-(-length // _PAGE_BYTES), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, offset=first, prot=mmap.PROT_READ) as map_:
        mapped = np.frombuffer(map_, np.uint8)
        code = _libc.mincore(
            ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(states.ctypes.data)
        )
        del mapped
    if code:
        number = ctypes.get_errno()
        raise OSError(number, f"{path}: mincore: {os.strerror(number)}")
    is_resident: NDArray[np.bool_] = states & 1 != 0
    return is_resident


def resident_share(path: Path, start: int, num_bytes: int) -> float:
    """How much of a part of a file is in memory. Raises OSError."""
    return float(resident_pages(path, start, num_bytes).mean())


def drop_pages(path: Path, start: int, num_bytes: int, pids: Iterable[int] = ()) -> None:
    """Makes whole pages of a part of a file leave memory, also those that these processes have mapped; what
    may not be taken from them, for want of rights, stays. Raises OSError."""
    for pid in pids:
        with contextlib.suppress(OSError):
            _page_out(pid, path, start, start + num_bytes)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)


def _page_out(pid: int, path: Path, start: int, stop: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        for begin, end in mapped_ranges(Path(f"/proc/{pid}/maps").read_text(), path, start, stop):
            for piece in range(begin, end, _ADVISED_BYTES):
                advised = _Range(piece, min(_ADVISED_BYTES, end - piece))
                _libc.syscall(
                    ctypes.c_long(_PROCESS_MADVISE),
                    ctypes.c_int(handle),
                    ctypes.byref(advised),
                    ctypes.c_size_t(1),
                    ctypes.c_int(_MADV_PAGEOUT),
                    ctypes.c_uint(0),
                )
    finally:
        os.close(handle)


def mapped_ranges(maps: str, path: Path, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where the whole pages of a part of a file are mapped: first address and end, by the text of
    /proc/PID/maps."""
    start = -(-start // _PAGE_BYTES) * _PAGE_BYTES
    stop = stop // _PAGE_BYTES * _PAGE_BYTES
    for line in maps.splitlines():
        found = _MAPPING.fullmatch(line)
        if found is None or found[4] != str(path):
            continue
        begin, end, offset = (int(found[group], 16) for group in (1, 2, 3))
        first, last = max(start, offset), min(stop, offset + end - begin)
        if first < last:
            yield begin + first - offset, begin + last - offset
