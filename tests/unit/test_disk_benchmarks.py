"""Benchmarks of the disk and of little memory: what they claim from what they measured, and how they make a
file cold and memory small."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import low_memory
from benchmarks.block_device import DiskCounts, device_number, disk_counts, read_ahead_kib
from benchmarks.cgroups import CgroupError, MemoryGroup, SlowDisk, cgroup_version
from benchmarks.cold_runs import ColdRun, DecodeRun, Results, claims, decode_claims, delay_claims
from benchmarks.disk_limit import random_reads_per_s
from benchmarks.foresight import guesses, replay
from benchmarks.ngram_pages import find_table, touch_mapped
from benchmarks.page_cache import drop_pages, mapped_ranges, read_range, resident_pages, resident_share
from benchmarks.processes import ReadWatch, disk_read_bytes
from benchmarks.slices import write_slice
from benchmarks.timings import row_reads
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from tests.support.tiny_slice import TINY_SLICE


def _cold_run(cold_s: float, warm_s: tuple[float, ...], **changes: Any) -> ColdRun:
    run = ColdRun(
        num_tokens=512,
        num_pages=8000,
        cold_s=cold_s,
        warm_s=warm_s,
        resident_share=0.0,
        table_share=0.0,
        read_bytes=512 * 16 * 4096,
        warm_read_bytes=0,
        reads_in_flight=3.0,
        foreign_cpus=0.0,
    )
    return replace(run, **changes)


def test_the_cold_penalty_is_a_difference() -> None:
    """Medians of differences, each of one prompt: prompts cost different times."""
    table = {"file": "m.gguf", "reads_n": 8000, "bytes_n": 512 * 16 * 4096 // 2}
    said = row_reads(
        {
            "ngram_wait_ms": 30.0,
            "staged": {"ms": 225.0, "depth": 60.5, "reads_n": 7200},
            "disk": [table],
            "disk_bytes_n": 1,
        },
        "m.gguf",
    )
    results = Results()
    results.runs["strata"] = [
        _cold_run(3.2, (3.0, 3.1), stack=said, warm_wait_s=0.01, disk_rate=40_000.0),
        _cold_run(4.3, (4.0, 4.2), stack=said, warm_wait_s=0.01, disk_rate=40_000.0),
        _cold_run(9.0, (3.0, 3.0), resident_share=0.5),
    ]
    results.runs["llama_cpp"] = [_cold_run(8.0, (6.5,))]
    results.runs["mmap"] = [_cold_run(15.1, (0.1,))]
    found = claims(results, (512, 2048), 16)
    assert found["cold_penalty_s_512"] == found["cold_penalty_s"] == pytest.approx(0.175)
    # Two warm runs differ by 0.15 s, of two prompts.
    assert found["penalty_resolution_s"] == pytest.approx(0.15 / 2**0.5)
    assert found["cold_penalty_ratio_llama_cpp"] == pytest.approx(1.5 / 0.175)
    assert found["cold_penalty_ratio_mmap"] == pytest.approx(15 / 0.175)
    assert found["cold_penalty_share"] == pytest.approx(0.175 / 3.55)
    assert found["bytes_per_row"] == 4096
    assert found["reads_in_flight"] == 60.5
    assert found["cold_ngram_wait_s"] == pytest.approx(0.02)
    assert found["attributed_share"] == pytest.approx(0.5)
    # 8000 pages take 0.2 s at that rate.
    assert found["limit_ratio"] == pytest.approx(1.125)
    assert not any(name.endswith("_2048") for name in found)


def test_a_penalty_is_no_better_than_it_can_be_told() -> None:
    """Divided by a difference that happens to be almost nothing, any ratio would come out."""
    results = Results()
    results.runs["strata"] = [_cold_run(3.001, (2.9, 3.1))]
    results.runs["mmap"] = [_cold_run(15.0, (0.0,))]
    found = claims(results, (512,), 16)
    assert found["cold_penalty_ratio_mmap"] == pytest.approx(15 / 0.2)
    assert "cold_penalty_ratio_llama_cpp" not in found
    results.runs["llama_cpp"] = [_cold_run(7.1, (6.9, 7.2))]
    found = claims(results, (512,), 16)
    assert found["llama_cpp_cold_penalty_s"] == pytest.approx(0.05)
    assert "cold_penalty_ratio_llama_cpp" not in found
    assert "limit_ratio" not in found


def test_the_worst_length_has_the_plain_name() -> None:
    """A goal that is met by one length only is not met."""
    results = Results()
    results.runs["strata"] = [
        _cold_run(3.1, (3.0, 3.0)),
        _cold_run(9.5, (9.0, 9.0), num_tokens=2048, warm_read_bytes=7),
    ]
    results.runs["llama_cpp"] = [
        _cold_run(8.0, (7.0, 7.0)),
        _cold_run(28.0, (27.0, 27.0), num_tokens=2048),
    ]
    found = claims(results, (512, 2048), 16)
    assert found["cold_penalty_s"] == pytest.approx(0.5)
    assert found["cold_penalty_ratio_llama_cpp"] == pytest.approx(2)
    assert found["warm_read_bytes"] == 7


def test_claims_about_decoding_and_delays() -> None:
    """And a stack that gave up has no ratio, but has let its watchdog fire."""
    said = row_reads({"ngram_wait_ms": 8.0, "ngram_wait_p95_ms": 0.5}, "m.gguf")
    decode = DecodeRun((0.04,) * 19 + (0.09,), (0.03,) * 20, is_same_text=True, cold=said)
    assert decode_claims([decode]) == {
        "decode_gap_p95_cold_ms": pytest.approx(42.5),
        "decode_gap_p95_warm_ms": pytest.approx(30),
        "decode_later_p95_ms": pytest.approx(12.5),
        "decode_ngram_wait_p95_ms": pytest.approx(0.5),
        "decode_ngram_wait_ms": pytest.approx(0.4),
    }
    assert decode_claims([]) == {}
    # 32000 pages, 64 at a time, 10 ms each: 5 s.
    delayed = delay_claims(_cold_run(18.0, (12.0,), num_pages=32_000), 0.01, 64)
    assert delayed == {"delay_ratio": pytest.approx(1.2), "delay_penalty_s": 6.0, "watchdog_fired": 0.0}
    said = row_reads({"ngram_wait_ms": 6500.0, "staged": {"ms": 5500.0}}, "m.gguf")
    told = delay_claims(_cold_run(18.0, (12.0,), num_pages=32_000, stack=said), 0.01, 64)
    assert told["delay_ngram_wait_s"] == 6.5
    assert told["delay_ratio"] == pytest.approx(1.3)
    assert told["delay_reading_ratio"] == pytest.approx(1.1)
    assert delay_claims(None, 0.01, 64) == {"watchdog_fired": 1.0}


def test_a_slow_disk(tmp_path: Path) -> None:
    """This process is in a group whose reads are limited, and nothing is left of it; no disk is said so."""
    for version, name, limit in ((1, "blkio/slow", "8:0 500"), (2, "slow", "8:0 riops=500")):
        root = tmp_path / str(version)
        (root / "blkio").mkdir(parents=True)
        if version == 2:
            (root / "cgroup.controllers").write_text("io memory")
        file = "blkio.throttle.read_iops_device" if version == 1 else "io.max"
        with SlowDisk("slow", 500, "8:0", root):
            assert (root / name / file).read_text() == limit
            assert (root / name / "cgroup.procs").read_text() == str(os.getpid())
        parent = root / "blkio" if version == 1 else root
        assert (parent / "cgroup.procs").read_text() == str(os.getpid())
    with pytest.raises(CgroupError, match="no disk"):
        SlowDisk("slow", 500, None, tmp_path)


def test_what_answers_say_of_reads() -> None:
    """What a version does not report is not nothing."""
    nothing = row_reads({"prompt_ms": 5.0}, "table.gguf")
    assert nothing == row_reads(None, "table.gguf")
    assert (nothing.wait_s, nothing.reading_s, nothing.depth, nothing.num_bytes) == (None, None, None, None)
    timings = {
        "ngram_wait_ms": 85.0,
        "disk_bytes_n": 200,
        "disk": [
            {"file": "experts.gguf", "reads_n": 5, "bytes_n": 150, "wait_ms": 1.0},
            {"file": "table.gguf", "reads_n": 2, "bytes_n": 50, "wait_ms": 0.0},
        ],
        "staged": {"ngram_n": 9, "ms": 410.0, "depth": 61.2, "file": "table.gguf", "reads_n": 2},
    }
    found = row_reads(timings, "table.gguf")
    assert (found.wait_s, found.reading_s, found.depth) == (0.085, 0.41, 61.2)
    assert (found.num_reads, found.num_bytes) == (2, 50)
    assert row_reads(timings | {"ngram_read_ms": 420.0}, "table.gguf").reading_s == 0.42
    assert row_reads(timings, "other.gguf").num_bytes == 0


def test_pages_of_a_prompt(tmp_path: Path) -> None:
    """The divisor of `limit_ratio`: pages that are counted twice, or not, would move the limit."""
    path = tmp_path / "slice.gguf"
    write_slice(path, TINY_SLICE, "iq2_xs", 0, lambda *_: None)
    with GGUFModel(path) as model:
        found = find_table(model)
        assert found is not None
        token_ids = [5, 6, 7, 5, 6, 7]
        places = found.row_places(token_ids)
        rows = model.rows("per_layer_token_embd.weight")
        assert found.row_bytes == rows.shape[1]
        for place in places:
            number, rest = divmod(int(place) - found.start, found.row_bytes)
            assert rest == 0
            assert path.read_bytes()[place : place + found.row_bytes] == rows[number].tobytes()
        del rows
    assert len(places) == 6 * found.rows_per_token
    touched = {int(place + byte) // 4096 for place in places for byte in range(found.row_bytes)}
    assert set(found.pages(token_ids).tolist()) == touched
    assert touch_mapped(found, token_ids) > 0


def test_pages_leave_memory_and_are_seen_to(tmp_path: Path) -> None:
    """A run that is called cold and is not would be the best of all. Other pages stay."""
    path = tmp_path / "file"
    # Large enough that no unit of the page cache lies in both halves.
    size = 16 << 20
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).bytes(size))
        # What has not been written yet cannot leave.
        os.fsync(file.fileno())
    read_range(path, 0, size)
    assert resident_share(path, 0, size) == 1
    drop_pages(path, size // 2, size // 2)
    if resident_share(path, size // 2, size // 2):
        pytest.skip("this file system keeps its pages")
    assert resident_share(path, 0, size // 2) == 1
    # A part that is 4096 bytes long and begins within a page lies on two of them.
    assert resident_pages(path, size // 2 - 4000, 4096).tolist() == [True, False]


def test_where_a_file_is_mapped() -> None:
    """Advice to a wrong address would be for other memory of that process."""
    maps = "\n".join(
        [
            "7f0000000000-7f0000010000 r--s 00000000 fe:00 12      /d/m.gguf",
            "7f0000020000-7f0000030000 r--s 00010000 fe:00 12      /d/m.gguf",
            "7f0000040000-7f0000050000 r--s 00000000 fe:00 13      /d/other.gguf",
            "7f0000060000-7f0000070000 rw-p 00000000 00:00 0 ",
        ]
    )
    found = list(mapped_ranges(maps, Path("/d/m.gguf"), 0xE001, 0x11FFF))
    assert found == [(0x7F000000F000, 0x7F0000010000), (0x7F0000020000, 0x7F0000021000)]
    assert list(mapped_ranges(maps, Path("/d/none.gguf"), 0, 1 << 20)) == []


def test_the_disk_is_read_at_depth(tmp_path: Path) -> None:
    """Every read brings a whole page; a rate of reads that fail would be a fine one."""
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    try:
        assert random_reads_per_s(path, 8, 100) > 0
    except OSError as error:
        pytest.skip(f"no direct asynchronous reads here: {error}")
    with pytest.raises(OSError, match="no whole page"):
        random_reads_per_s(path, 8, 100, start=10, num_bytes=4096)


def test_reads_in_flight(tmp_path: Path) -> None:
    """Of the whole disk, where the file is on a partition of it."""
    disk, part = tmp_path / "sda", tmp_path / "sda" / "sda1"
    part.mkdir(parents=True)
    (part / "partition").write_text("1\n")
    (disk / "dev").write_text("8:0\n")
    (disk / "queue").mkdir()
    (disk / "queue" / "read_ahead_kb").write_text("128\n")
    (disk / "stat").write_text("100 0 800 5000 7 0 56 9 0 1000 5009 0 0 0 0 0 0\n")
    device = tmp_path.stat().st_dev
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(part)
    (tmp_path / "8:0").symlink_to(disk)
    number = device_number(tmp_path, tmp_path)
    assert number == "8:0"
    counts = disk_counts(number, tmp_path)
    assert counts == DiskCounts(num_reads=100, reading_ms=5000, busy_ms=1000)
    assert counts.reads_in_flight_since(DiskCounts(0, 1000, 500)) == 8
    assert counts.reads_in_flight_since(counts) == 0
    assert read_ahead_kib(number, tmp_path) == 128
    assert device_number(tmp_path, tmp_path / "none") is None


def test_reads_between_two_moments() -> None:
    """Reads of the prompt are not those of the tokens after it."""
    so_far = iter(range(0, 1 << 20, 100))
    with ReadWatch(lambda: next(so_far)) as watch:
        time.sleep(0.35)
    assert watch.bytes_between(0, 10) >= 300
    assert watch.bytes_between(0.05, 0.05) == 0
    assert 0 < watch.bytes_between(0, 0.2) < watch.bytes_between(0, 0.3)


def test_own_reads_are_counted() -> None:
    """From /proc, for processes that there are."""
    assert disk_read_bytes([os.getpid()]) >= 0
    assert disk_read_bytes([]) == 0


class _FakeGroups:
    """What the kernel does with directories of control groups."""

    def __init__(self, root: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu io memory\n")
            (root / "cgroup.subtree_control").write_text("")
        else:
            (root / "memory").mkdir()
            (root / "blkio").mkdir()
            (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
        self.files: dict[str, str] = {}
        monkeypatch.setattr(Path, "rmdir", lambda directory: self._remove(directory))

    def _remove(self, directory: Path) -> None:
        for path in directory.iterdir():
            self.files[str(path.relative_to(self.root))] = path.read_text()
        shutil.rmtree(directory)


def test_a_group_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, its count of killed processes, and nothing left behind."""
    fake = _FakeGroups(tmp_path, 1, monkeypatch)
    with MemoryGroup("bench", 1 << 30, 2000, "254:0", root=tmp_path) as group:
        (tmp_path / "memory" / "bench" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
        assert group.oom_kills() == 2
        assert group.peak_bytes() is None
        assert group.procs == [
            tmp_path / "memory" / "bench" / "cgroup.procs",
            tmp_path / "blkio" / "bench" / "cgroup.procs",
        ]
    assert fake.files["memory/bench/memory.limit_in_bytes"] == str(1 << 30)
    assert fake.files["blkio/bench/blkio.throttle.read_iops_device"] == "254:0 2000"
    assert not (tmp_path / "memory" / "bench").exists()
    assert not (tmp_path / "blkio" / "bench").exists()


def test_a_group_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One directory for memory and reads, with controllers that have to be asked for."""
    fake = _FakeGroups(tmp_path, 2, monkeypatch)
    with MemoryGroup("bench", 1 << 30, 2000, "254:0", root=tmp_path) as group:
        (tmp_path / "bench" / "memory.events").write_text("oom 1\noom_kill 1\n")
        assert group.oom_kills() == 1
        assert group.procs == [tmp_path / "bench" / "cgroup.procs"]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +io"
    assert fake.files["bench/memory.max"] == str(1 << 30)
    assert fake.files["bench/io.max"] == "254:0 riops=2000"
    assert not (tmp_path / "bench").exists()


def test_where_there_can_be_no_group(tmp_path: Path) -> None:
    """What it would take is said, rather than a number measured without any limit."""
    with pytest.raises(CgroupError, match="no control groups for memory"):
        cgroup_version(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("")
    (tmp_path / "memory" / "bench").write_text("in the way")
    with pytest.raises(CgroupError, match="that takes root"), MemoryGroup("bench", 1, root=tmp_path):
        pass
    with pytest.raises(CgroupError, match="no disk whose reads"):
        MemoryGroup("bench", 1, 2000, None, root=tmp_path)


def test_claims_about_little_memory() -> None:
    """No ratio where one of them was killed every time."""

    def measured(tokens_per_s: float, kills: int = 0, busy: float = 0.0) -> low_memory.MemoryRun:
        return low_memory.MemoryRun(tokens_per_s, 5.0, 8e8, 16, kills, None, busy)

    runs = {
        "strata": [measured(3.0), measured(4.0), measured(3.5), measured(0.1, busy=1.2)],
        "llama_cpp": [measured(1.0, busy=0.4)],
    }
    found = low_memory.claims(runs)
    assert found["decode_ratio"] == pytest.approx(3.5)
    assert found["strata_decode_spread"] == pytest.approx(1 / 3.5)
    assert found["strata_mb_per_token"] == pytest.approx(50)
    assert found["llama_cpp_oom_kills"] == 0
    assert "decode_ratio" not in low_memory.claims({"strata": [measured(3.0, 1)], "llama_cpp": []})


def test_a_guess_is_worth_what_it_saves() -> None:
    """Of three tokens with two experts each, and two places: what is in the pool need not be guessed."""
    chosen = np.array([[0, 1], [0, 2], [3, 4]], np.int32)
    scores = np.zeros((3, 8), np.float32)
    for token, guessed in enumerate(([0, 5], [0, 2], [0, 3])):
        scores[token, guessed] = 1
    found = replay(scores, chosen, num_guessed=2, num_places=2)
    assert found.recall == pytest.approx(4 / 6)
    # Not in the pool: 0 and 1, then 2, then 3 and 4. Guessed beyond it: 0 and 5, then 2, then 3.
    assert (found.foreseen, found.right, found.reads) == pytest.approx((3 / 5, 3 / 4, 6 / 5))


def test_routers_of_the_demo_model_know_something() -> None:
    """More than chance would: 4 of 64 experts, or 8."""
    found = guesses(DEMO_MODEL_PATH, ["A spoon is used to"], 8)
    assert all(len(layers) == 3 for layers in found.values())
    assert all(guess.recall > 0.2 for guess in found[""])
    assert all(wide.recall >= guess.recall for guess, wide in zip(found[""], found["_wide"], strict=True))
