"""What was needed, put together: nothing is lost, nothing counts twice."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.attribution import Purpose, Totals, by_file, shares_of
from shared.messages import ExpertBytes, FileReads, PromptStaged, RequestTimings, RouteCounts

counts = st.integers(0, 1 << 40)
reads = st.builds(
    FileReads,
    file=st.sampled_from(["a.gguf", "b.gguf", "c.gguf"]),
    num_reads=counts,
    num_bytes=counts,
    # Such sums are exact.
    wait_s=st.integers(0, 1000).map(float),
)
routes = st.builds(RouteCounts, device=counts, ram=counts, disk=counts, transferred=counts, skipped=counts)
used = st.builds(ExpertBytes, device=counts, ram=counts, transferred=counts)
# Such sums are exact.
waits = st.tuples(*[st.integers(0, 1000).map(float)] * 3)


def timings(*disk: FileReads, **needed: Any) -> RequestTimings:
    times = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ngram_wait_s", "expert_wait_s"), 0.0)
    return RequestTimings(**{**times, **needed}, disk=list(disk))


def sums(entries: list[FileReads]) -> dict[str, tuple[int, int, float]]:
    found: dict[str, tuple[int, int, float]] = {}
    for entry in entries:
        old = found.get(entry.file, (0, 0, 0.0))
        found[entry.file] = (old[0] + entry.num_reads, old[1] + entry.num_bytes, old[2] + entry.wait_s)
    return found


@given(st.lists(reads, max_size=12))
def test_reads_of_a_file_become_one_entry(entries: list[FileReads]) -> None:
    entries = [entry for entry in entries if entry.num_reads or entry.wait_s]
    merged = by_file(entries)
    assert [entry.file for entry in merged] == sorted({entry.file for entry in entries})
    assert sums(merged) == sums(entries)


def test_a_file_that_nobody_read_has_no_entry() -> None:
    nothing = FileReads(file="a", num_reads=0, num_bytes=0, wait_s=0)
    assert by_file([nothing]) == []
    totals = Totals()
    totals.finished(timings(nothing))
    assert totals.reads == {}


def test_waiting_for_what_another_had_read_counts() -> None:
    waited = FileReads(file="a", num_reads=0, num_bytes=0, wait_s=0.5)
    assert by_file([waited]) == [waited]


@given(routes)
def test_shares_add_up(taken: RouteCounts) -> None:
    shares = shares_of(taken)
    assert sum(count for count, _ in shares.values()) == (
        taken.device + taken.ram + taken.disk + taken.transferred + taken.skipped
    )
    if shares:
        assert sum(share for _, share in shares.values()) == pytest.approx(1)
    assert all(count > 0 for count, _ in shares.values())


@given(st.lists(st.tuples(st.lists(reads, max_size=3), routes, counts, counts, counts), max_size=5))
def test_totals_are_the_sums(
    finished: list[tuple[list[FileReads], RouteCounts, int, int, int]],
) -> None:
    totals = Totals()
    by_way: Counter[str] = Counter()
    for disk, taken, rows, hits, faults in finished:
        totals.finished(timings(*disk, routes=taken, ngram_rows=rows, ngram_hits=hits, major_faults=faults))
        by_way.update(msgspec.structs.asdict(taken))
    assert totals.num_ngram_rows == sum(rows for _, _, rows, _, _ in finished)
    assert totals.num_ngram_hits == sum(hits for _, _, _, hits, _ in finished)
    assert totals.num_major_faults == sum(faults for _, _, _, _, faults in finished)
    ways = ("device", "ram", "disk", "transferred", "skipped")
    assert totals.num_routes == {way: by_way[way] for way in ways}
    everything = by_file([entry for disk, *_ in finished for entry in disk])
    assert sums(list(totals.reads.values())) == sums(everything)


@given(st.lists(st.tuples(used, waits), max_size=5))
def test_bytes_and_waits_of_each_way_are_the_sums(
    finished: list[tuple[ExpertBytes, tuple[float, ...]]],
) -> None:
    """That of the cpu_worker is the wait for what is in RAM, or was read into it."""
    totals = Totals()
    for taken, (device, ram, transferred) in finished:
        totals.finished(
            timings(expert_bytes=taken, device_wait_s=device, expert_wait_s=ram, transfer_wait_s=transferred)
        )
    ways = ("device", "ram", "transferred")
    assert totals.expert_bytes == {way: sum(getattr(taken, way) for taken, _ in finished) for way in ways}
    assert totals.expert_wait_s == {
        way: sum(times[place] for _, times in finished) for place, way in enumerate(ways)
    }


def test_reads_ahead_of_time_are_told_from_those_of_steps() -> None:
    totals = Totals()
    totals.finished(timings(FileReads(file="a", num_reads=1, num_bytes=10, wait_s=0.5)))
    staged = FileReads(file="a", num_reads=2, num_bytes=20, wait_s=0)
    totals.staged(PromptStaged(request_id="r", num_rows=3, num_hits=1, reads=staged, seconds=0.1, depth=1.5))
    assert {key: entry.num_bytes for key, entry in totals.reads.items()} == {
        (Purpose.STEP, "a"): 10,
        (Purpose.STAGING, "a"): 20,
    }
