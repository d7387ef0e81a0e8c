"""What the disk under the n-gram table can do: random pages, one at a time and many, past the page cache and
through it.

A disk that answers a hundred reads a second when asked for one at a time may answer ten thousand when asked
for many; nobody can tell from its name. So it is measured at every start, on pages of the very table that
nobody has read before, for a fraction of a second.
"""

import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.gguf.file import TensorInfo
from stager.read_queue import PAGE_BYTES, Faults, ReadQueue, reads_of

_NUM_SINGLE, _NUM_DEEP = 24, 512
# A slow disk is known for what it is after this long.
_LONGEST_S = 0.1


@dataclass(frozen=True, slots=True)
class ProbedRates:
    """Reads of single pages per second, `single` one at a time, `deep` as many at a time as the queue is
    deep; 0 where it could not be told."""

    single: float
    deep: float


def probe_file(
    descriptor: int, info: TensorInfo, depth: int, faults: Faults, rng: np.random.Generator
) -> ProbedRates:
    """Reads random pages of a tensor that are not in the page cache. Raises OSError where they cannot be read
    in this way."""
    # Not where something is injected that a probe would take for a broken disk.
    slowed = Faults(delay_s=faults.delay_s)
    return ProbedRates(
        single=_rate(descriptor, _cold_pages(descriptor, info, _NUM_SINGLE, rng), 1, slowed),
        deep=_rate(descriptor, _cold_pages(descriptor, info, _NUM_DEEP, rng), depth, slowed),
    )


def _cold_pages(
    descriptor: int, info: TensorInfo, num_pages: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Offsets of random pages that the page cache does not have. Fewer than wanted where it has most of them,
    and will not let go: a file that has just been written."""
    first, end = info.offset // PAGE_BYTES, (info.offset + info.num_bytes) // PAGE_BYTES
    offsets = rng.integers(first, max(end, first + 1), size=num_pages) * PAGE_BYTES
    byte = bytearray(1)
    cold = []
    for offset in np.unique(offsets).tolist():
        os.posix_fadvise(descriptor, offset, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        if not _is_cached(descriptor, offset, byte):
            cold.append(offset)
    return rng.permutation(np.array(cold, np.int64))


def _is_cached(descriptor: int, offset: int, byte: bytearray) -> bool:
    try:
        return os.preadv(descriptor, [byte], offset, os.RWF_NOWAIT) > 0
    except OSError:
        # It would have to wait; or that cannot be told, of direct I/O and of file systems without the flag.
        return False


def _rate(descriptor: int, offsets: NDArray[np.int64], depth: int, faults: Faults) -> float:
    """Reads a second; 0 where there is nothing to read."""
    ranges = np.stack([offsets, np.full(len(offsets), PAGE_BYTES)], axis=1)
    reads = reads_of(descriptor, ranges, needed=np.ones(len(offsets), np.int64))
    num_done, elapsed = 0, 0.0
    with ReadQueue(depth, faults) as queue:
        queue.run(reads[:0])
        while num_done < len(reads) and elapsed < _LONGEST_S:
            some = reads[num_done : num_done + depth]
            started = time.perf_counter()
            queue.run(some)
            elapsed += time.perf_counter() - started
            num_done += len(some)
            failures = some["result"][some["result"] < 0]
            if len(failures):
                raise OSError(-int(failures[0]), os.strerror(-int(failures[0])))
    return num_done / elapsed if num_done else 0.0
