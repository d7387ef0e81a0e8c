"""Many reads at a time: the right bytes come, whoever reads them; and what becomes of reads that fail."""

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.errors import ModelFileError, ResourceError
from shared.native.records import Record
from shared.native.ring import RingStatus
from stager import read_queue
from stager.io_uring import IoUring
from stager.read_queue import (
    BUFFER_BYTES,
    MOST_THREADS,
    PAGE_BYTES,
    Backend,
    Faults,
    ReadQueue,
    open_for_reading,
    reads_of,
)

NUM_PAGES = 300
TAIL_BYTES = 1234
"""Of the last page, which is not whole."""


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(NUM_PAGES * PAGE_BYTES + TAIL_BYTES)


@pytest.fixture
def path(content: bytes, tmp_path: Path) -> Path:
    written = tmp_path / "model.gguf"
    written.write_bytes(content)
    return written


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def descriptor(request: pytest.FixtureRequest, path: Path) -> Iterator[int]:
    try:
        opened = open_for_reading(path, direct=request.param)
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")
    yield opened
    os.close(opened)


@pytest.fixture(params=list(Backend))
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        ReadQueue(64, backend=request.param).close()
    except ResourceError as error:
        pytest.skip(f"not to be had here: {error}")
    return Backend(request.param)


class Target:
    """Reads of pages of a file, and where they go."""

    def __init__(self, descriptor: int, ranges: list[tuple[int, int]]) -> None:
        """`ranges` are first pages and numbers of pages."""
        pages = np.array(ranges, np.int64)
        self._sizes = pages[:, 1] * PAGE_BYTES
        starts = np.cumsum(self._sizes) - self._sizes
        self._memory = np.frombuffer(mmap.mmap(-1, int(self._sizes.sum())), np.uint8)
        self._starts = starts
        self.reads: Record = reads_of(
            descriptor, pages * PAGE_BYTES, self._sizes.copy(), self._memory.ctypes.data + starts
        )

    def bytes_of(self, number: int) -> bytes:
        start = int(self._starts[number])
        return self._memory[start : start + int(self._sizes[number])].tobytes()


def pages_of(content: bytes, first: int, count: int) -> bytes:
    return content[first * PAGE_BYTES : (first + count) * PAGE_BYTES]


@pytest.mark.parametrize("depth", [1, 3, 64])
def test_every_read_brings_its_bytes(descriptor: int, backend: Backend, depth: int, content: bytes) -> None:
    """More reads than the queue is deep, of different lengths, in no order, some of them twice."""
    rng = np.random.default_rng(depth)
    ranges = [(int(rng.integers(NUM_PAGES - 4)), int(rng.integers(1, 5))) for _ in range(200)]
    target = Target(descriptor, ranges)
    with ReadQueue(depth, backend=backend) as queue:
        queue.run(target.reads)
        counts = queue.counts
    assert (target.reads["result"] == 0).all()
    for number, (first, count) in enumerate(ranges):
        assert target.bytes_of(number) == pages_of(content, first, count)
    assert counts.num_reads == len(ranges)
    assert counts.num_bytes == sum(count for _, count in ranges) * PAGE_BYTES
    assert counts.num_failures == 0
    assert 0 < counts.depth_s <= depth * counts.busy_s * 1.001


def test_nothing_to_read(backend: Backend) -> None:
    with ReadQueue(4, backend=backend) as queue:
        queue.run(reads_of(0, np.zeros((0, 2), np.int64), np.zeros(0, np.int64)))
        assert queue.counts.num_reads == 0


def test_the_last_page(descriptor: int, backend: Backend, content: bytes) -> None:
    """It is read whole, and brings what there is of it; more than that cannot be had."""
    target = Target(descriptor, [(NUM_PAGES, 1), (NUM_PAGES - 1, 2), (NUM_PAGES, 1), (NUM_PAGES + 3, 1)])
    target.reads["needed"] = [TAIL_BYTES, PAGE_BYTES + TAIL_BYTES, TAIL_BYTES + 1, 1]
    with ReadQueue(4, backend=backend) as queue:
        queue.run(target.reads)
        assert queue.counts.num_failures == 2
    assert target.reads["result"].tolist() == [0, 0, -errno.ENODATA, -errno.ENODATA]
    assert target.bytes_of(0)[:TAIL_BYTES] == content[-TAIL_BYTES:]
    assert target.bytes_of(1)[: PAGE_BYTES + TAIL_BYTES] == content[-PAGE_BYTES - TAIL_BYTES :]


def test_a_file_that_is_truncated_meanwhile(path: Path, descriptor: int, backend: Backend) -> None:
    """Reads behind its new end fail, those before it do not; no signal ends the process."""
    target = Target(descriptor, [(10, 2), (19, 2), (200, 1)])
    os.truncate(path, 20 * PAGE_BYTES)
    with ReadQueue(4, backend=backend) as queue:
        queue.run(target.reads)
    assert target.reads["result"].tolist() == [0, -errno.ENODATA, -errno.ENODATA]


def test_what_is_no_file(backend: Backend) -> None:
    """The kernel's own errors come through."""
    reads = reads_of(9999, np.array([[0, PAGE_BYTES]]), np.array([PAGE_BYTES]))
    with ReadQueue(2, backend=backend) as queue:
        queue.run(reads)
    assert reads["result"].tolist() == [-errno.EBADF]


def test_short_reads_are_continued(descriptor: int, backend: Backend, content: bytes) -> None:
    """At whole pages, as direct I/O needs it, until everything is there."""
    ranges = [(first, 4) for first in range(0, 80, 4)]
    target = Target(descriptor, ranges)
    with ReadQueue(8, Faults(shorten_every=2), backend) as queue:
        queue.run(target.reads)
        assert queue.counts.num_reads > len(ranges)
    assert (target.reads["result"] == 0).all()
    assert all(target.bytes_of(i) == pages_of(content, *where) for i, where in enumerate(ranges))


def test_injected_failures(descriptor: int, backend: Backend, content: bytes) -> None:
    """One in so many, and only these; the others bring their bytes."""
    ranges = [(page, 1) for page in range(100)]
    target = Target(descriptor, ranges)
    with ReadQueue(8, Faults(fail_every=10), backend) as queue:
        queue.run(target.reads)
        assert queue.counts.num_failures == 10
    results = target.reads["result"].tolist()
    assert results.count(-errno.EIO) == 10
    assert all(target.bytes_of(i) == pages_of(content, i, 1) for i in range(100) if results[i] == 0)


def test_an_injected_delay(descriptor: int, backend: Backend, content: bytes) -> None:
    """Every read takes that long, and as many at a time as the queue is deep: their number in flight is its
    depth nearly all the time."""
    depth, num_reads, delay_s = 10, 60, 0.02
    target = Target(descriptor, [(page, 1) for page in range(num_reads)])
    with ReadQueue(depth, Faults(delay_s=delay_s), backend) as queue:
        queue.run(target.reads)
        counts = queue.counts
    assert (target.reads["result"] == 0).all()
    assert counts.depth_s >= num_reads * delay_s * 0.999
    assert counts.busy_s >= num_reads / depth * delay_s * 0.999
    assert target.bytes_of(59) == pages_of(content, 59, 1)


def test_progress_and_interruption(descriptor: int, backend: Backend) -> None:
    """Each completion is noted in the words of whoever watches. What was not begun when it is interrupted is
    given up, and says so; what was begun is waited for."""
    words: NDArray[np.int64] = np.zeros(3, np.int64)
    num_reads = 100
    target = Target(descriptor, [(page, 1) for page in range(num_reads)])
    with ReadQueue(2, Faults(delay_s=0.01), backend) as queue:
        queue.report_to(words.ctypes.data, words.ctypes.data + 16)
        reading = threading.Thread(target=queue.run, args=(target.reads,))
        reading.start()
        while words[RingStatus.PROGRESS] < 4:
            assert reading.is_alive()
        assert words[RingStatus.OUTSTANDING] > 0
        words[2] = 1
        reading.join(10)
        assert not reading.is_alive()
    results = target.reads["result"].tolist()
    assert set(results) == {0, -errno.ECANCELED}
    assert results.count(0) == words[RingStatus.PROGRESS]
    assert words[RingStatus.OUTSTANDING] == 0


def test_an_injected_delay_does_not_hold_up_the_end(descriptor: int, backend: Backend) -> None:
    """Reads that are held back are let go when it is time to end, however long they were to take."""
    target = Target(descriptor, [(page, 1) for page in range(10)])
    with ReadQueue(4, Faults(delay_s=1000), backend) as queue:
        reading = threading.Thread(target=queue.run, args=(target.reads,))
        reading.start()
        while queue.counts.num_reads < 4:
            assert reading.is_alive()
        queue.interrupt()
        reading.join(10)
        assert not reading.is_alive()
    assert sorted(set(target.reads["result"].tolist())) == [-errno.ECANCELED, 0]


def test_threads_where_there_is_no_io_uring(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """As in a container whose profile forbids it, or with a small limit of locked memory. The threads end
    with the queue."""

    def refuse(depth: int, longest_wait_s: float) -> IoUring:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(read_queue, "IoUring", refuse)
    target = Target(descriptor, [(7, 3)])
    before = threading.active_count()
    with ReadQueue(5) as queue:
        assert queue.backend is Backend.THREADS
        assert threading.active_count() == before + 5
        queue.run(target.reads)
    assert threading.active_count() == before
    with ReadQueue(5000) as queue:
        assert queue.depth == MOST_THREADS == threading.active_count() - before
    assert target.bytes_of(0) == pages_of(content, 7, 3)


def test_buffers_of_the_queue(descriptor: int, backend: Backend) -> None:
    """A read that does not say where its bytes go needs no memory of the caller's."""
    pages = np.arange(50)
    ranges = np.stack([pages * PAGE_BYTES, np.full(50, BUFFER_BYTES)], axis=1)
    reads = reads_of(descriptor, ranges, np.full(50, BUFFER_BYTES))
    with ReadQueue(7, backend=backend) as queue:
        queue.run(reads)
    assert (reads["result"] == 0).all()


def test_opening_what_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="gone"):
        open_for_reading(tmp_path / "none.gguf", direct=False)
