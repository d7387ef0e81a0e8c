"""Which way routes went and what was read for whom, from the slots of the cpu_worker to the end of a
request."""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.experts.counts import ExpertCounts, ExpertFiles, Way
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.sequence import Clock
from shared.errors import DiskError
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.messages import RequestFailed, RequestFinished, RequestTimings
from shared.native.records import Record
from shared.ring import Arrays
from shared.work_slots import ExpertHeader
from tests.support.running_engine import TIMEOUT_S, Answer, RunningEngine, running_engine
from tests.support.tiny_model import NUM_LAYERS, tiny_model

pytestmark = pytest.mark.timeout(60, method="thread")

NUM_USED = 2
PROMPTS = {"a": [3, 5, 7, 11, 13, 17, 19], "b": [2, 4, 6]}
NUM_NEW = 6
# What is computed of a request: its prompt, and what was generated but for the last token.
ROUTES = {name: (len(prompt) + NUM_NEW - 1) * NUM_LAYERS * NUM_USED for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in two files: experts of the second layer, and what down is of the third, in the second one."""
    folder = tmp_path_factory.mktemp("split")
    return tiny_model().write_split(
        folder / "tiny.gguf", lambda name: "blk.1.ffn_" in name or "blk.2.ffn_down_exps" in name
    )


def files_of(names: tuple[str, ...], index: list[list[int]], num_experts: int = 10) -> ExpertFiles:
    """Of layers whose experts have 1000, 1001 and so on bytes."""
    blob_bytes = np.arange(1000, 1000 + len(index), dtype=np.int64)
    return ExpertFiles(names, np.array(index, np.int64), blob_bytes, num_experts)


def finished(running: RunningEngine) -> dict[str, RequestTimings]:
    """The timings of two requests that share steps."""
    for name, prompt in PROMPTS.items():
        running.ask(name, prompt, NUM_NEW)
    ends = {name: running.answer(name).end for name in PROMPTS}
    assert all(isinstance(end, RequestFinished) for end in ends.values()), ends
    return {name: end.timings for name, end in ends.items()}  # type: ignore[union-attr]


@pytest.fixture(params=["machine code", "Python", "torch"])
def running(request: pytest.FixtureRequest, parts: list[Path]) -> Iterator[RunningEngine]:
    """With a pool as small as it may be, and each way the counts can come."""
    with ExitStack() as stack:
        yield stack.enter_context(
            running_engine(
                parts[0],
                places_per_layer=2 * NUM_USED,
                natively=request.param == "machine code",
                torch_device=torch.device("cpu") if request.param == "torch" else None,
            )
        )


def test_routes_and_reads_add_up(running: RunningEngine) -> None:
    """Every route is one to RAM or one to the disk; the reads of all requests are all that were made, by
    file; for every blob there is a route."""
    assert running.pooled is not None
    timings = finished(running)
    for name, ours in timings.items():
        assert ours.routes.ram + ours.routes.disk == ROUTES[name]
        assert ours.routes.device == ours.routes.transferred == ours.routes.skipped == 0
        assert ours.major_faults >= 0
    files = {
        reads.file: sum(
            other.num_reads for ours in timings.values() for other in ours.disk if other.file == reads.file
        )
        for ours in timings.values()
        for reads in ours.disk
    }
    assert sum(files.values()) == running.pooled.reader.num_reads
    assert set(files) == {f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)}
    num_bytes = sum(reads.num_bytes for ours in timings.values() for reads in ours.disk)
    assert num_bytes == running.pooled.reader.num_bytes
    num_blobs = sum(files.values()) // 3
    assert sum(ours.routes.disk for ours in timings.values()) >= num_blobs > 0
    assert all(reads.wait_s > 0 for ours in timings.values() for reads in ours.disk)


def test_all_in_ram(parts: list[Path]) -> None:
    """Without a pool nothing is read, as far as anyone can tell."""
    with running_engine(parts[0]) as running:
        for name, ours in finished(running).items():
            assert (ours.routes.ram, ours.routes.disk, ours.disk) == (ROUTES[name], 0, [])


def test_a_failed_step_leaves_nothing_behind(parts: list[Path]) -> None:
    """What a step had counted when it failed is not the next one's."""
    with running_engine(parts[0], places_per_layer=4, natively=True) as running:
        assert running.pooled is not None
        reader = running.pooled.reader

        def spoil(reads: list[object]) -> None:
            if reader.num_reads >= 9:
                raise RuntimeError("no such luck")

        reader.before = spoil  # type: ignore[assignment]
        running.ask("failed", [1, 2, 3], 2)
        assert not isinstance(running.answer("failed").end, RequestFinished)
        reader.before = lambda reads: None
        running.wait_idle()
        before = reader.num_reads
        for ours in finished(running).values():
            assert sum(reads.num_reads for reads in ours.disk) <= reader.num_reads - before


def test_a_bad_expert_ends_only_those_who_need_it(running: RunningEngine) -> None:
    """Of two requests that share steps. Whoever goes on says what it always says, whoever does
    not is told the file and the reason, and all that was read for either is accounted for."""
    assert running.pooled is not None
    reader, offsets, bad = running.pooled.reader, set[int](), [-1]

    def spoil(reads: Record) -> None:
        offsets.update(reads["offset"].tolist())
        reads["file"][reads["offset"] == bad[0]] = 9999

    def ask(turn: int) -> dict[str, Answer]:
        # Held up by a third one, so that both are there when the first begins.
        is_held = threading.Event()
        reader.before = lambda reads: (is_held.wait(TIMEOUT_S), spoil(reads))[1]
        for name, prompt in {"first": [1], **PROMPTS}.items():
            running.ask(f"{name} {turn}", prompt, 1 if name == "first" else NUM_NEW)
        is_held.set()
        running.wait_idle()
        return {name: running.answer(f"{name} {turn}") for name in ("first", *PROMPTS)}

    said = {name: answer.token_ids for name, answer in ask(0).items()}
    num_apart = 0
    for turn, bad[0] in enumerate(sorted(offsets), 1):
        before = reader.num_reads, reader.num_bytes
        found = ask(turn)
        disk = [reads for answer in found.values() for reads in answer.end.timings.disk]  # type: ignore[union-attr]
        assert sum(reads.num_reads for reads in disk) == reader.num_reads - before[0]
        assert sum(reads.num_bytes for reads in disk) == reader.num_bytes - before[1]
        for name, answer in found.items():
            if isinstance(answer.end, RequestFailed):
                assert answer.end.code == "disk_error"
                words = r"expert \d of layer \d could not be read from tiny-0000[12].*: Bad file descriptor; "
                assert re.match(words, answer.end.reason), answer.end.reason
                assert said[name][: len(answer.token_ids)] == answer.token_ids
            else:
                assert answer.token_ids == said[name]
        num_apart += isinstance(found["a"].end, RequestFailed) != isinstance(found["b"].end, RequestFailed)
    assert num_apart


def lost_slot(num_tokens: int, layer: int, failures: dict[int, tuple[int, int]]) -> Arrays:
    """A served slot that says which tokens have lost which expert, and why."""
    slot = {"header": np.zeros(8, np.int64), "failures": np.zeros((num_tokens, 2), np.int32)}
    slot["header"][[ExpertHeader.LAYER, ExpertHeader.NUM_TOKENS]] = layer, num_tokens
    slot["header"][ExpertHeader.NUM_LOST] = len(failures)
    for token, failure in failures.items():
        slot["failures"][token] = failure
    return slot


def test_who_has_lost_an_expert() -> None:
    """The first one that a sequence has lost counts, for itself alone; the step ends when nobody is left; the
    next step has nothing of it."""
    counts = ExpertCounts(files_of(("x", "y"), [[0, 0, 0], [0, 1, 0]]), 8)
    counts.begin([3, 5, 6])
    counts.add(lost_slot(6, 0, {1: (errno.EIO, 9)}))
    counts.check()
    counts.add(lost_slot(6, 1, {1: (errno.EBADF, 2), 4: (errno.EBADF, 3)}))
    counts.check()
    told = [str(counts.failure(start, stop)) for start, stop in ((0, 3), (3, 5), (5, 6))]
    assert told[0].startswith("expert 9 of layer 0 could not be read from x: Input/output error; ")
    assert told[1].startswith("expert 3 of layer 1 could not be read from x, y: Bad file descriptor; ")
    assert told[2] == "None"
    counts.add(lost_slot(6, 1, {5: (errno.EIO, 7)}))
    with pytest.raises(DiskError, match=r"^expert 9 of layer 0 could not be read"):
        counts.check()
    counts.begin([6])
    counts.add(lost_slot(6, 0, {}))
    counts.check()
    assert counts.failure(0, 6) is None


@pytest.mark.parametrize("torch_device", [None, torch.device("cpu")], ids=["native", "torch"])
@pytest.mark.parametrize("losing", [("a",), ("b",), ("a", "b")], ids=str)
def test_each_is_told_its_own(
    parts: list[Path], torch_device: torch.device | None, losing: tuple[str, ...]
) -> None:
    """Of two requests in one step: whoever has lost an expert is told which one, the other one goes on. Where
    both have, the layers after it are not computed."""
    seen: list[int] = []
    # In the step that computes a token of one and the prompt of the other.
    lost_tokens = {"a": 0, "b": 2}

    def lose(slot: Arrays) -> None:
        header = slot["header"]
        layer, num_tokens = int(header[ExpertHeader.LAYER]), int(header[ExpertHeader.NUM_TOKENS])
        if num_tokens == 1 + len(PROMPTS["b"]):
            seen.append(layer)
            if layer == 1:
                header[ExpertHeader.NUM_LOST] = len(losing)
                slot["failures"][:num_tokens] = 0
                for name in losing:
                    slot["failures"][lost_tokens[name]] = errno.EIO, lost_tokens[name]

    with running_engine(parts[0], torch_device=torch_device) as running:
        said = {}
        for turn in ("before", "after"):
            # So that both are there when the first step ends.
            running.gate.clear()
            for name, prompt in PROMPTS.items():
                running.ask(f"{name} {turn}", prompt, NUM_NEW)
            running.gate.set()
            for name in PROMPTS:
                answer = running.answer(f"{name} {turn}")
                if turn == "before":
                    said[name] = answer.token_ids
                elif name in losing:
                    assert isinstance(answer.end, RequestFailed)
                    reason = f"expert {lost_tokens[name]} of layer 1 could not be read"
                    assert answer.end.reason.startswith(reason)
                    assert answer.end.timings is not None
                    assert answer.end.timings.expert_wait_s > 0
                else:
                    assert answer.token_ids == said[name]
            running.wait_idle()
            running.on_experts = lose
        assert seen == list(range(2 if len(losing) == 2 else NUM_LAYERS))


def test_reads_that_brought_nothing_count() -> None:
    """As reads; and as a wait, which is divided by reads where none has brought a byte."""
    counts = ExpertCounts(files_of(("x", "y"), [[0, 0, 0]]), 4)
    counts.reads[0, 0], counts.reads[1, 1] = 3, 1
    counts._totals[:] = 2, 8_000_000_000, 0, 2
    clock = Clock(arrived_at=0.0)
    clock.add_expert_reads(counts, 0, 1)
    assert [(reads.file, reads.num_reads, reads.wait_s) for reads in clock.timings(1.0).disk] == [
        ("x", 3, 6.0),
        ("y", 0, 2.0),
    ]
    counts.read_bytes[0, 0] = 100
    clock = Clock(arrived_at=0.0)
    clock.add_expert_reads(counts, 0, 2)
    assert [(reads.file, reads.num_reads, reads.num_bytes) for reads in clock.timings(1.0).disk] == [
        ("x", 3, 100),
        ("y", 1, 0),
    ]


def test_a_wait_is_divided_by_bytes() -> None:
    """Between the files that were read, and in full for each request of the step; none for a file without."""
    counts = ExpertCounts(files_of(("x", "y", "z"), [[0, 0, 0]]), 4)
    counts.read_bytes[0, 0], counts.read_bytes[1, 2] = 300, 100
    counts.reads[0, 0], counts.reads[1, 2] = 3, 1
    counts.disk_routes[:3] = 1
    counts._totals[:] = 4, 8_000_000_000, 5, 0
    clock = Clock(arrived_at=0.0)
    clock.add_experts(counts, 0, 2, 10)
    clock.add_experts(counts, 0, 2, 10)
    timings = clock.timings(1.0)
    assert [(reads.file, reads.num_reads, reads.num_bytes, reads.wait_s) for reads in timings.disk] == [
        ("x", 6, 600, 12.0),
        ("y", 0, 0, 4.0),
    ]
    assert (timings.routes.ram, timings.routes.disk, timings.major_faults) == (36, 4, 10)
    counts.begin([4])
    assert counts.num_read == counts.wait_s == counts.major_faults == counts.read_bytes.sum() == 0


@pytest.mark.parametrize("torch_device", [None, torch.device("cpu")], ids=["native", "torch"])
def test_bytes_from_ram_are_those_of_the_experts_of_each_slot(
    parts: list[Path], torch_device: torch.device | None
) -> None:
    """Each once a layer of a step, however many tokens of however many requests chose it."""
    with GGUFModel(parts[0]) as file:
        layers = BlobLayout(file, NUM_LAYERS).layers
    blob_bytes = [sum(part.num_bytes for part in layer.parts) for layer in layers]
    used: list[int] = []

    def note(slot: Arrays) -> None:
        layer, num_tokens = (int(slot["header"][at]) for at in (ExpertHeader.LAYER, ExpertHeader.NUM_TOKENS))
        used.append(len(np.unique(slot["expert_ids"][:num_tokens])) * blob_bytes[layer])

    with running_engine(parts[0], torch_device=torch_device) as running:
        running.on_experts = note
        timings = finished(running)
    assert sum(ours.expert_bytes.ram for ours in timings.values()) == sum(used) > 0
    assert all(ours.expert_bytes.ram > 0 for ours in timings.values())
    assert all(ours.expert_bytes.device == ours.expert_bytes.transferred == 0 for ours in timings.values())


def test_ways_of_a_step_are_told_to_whom_they_concern(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that share steps, each gets the ways of its own tokens, and together they are all routes;
    waits count in full for each of a step. Here the first choice of a token goes to the device where the id
    is even and is transferred where it is odd."""
    submit = CpuExperts.submit
    chosen: list[NDArray[np.int32]] = []

    def divide(way: CpuExperts, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        ids = expert_ids.numpy().astype(np.int32)
        chosen.append(ids.copy())
        is_odd = ids[:, 0] % 2
        way.counts.add_ways((1 - is_odd).astype(np.int32), is_odd.astype(np.int32), np.zeros_like(is_odd))
        way.counts.add_blobs(Way.DEVICE, layer, np.flatnonzero(is_odd == 0).astype(np.int32))
        way.transfer_waited_s += 0.25
        way.device_waited_s += 0.5
        ids[:, 0] = -1
        return submit(way, layer, x, torch.from_numpy(ids), weights)

    monkeypatch.setattr(CpuExperts, "submit", divide)
    with running_engine(parts[0], places_per_layer=4, torch_device=torch.device("cpu")) as running:
        timings = finished(running)
    for name, ours in timings.items():
        routes = ours.routes
        assert routes.device + routes.transferred == ROUTES[name] // NUM_USED
        assert routes.ram + routes.disk == ROUTES[name] - ROUTES[name] // NUM_USED
        assert routes.skipped == 0
        assert ours.device_wait_s == 2 * ours.transfer_wait_s >= 0.5 * NUM_LAYERS * NUM_NEW
    num_even = sum(int((ids[:, 0] % 2 == 0).sum()) for ids in chosen)
    assert sum(ours.routes.device for ours in timings.values()) == num_even
    assert sum(ours.expert_bytes.device for ours in timings.values()) > 0


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], NDArray[np.int32], NDArray[np.int32]]:
    """Where the sequences of a step end; for each of two layers, token and rank the expert and the way, of
    which 0 to 2 are device, transferred and skipped, and others the cpu_worker's."""
    stops = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
    shape = (2, stops[-1], 3)
    size = int(np.prod(shape))
    experts = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    ways = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    return stops, np.reshape(experts, shape).astype(np.int32), np.reshape(ways, shape).astype(np.int32)


def first_tokens(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """For each expert, in no order, the first token that chose it; negative ids are none."""
    found: dict[int, int] = {}
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if expert >= 0:
                found.setdefault(expert, token)
    return np.array(list(found.values()), np.int32)


@settings(deadline=None)
@given(st.lists(steps(), min_size=1, max_size=4))
def test_parts_add_up_to_all_routes(
    given_steps: list[tuple[list[int], NDArray[np.int32], NDArray[np.int32]]],
) -> None:
    """Whatever the ways of the routes: of each request, over all steps and layers, none is lost and none
    counts twice; and so with the bytes of experts, each on the request of the first token that chose it."""
    counts = ExpertCounts(files_of(("x",), [[0, 0, 0]] * 2), 8)
    for stops, experts, ways in given_steps:
        counts.begin(stops)
        for layer in range(2):
            by_way = [(ways[layer] == way).sum(axis=1).astype(np.int32) for way in range(3)]
            counts.add_ways(*by_way)
            for way in (Way.DEVICE, Way.TRANSFERRED):
                tokens = first_tokens(np.where(ways[layer] == way, experts[layer], -1))
                counts.add_blobs(way, layer, tokens)
            counts.add_handed_over(layer, np.where(ways[layer] > 2, experts[layer], -1).astype(np.int32))
        for start, stop in pairwise((0, *stops)):
            clock = Clock(arrived_at=0.0)
            clock.add_experts(counts, start, stop, 2 * 3)
            timings = clock.timings(1.0)
            ours, routes = ways[:, start:stop], timings.routes
            assert (routes.device, routes.transferred, routes.skipped, routes.ram, routes.disk) == (
                *((ours == way).sum() for way in range(3)),
                (ours > 2).sum(),
                0,
            )
            assert sum((routes.device, routes.transferred, routes.skipped, routes.ram)) == ours.size
            for way, taken in ((Way.DEVICE, ways == 0), (Way.TRANSFERRED, ways == 1), (Way.RAM, ways > 2)):
                num_bytes = 0
                for layer in range(2):
                    tokens = first_tokens(np.where(taken[layer], experts[layer], -1))
                    num_bytes += (1000 + layer) * int(((tokens >= start) & (tokens < stop)).sum())
                assert clock.expert_bytes[way] == num_bytes


def test_a_step_begins_without_what_was_before() -> None:
    """Also where it is shorter than the one before, and the next one as long again."""
    counts = ExpertCounts(files_of(("x",), [[0, 0, 0]]), 4)
    one = np.ones(4, np.int32)
    for stops in ([2, 4], [1], [4]):
        counts.begin(stops)
        assert not counts.device_routes.any()
        assert not counts.transferred_routes.any()
        assert not counts.skipped_routes.any()
        assert not counts.expert_bytes.any()
        ones = one[: stops[-1]]
        counts.add_ways(ones, ones, ones)
        counts.add_blobs(Way.DEVICE, 0, np.zeros(3, np.int32))
        counts.add_handed_over(0, np.array([[1, 2]] * stops[-1], np.int32))
        assert counts.expert_bytes[:, 0].tolist() == [3000, 0, 2000]


def test_what_cannot_be_counted_is_refused() -> None:
    """And leaves the counts as they were."""
    counts = ExpertCounts(files_of(("x",), [[0, 0, 0]] * 2), 4)
    two, five = np.ones(2, np.int32), np.ones(5, np.int32)
    for ways in ((two, five, two), (two, two, two[:1]), (five, five, five)):
        with pytest.raises(ValueError, match=r"^routes of .* of at most 4"):
            counts.add_ways(*ways)
    for layer, tokens in ((2, [0]), (-1, [0]), (0, [0, 4]), (0, [0, -1])):
        with pytest.raises(ValueError, match=rf"^experts of layer {layer} of 2, for tokens"):
            counts.add_blobs(Way.TRANSFERRED, layer, np.array(tokens, np.int32))
    for layer, num_tokens in ((2, 1), (-1, 1), (0, 5)):
        with pytest.raises(ValueError, match=rf"^{num_tokens} tokens in layer {layer}, of 4 tokens at most"):
            counts.add_handed_over(layer, np.zeros((num_tokens, 2), np.int32))
    assert not counts.device_routes.any()
    assert not counts.expert_bytes.any()
    # Routes that are nobody's, and experts that there are none of: the cpu_worker says what is wrong.
    counts.add_handed_over(0, np.array([[-1, -2], [10, 1 << 30]], np.int32))
    assert not counts.expert_bytes.any()


def test_a_transferred_expert_that_was_read() -> None:
    """Its reads and waits are the request's, by file, while its routes are no routes to the disk."""
    counts = ExpertCounts(files_of(("x", "y"), [[0, 0, 0], [0, 1, 0]]), 4)
    counts.begin([2, 3])
    counts.add_ways(np.zeros(3, np.int32), np.array([0, 2, 1], np.int32), np.zeros(3, np.int32))
    counts.add_blobs(Way.TRANSFERRED, 1, np.array([1, 1], np.int32))
    counts.add_reads(1, 1, (1, 2, 1), (100, 200, 100), wait_s=0.5)
    clocks = [Clock(arrived_at=0.0), Clock(arrived_at=0.0)]
    for clock, start, stop in zip(clocks, (0, 2), (2, 3), strict=True):
        clock.add_experts(counts, start, stop, 4)
    timings = [clock.timings(1.0) for clock in clocks]
    assert [(reads.file, reads.num_reads, reads.num_bytes, reads.wait_s) for reads in timings[0].disk] == [
        ("x", 2, 200, 0.25),
        ("y", 2, 200, 0.25),
    ]
    assert sum(reads.num_reads for reads in timings[1].disk) == 0
    assert [(ours.routes.ram, ours.routes.disk, ours.routes.transferred) for ours in timings] == [
        (6, 0, 2),
        (3, 0, 1),
    ]
    assert [ours.expert_bytes.transferred for ours in timings] == [2002, 0]
    counts.begin([4])
    assert counts.num_read == counts.reads.sum() == counts.read_bytes.sum() == 0


def test_a_transferred_expert_that_could_not_be_read() -> None:
    """Costs the tokens that chose it, as one of the cpu_worker's does; the first loss of a token is told."""
    counts = ExpertCounts(files_of(("x", "y"), [[0, 0, 0], [0, 1, 0]]), 8)
    counts.begin([3, 5, 6])
    counts.note_lost(0, [1, 4], 9, errno.EIO)
    counts.add(lost_slot(6, 1, {1: (errno.EBADF, 2)}))
    counts.note_lost(1, [4, 4], 3, errno.EBADF)
    assert counts.num_lost == 5
    counts.check()
    told = [str(counts.failure(start, stop)) for start, stop in pairwise((0, 3, 5, 6))]
    assert told[0] == told[1]
    assert told[0].startswith("expert 9 of layer 0 could not be read from x: Input/output error; ")
    assert told[2] == "None"
    counts.note_lost(1, [5], 7, errno.EBADF)
    with pytest.raises(DiskError, match=r"^expert 9 of layer 0 could not be read"):
        counts.check()
    counts.begin([6])
    counts.check()
    assert counts.failure(0, 6) is None
