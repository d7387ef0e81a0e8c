"""Which way routes went and what was read for whom, from the slots of the cpu_worker to the end of a
request."""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.experts.counts import ExpertCounts, ExpertFiles
from gpu_worker.sequence import Clock
from shared.errors import DiskError
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
        assert ours.routes.device == ours.routes.skipped == 0
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
    counts = ExpertCounts(ExpertFiles(("x", "y"), np.array([[0, 0, 0], [0, 1, 0]])), 8)
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
    counts = ExpertCounts(ExpertFiles(("x", "y"), np.zeros((1, 3), np.int64)), 4)
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
    files = ExpertFiles(("x", "y", "z"), np.zeros((1, 3), np.int64))
    counts = ExpertCounts(files, 4)
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
