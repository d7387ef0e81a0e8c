"""Routing traces: what is written is read, and damage is told with its place."""

import resource
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.errors import TraceFileError
from shared.placement.trace import TraceHeader, TraceReader, TraceWriter
from tests.support.second_process import second_process

HEADER = TraceHeader("qwen", 3, 512, "abc", 4)


def routes(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 512, (3, num_tokens, 4)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def written(path: Path, *num_tokens: int) -> Path:
    with TraceWriter(path, HEADER) as writer:
        for number, count in enumerate(num_tokens):
            writer.append(routes(count, number), count - 1)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Twice over, as several settings are simulated one after the other."""
    path = written(tmp_path / "t", 1, 300, 5)
    with TraceReader(path) as reader:
        assert reader.header == HEADER
        assert TraceHeader.of(reader.header.identity, 4) == HEADER
        for _ in range(2):
            steps = list(reader)
            assert [(step.num_tokens, step.num_prefill_tokens) for step in steps] == [
                (1, 0),
                (300, 299),
                (5, 4),
            ]
            for number, step in enumerate(steps):
                assert np.array_equal(step.expert_ids, routes(step.num_tokens, number))
        assert reader.position == reader.num_bytes == path.stat().st_size


def test_an_empty_trace(tmp_path: Path) -> None:
    """An engine that was stopped before its first step has left no damage."""
    with TraceReader(written(tmp_path / "t")) as reader:
        assert list(reader) == []


def test_every_cut_is_told(tmp_path: Path) -> None:
    """Of whatever length: within the last record, the one before, the header. Never a wrong step."""
    path = written(tmp_path / "t", 1, 2)
    whole = path.read_bytes()
    with TraceReader(written(tmp_path / "first", 1)) as reader:
        ends = [reader.position, reader.num_bytes, len(whole)]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size in ends:
            continue
        read = []
        with pytest.raises(TraceFileError, match=str(path)), TraceReader(path) as reader:
            read.extend(reader)
        assert all(np.array_equal(step.expert_ids, routes(1)) for step in read)
    path.write_bytes(whole[: ends[1] + 3])
    told = (
        f"the step at offset {ends[1]} .* the 1 steps before it can be had by cutting the file to {ends[1]}"
    )
    with pytest.raises(TraceFileError, match=told), TraceReader(path) as reader:
        list(reader)


def test_every_changed_byte_is_told(tmp_path: Path) -> None:
    """Wrong routes would be a wrong hit rate."""
    path = written(tmp_path / "t", 1)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        path.write_bytes(damaged)
        with pytest.raises(TraceFileError, match=str(path)), TraceReader(path) as reader:
            list(reader)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"abc", "it is too short"),
        (struct.pack("<II", 0, 0), "it is said to be of 0 tokens"),
        (struct.pack("<II", 1, 2), "it is said to be of 1 tokens, 2 of prompts"),
        (struct.pack("<II", 1 << 31, 0), "it is said to be of 2147483648 tokens"),
        (struct.pack("<II", 1, 0) + b"????", "its routes cannot be unpacked"),
        (struct.pack("<II", 1, 0) + zlib.compress(bytes(25)), "it has not the routes of 1 tokens"),
        (struct.pack("<II", 1, 0) + zlib.compress(bytes(1 << 20)), "it has not the routes of 1 tokens"),
        (struct.pack("<II", 1, 0) + zlib.compress(b"\xff\x7f" * 12), "it has expert 32767, there are 512"),
    ],
)
def test_records_that_make_no_sense(tmp_path: Path, payload: bytes, message: str) -> None:
    """With a right checksum, as another program may write them."""
    path = written(tmp_path / "t")
    with path.open("ab") as file:
        file.write(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    with pytest.raises(TraceFileError, match=message), TraceReader(path) as reader:
        list(reader)


def test_a_killed_writer_leaves_whole_steps(tmp_path: Path) -> None:
    """Nothing is kept back in a buffer."""
    path = tmp_path / "t"
    script = f"""
import numpy as np
from pathlib import Path
from shared.placement.trace import TraceHeader, TraceWriter
writer = TraceWriter(Path({str(path)!r}), TraceHeader("m", 1, 8, "abc", 2))
for _ in range(3):
    writer.append(np.ones((1, 1, 2), np.int32), 0)
print("written", flush=True)
input()
"""
    with second_process(script) as process:
        assert process.line() == "written"
        process.kill()
        with TraceReader(path) as reader:
            assert len(list(reader)) == 3


def test_refusals(tmp_path: Path) -> None:
    """Before anything is written that nobody can read."""
    with (
        TraceWriter(tmp_path / "t", HEADER) as writer,
        pytest.raises(ValueError, match=r"routes of \(3, 1, 5\)"),
    ):
        writer.append(np.zeros((3, 1, 5), np.int32), 0)
    with pytest.raises(ValueError, match="65536 experts; a trace can tell 65535 apart"):
        TraceWriter(tmp_path / "t", TraceHeader("m", 1, 65536, "abc", 1))
    with pytest.raises(TraceFileError, match="cannot be read: No such file"):
        TraceReader(tmp_path / "none")
    (tmp_path / "other").write_bytes(b"GGUF" * 100)
    with pytest.raises(TraceFileError, match="is no routing trace"):
        TraceReader(tmp_path / "other")


def test_a_disk_that_takes_a_part(tmp_path: Path) -> None:
    """Nearly full, it does so without an error: the record is not there, and what is left are whole ones."""
    path = tmp_path / "t"
    with TraceWriter(path, HEADER) as writer:
        writer.append(routes(1), 0)
        before = path.stat().st_size
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 100, limits[1]))
        try:
            with pytest.raises(OSError, match="No space left on device"):
                writer.append(routes(300), 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.stat().st_size == before
    with TraceReader(path) as reader:
        assert [step.num_tokens for step in reader] == [1]


def test_a_full_disk(tmp_path: Path) -> None:
    """Is noticed before anything is computed."""
    with pytest.raises(OSError, match="No space left on device"):
        TraceWriter(Path("/dev/full"), HEADER)
