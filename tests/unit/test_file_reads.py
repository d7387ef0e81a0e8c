"""Reads of ranges into whole pages: the right bytes wherever they lie, and the right error where there are
none."""

import errno
import mmap
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stager import file_reads
from stager.file_reads import FileRead, FileReader

SIZE = 10 * mmap.PAGESIZE + 123


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of random bytes that does not end with a page."""
    found = tmp_path / "file"
    found.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return found


@pytest.fixture
def reader() -> Iterator[FileReader]:
    made = FileReader(3)
    yield made
    made.close()


def read(reader: FileReader, path: Path, ranges: list[tuple[int, int]]) -> list[tuple[int, int, bytes]]:
    """Reads ranges (offset, length) all at once: for each the calls, the result, and what lies where the
    range should."""
    done: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
    memory = [mmap.mmap(-1, (num_bytes // mmap.PAGESIZE + 2) * mmap.PAGESIZE) for _, num_bytes in ranges]
    reads = [
        FileRead(path, offset, num_bytes, memoryview(into))
        for (offset, num_bytes), into in zip(ranges, memory, strict=True)
    ]
    reader.read(reads, lambda *result: done.put(result))
    results = sorted(done.get(timeout=10) for _ in reads)
    return [
        (num_calls, num_bytes, memory[index][ranges[index][0] % mmap.PAGESIZE :][: ranges[index][1]])
        for index, num_calls, num_bytes in results
    ]


RANGES = [
    *(
        (offset, num_bytes)
        for offset in (0, 1, 4095, 4096, 5000)
        for num_bytes in (1, 4095, 4096, 4097, 20000)
    ),
    (SIZE - 1, 1),
    (SIZE - 5000, 5000),
]


@pytest.mark.parametrize("way", ["direct", "cached", "refused"])
def test_any_range(reader: FileReader, path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read directly, through the page cache, and where direct reads turn out to be refused."""
    if way == "cached":
        monkeypatch.setattr(
            file_reads, "_open", lambda path: file_reads._OpenFile(os.open(path, os.O_RDONLY), False)
        )
    if way == "refused":

        def refuse(descriptor: int, read: FileRead) -> tuple[int, int]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(file_reads, "_read_pages", refuse)
    content = path.read_bytes()
    for (offset, num_bytes), (num_calls, count, found) in zip(
        RANGES, read(reader, path, RANGES), strict=True
    ):
        assert found == content[offset : offset + num_bytes]
        assert num_calls == 1
        assert num_bytes <= count <= num_bytes + 2 * mmap.PAGESIZE


@pytest.mark.parametrize("most", [4096, 8192, 5000])
def test_short_reads_are_continued(
    reader: FileReader, path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may give less than was asked for, on whole pages or not."""
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(
        file_reads, "_open", lambda path: file_reads._OpenFile(os.open(path, os.O_RDONLY), True)
    )
    monkeypatch.setattr(file_reads.os, "preadv", short)
    ((num_calls, count, found),) = read(reader, path, [(3000, 30000)])
    assert found == path.read_bytes()[3000:33000]
    assert num_calls > 1
    assert count >= 30000


def test_the_end_of_the_file(reader: FileReader, path: Path) -> None:
    """A file that has become shorter: in the middle of a range, before it, at its begin."""
    for size in (SIZE - 1, 8 * mmap.PAGESIZE, 8 * mmap.PAGESIZE - 10, 0):
        os.truncate(path, size)
        ranges = [(SIZE - 6000, 6000)]
        assert [result for _, result, _ in read(reader, path, ranges)] == [-errno.ENODATA]


def test_a_file_that_cannot_be_opened(reader: FileReader, path: Path) -> None:
    """Is the error of its reads; others go on."""
    assert read(reader, path.with_name("gone"), [(0, 10)])[0][1] == -errno.ENOENT
    assert read(reader, path, [(0, 10)])[0][2] == path.read_bytes()[:10]
