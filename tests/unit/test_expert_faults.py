"""The experts' three ways under failure: blobs that cannot be read, workers that are lost, clients that
leave.

A model of a megabyte, the engine's own thread, real rings and the real stager, whose reads a test spoils or
holds up. Whatever happens, other requests say what they say without experts on the device, and at rest
nothing is missing: every slot has its expert, every landing buffer and staging place is free, nothing is
lent.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.in_process import InProcessModel
from gpu_worker.device import cpu_memory
from gpu_worker.device.memory import stalled
from gpu_worker.experts import slot_loads
from gpu_worker.experts.placement import LANDING_BUFFERS, ExpertPlacement
from gpu_worker.experts.slot_memory import Segment
from gpu_worker.experts.transfers import Transfers
from shared.config import GpuWorkerConfig
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.messages import AbortRequest, RequestFailed, RequestFinished, RequestTimings
from shared.model_config import read_model_config
from shared.native.records import Record
from shared.placement.profile import model_identity
from shared.placement.swaps import Swap
from shared.placement.table import NO_SLOT, ResidencyTable, SlotState
from shared.placement.trace import TraceHeader, TraceReader, TraceWriter
from shared.run_directory import Role
from shared.work_slots import STAGING_PLACES
from tests.support.running_engine import TIMEOUT_S, Answer, RunningEngine, running_engine
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

pytestmark = pytest.mark.timeout(60, method="thread")

ALL = NUM_LAYERS * NUM_EXPERTS
NUM_USED = 2
STREAM_MIN = 8
# Settings that the engine has of its own here.
ENGINES = {"parallel", "prefill", "watchdog_s"}
LONG = [int(token_id) for token_id in np.random.default_rng(0).integers(0, 256, 100)]
SHORT = LONG[:5]
Alone = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model().write(tmp_path_factory.mktemp("faults") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(path: Path) -> Alone:
    """What the model says greedily, without an engine."""
    return InProcessModel(path).greedy


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed is tried again soon."""
    monkeypatch.setattr(slot_loads, "RETRY_S", 0.05)


@contextmanager
def running_with(path: Path, num_slots: int, **changes: Any) -> Iterator[RunningEngine]:
    """An engine with so many slots. Of `changes`, those that are settings of the gpu_worker are for it. At
    the end nothing may be missing."""
    names = {field.name for field in fields(GpuWorkerConfig)}
    asked = {"device": "cpu", "expert_cache": f"{num_slots}", "expert_profile": Path("/proc/nowhere")}
    asked |= {name: changes.pop(name) for name in list(changes) if name in names.difference(ENGINES)}
    settings = GpuWorkerConfig(**asked)  # type: ignore[arg-type]
    with running_engine(path, settings=settings, **{"prefill": 32} | changes) as running:
        yield running
        assert_nothing_missing(running)


def placement_of(running: RunningEngine) -> ExpertPlacement:
    assert running.placement is not None
    return running.placement


def transfers_of(running: RunningEngine) -> Transfers:
    transfers = running.workers._transfers
    assert transfers is not None
    return transfers


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_loaded(running: RunningEngine) -> None:
    table = placement_of(running).cache.table
    wait_until(lambda: table.num_resident == table.num_slots)


def assert_nothing_missing(running: RunningEngine) -> None:
    """At rest: all slots have experts, with the bytes of the file; nothing is lent, under way, or taken."""
    running.wait_idle()
    placement, transfers = placement_of(running), transfers_of(running)
    cache, staging = placement.cache, running.workers._staging
    wait_until(lambda: cache.table.num_resident == cache.table.num_slots and not cache.is_busy)
    assert staging is not None
    assert staging.num_free == STAGING_PLACES
    assert transfers.num_wanted == 0
    assert len(transfers._buffers.free) == LANDING_BUFFERS
    assert not transfers._buffers.taken
    assert not transfers._held
    assert not transfers.has_extra
    assert cache.lent_bytes == cache.num_kept == 0
    assert not any(cache.claims.values())
    landing_bytes = LANDING_BUFFERS * transfers.buffer_bytes
    assert placement.memory.free_bytes() + cache.num_bytes + landing_bytes == budget_of(placement)
    for slot, layer in enumerate(cache.layers):
        assert cache.table.state(slot) is SlotState.RESIDENT
        content = cache.buffer(slot).numpy()
        assert content_of(running, layer, int(cache.table.expert_of[slot])) == [
            content[at : at + part.num_bytes].tobytes()
            for at, part in zip(
                placement.experts.part_offsets(layer), running.layout.layers[layer].parts, strict=True
            )
        ]


def budget_of(placement: ExpertPlacement) -> int:
    """What of memory it was given."""
    budget: int = placement.memory._allowance.budget_bytes  # type: ignore[attr-defined]
    return budget


def content_of(running: RunningEngine, layer: int, expert: int) -> list[bytes]:
    """The rows of an expert, as the file has them."""
    found = []
    for part in running.layout.layers[layer].parts:
        with Path(part.file.path).open("rb") as file:
            file.seek(part.start(expert))
            found.append(file.read(part.num_bytes))
    return found


def check(answer: Answer, expected: list[int], num_prompt_tokens: int) -> RequestTimings:
    """It has ended well, with these tokens, and its routes are accounted for."""
    assert isinstance(answer.end, RequestFinished), answer.end
    assert answer.token_ids == expected
    check_routes(answer.end.timings, num_prompt_tokens + len(expected) - 1)
    return answer.end.timings


def check_routes(timings: RequestTimings, num_tokens: int) -> None:
    routes = timings.routes
    total = routes.device + routes.ram + routes.transferred + routes.disk + routes.skipped
    assert total == num_tokens * NUM_LAYERS * NUM_USED


def failure(answer: Answer) -> RequestFailed:
    assert isinstance(answer.end, RequestFailed), answer.end
    return answer.end


class BadDisk:
    """The reads of one expert of one layer fail, as long as it `is_bad`."""

    def __init__(self, running: RunningEngine, layer: int, expert: int) -> None:
        self.is_bad = True
        self.num_spoilt = 0
        parts = running.layout.layers[layer].parts
        self._spans = [(part.start(expert), part.start(expert) + part.num_bytes) for part in parts]

    def __call__(self, reads: Record) -> None:
        for start, stop in self._spans:
            is_its = (reads["offset"] == start // 4096 * 4096) & (reads["offset"] + reads["needed"] == stop)
            if self.is_bad:
                reads["file"][is_its] = 9999
                self.num_spoilt += int(is_its.sum())


class Held:
    """Holds up reads of blobs until it is let go, and says when it does."""

    def __init__(self, running: RunningEngine) -> None:
        self.has_begun = threading.Event()
        self._goes_on = threading.Event()
        running.on_staging = self

    def __call__(self, reads: Record) -> None:
        self.has_begun.set()
        assert self._goes_on.wait(TIMEOUT_S)

    def wait(self) -> None:
        assert self.has_begun.wait(TIMEOUT_S)

    def let_go(self, after_s: float = 0.0) -> None:
        threading.Timer(after_s, self._goes_on.set).start()


@dataclass(frozen=True, slots=True)
class Spared:
    """An answer of some tokens to a prompt of one, and an expert of a layer that it does not need, though
    the long prompt does."""

    prompt: list[int]
    tokens: list[int]
    layer: int
    expert: int


@pytest.fixture(scope="module")
def spared(path: Path, alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Spared:
    """Found by the routes of what both need."""
    trace = tmp_path_factory.mktemp("routes") / "trace"
    with GGUFModel(path) as file:
        header = TraceHeader.of(model_identity(file, read_model_config(file)), NUM_USED)
    with TraceWriter(trace, header) as writer, running_engine(path, prefill=32, recorder=writer) as running:
        for name, prompt, num_new in (("short", LONG[:1], 8), ("long", LONG[:32], 1)):
            running.ask(name, prompt, num_new)
            running.answer(name)
        running.wait_idle()
    with TraceReader(trace) as reader:
        *steps, long = (step.expert_ids for step in reader)
    assert len(steps) == 8
    for layer in range(NUM_LAYERS):
        own = {expert for step in steps for expert in step[layer].ravel().tolist()}
        # The first expert of each layer is on the device.
        if rest := set(long[layer].ravel().tolist()) - own - {0}:
            return Spared(LONG[:1], alone(LONG[:1], 8), layer, min(rest))
    raise AssertionError("there is no such expert")


# Blobs that cannot be read.


@pytest.mark.parametrize("stream_min", [STREAM_MIN, 1024], ids=["streamed", "transferred"])
def test_a_blob_that_cannot_be_read(
    path: Path, alone: Alone, spared: Spared, caplog: pytest.LogCaptureFixture, stream_min: int
) -> None:
    """Fails the request whose tokens need it, by name; the one that is decoded in the same step goes on, and
    the next try does."""
    chosen = {"pcie_frac": 1.0, "expert_policy": "static", "prefill_stream_min": stream_min}
    with running_with(path, NUM_LAYERS, stages_from_disk=True, **chosen) as running:
        wait_until_loaded(running)
        disk = BadDisk(running, spared.layer, spared.expert)
        held = Held(running)
        running.ask("spared", spared.prompt, 8)
        running.ask("needing", LONG, 8)
        held.wait()
        running.on_staging = disk
        held.let_go()
        failed = failure(running.answer("needing"))
        assert failed.code == "disk_error"
        assert failed.reason == (
            f"expert {spared.expert} of layer {spared.layer} could not be read from tiny.gguf: Bad file "
            "descriptor; check the disk (dmesg)"
        )
        assert failed.timings is not None
        # A step that was computed is in the account, though one of its requests has failed.
        check_routes(failed.timings, 32)
        assert failed.timings.disk[0].num_reads >= 3
        timings = check(running.answer("spared"), spared.tokens, 1)
        assert timings.routes.transferred > 0
        assert disk.num_spoilt == 3
        disk.is_bad = False
        running.ask("again", LONG, 4)
        check(running.answer("again"), alone(LONG, 4), len(LONG))


def test_slots_that_cannot_be_filled(path: Path, alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    """Their experts are computed another way, and tried again while there is something to compute."""
    with running_with(path, ALL, stages_from_disk=True, pcie_frac=0.0, expert_policy="static") as running:
        table = placement_of(running).cache.table
        wait_until_loaded(running)
        disk = BadDisk(running, 2, 3)
        running.on_staging = disk
        running.lose(Role.STAGER)
        # As after a loss: all of it is read once more.
        for slot in range(ALL):
            table.evict(slot)
        placement_of(running).cache._loads.fill(range(ALL))
        running.attach(Role.STAGER)
        wait_until(lambda: placement_of(running).cache.counts.num_failures)
        wait_until(lambda: table.num_resident == ALL - 1)
        message = "expert 3 of layer 2 could not be read from tiny.gguf: Bad file descriptor"
        assert message in caplog.text
        running.ask("a", LONG, 20)
        timings = check(running.answer("a"), alone(LONG, 20), len(LONG))
        assert timings.routes.ram > 0
        wait_until(lambda: _is_asked_again(running, disk))
        assert table.num_resident == ALL - 1
        disk.is_bad = False
        time.sleep(slot_loads.RETRY_S)
        running.ask("b", SHORT, 8)
        check(running.answer("b"), alone(SHORT, 8), len(SHORT))
        wait_until_loaded(running)


def _is_asked_again(running: RunningEngine, disk: BadDisk) -> bool:
    running.ask(f"{disk.num_spoilt}-{time.monotonic()}", SHORT, 2)
    running.wait_idle()
    return disk.num_spoilt > 3


class Insisting:
    """A policy that wants one expert in the first slot of its layer after every window."""

    def __init__(self, layer: int, expert: int) -> None:
        self._layer = layer
        self._expert = expert

    def after_window(self, table: ResidencyTable) -> list[Swap]:
        slot = int(table.slots_of_layer(self._layer)[0])
        if table.slot_of[self._layer, self._expert] != NO_SLOT:
            return []
        return [Swap(self._layer, slot, int(table.expert_of[slot]), self._expert, 1.0)]


def test_an_exchange_that_cannot_be_read(path: Path, alone: Alone) -> None:
    """Who is in the slot stays there, and comes back there when the slot was lent; until the disk has it."""
    with running_with(
        path, NUM_LAYERS, stages_from_disk=True, pcie_frac=0.0, prefill_stream_min=STREAM_MIN
    ) as running:
        wait_until_loaded(running)
        placement = placement_of(running)
        placement.policy = Insisting(1, 5)
        running.on_staging = disk = BadDisk(running, 1, 5)
        running.ask("a", SHORT, 24)
        timings = check(running.answer("a"), alone(SHORT, 24), len(SHORT))
        assert timings.routes.device > 0
        running.wait_idle()
        wait_until(lambda: not placement.cache.is_busy)
        assert placement.cache.counts.num_failures > 1
        assert placement.cache.counts.num_swaps == 0
        assert placement.cache.table.expert_of.tolist() == [0] * NUM_LAYERS
        assert placement.cache._loads.owners == [0] * NUM_LAYERS
        disk.is_bad = False
        running.ask("b", SHORT, 24)
        check(running.answer("b"), alone(SHORT, 24), len(SHORT))
        running.wait_idle()
        wait_until(lambda: not placement.cache.is_busy)
        assert placement.cache.counts.num_swaps == 1


def test_reads_of_a_step_that_nobody_survives(path: Path) -> None:
    """Are all booked, those that the cpu_worker has made for the same layer too."""
    num_staged = 0

    def spoil(reads: Record) -> None:
        nonlocal num_staged
        num_staged += len(reads)
        reads["file"] = 9999

    chosen = {"pcie_frac": 0.5, "expert_policy": "static"}
    with running_with(path, 1, stages_from_disk=True, places_per_layer=4, **chosen) as running:
        wait_until_loaded(running)
        assert running.pooled is not None
        running.on_staging = spoil
        running.ask("a", LONG[:1], 4)
        failed = failure(running.answer("a"))
        assert failed.code == "disk_error"
        assert failed.timings is not None
        assert running.pooled.reader.num_reads > 0
        (of_file,) = failed.timings.disk
        assert of_file.num_reads == num_staged + running.pooled.reader.num_reads
        running.on_staging = lambda reads: None


def test_memory_that_is_waited_for_in_vain(path: Path, alone: Alone, spared: Spared) -> None:
    """Before a step has begun, nothing is known of it: what the step before has read, or could not read, is
    not its business."""

    def stall(num_bytes: int) -> None:
        running.workers.claim_context = claim  # type: ignore[method-assign]
        raise stalled(0.1)

    chosen = {"pcie_frac": 1.0, "expert_policy": "static"}
    with running_with(path, NUM_LAYERS, stages_from_disk=True, **chosen) as running:
        wait_until_loaded(running)
        running.on_staging = BadDisk(running, spared.layer, spared.expert)
        running.ask("a", LONG[:32], 4)
        assert failure(running.answer("a")).code == "disk_error"
        running.wait_idle()
        claim = running.workers.claim_context
        running.workers.claim_context = stall  # type: ignore[method-assign]
        running.ask("b", LONG[:32], 4)
        failed = failure(running.answer("b"))
        assert failed.code == "step_stalled"
        assert failed.timings is not None
        assert failed.timings.disk == []
        running.on_staging = lambda reads: None
        running.ask("c", SHORT, 4)
        check(running.answer("c"), alone(SHORT, 4), len(SHORT))


# Workers that are lost.


def test_stager_lost_in_the_first_fill(path: Path, alone: Alone) -> None:
    """Its successor goes on with it."""
    with running_with(path, ALL, stages_from_disk=True) as running:
        running.lose(Role.STAGER)
        held = Held(running)
        running.attach(Role.STAGER)
        held.wait()
        held.let_go(after_s=0.05)
        running.lose(Role.STAGER)
        running.on_staging = lambda reads: None
        running.attach(Role.STAGER)
        running.ask("a", SHORT, 8)
        check(running.answer("a"), alone(SHORT, 8), len(SHORT))


def test_stager_that_stops_in_the_first_fill(path: Path) -> None:
    """Blobs that it gives up, since it was told to, are its successor's: none is taken for unreadable."""
    with running_with(path, ALL, stages_from_disk=True, expert_policy="static") as running:
        running.lose(Role.STAGER)
        stop: list[Callable[[], None]] = []
        running.on_staging = lambda reads: stop[0]() if stop else time.sleep(0.001)
        running.attach(Role.STAGER)
        stop.append(running._workers[Role.STAGER][-1].server.stop)
        cache = placement_of(running).cache
        wait_until(lambda: running._workers[Role.STAGER][-1].server.is_stopped)
        time.sleep(0.05)
        running.lose(Role.STAGER)
        running.on_staging = lambda reads: None
        running.attach(Role.STAGER)
        wait_until_loaded(running)
        assert cache.counts.num_failures == 0


@pytest.mark.parametrize(
    ("prompt", "num_slots", "borrows"),
    [
        pytest.param(SHORT, NUM_LAYERS, True, id="transfer"),
        pytest.param(LONG, NUM_LAYERS, False, id="stream"),
        pytest.param(LONG, ALL // 2, True, id="stream, slots are lent"),
    ],
)
@pytest.mark.parametrize("role", [Role.STAGER, Role.CPU_WORKER])
def test_worker_lost_in_a_step(
    path: Path, alone: Alone, role: Role, prompt: list[int], num_slots: int, borrows: bool
) -> None:
    """While blobs are under way: every request fails with it, and the next ones go on as if nothing had
    been."""
    chosen = {"pcie_frac": 1.0, "prefill_stream_min": STREAM_MIN, "prefill_borrow": borrows}
    with running_with(path, num_slots, stages_from_disk=True, **chosen) as running:
        wait_until_loaded(running)
        held = Held(running)
        running.ask("running", prompt, 100)
        running.ask("waiting", prompt, 100)
        held.wait()
        assert (placement_of(running).cache.table.num_lent > 0) == (borrows and prompt is LONG)
        held.let_go(after_s=0.05)
        running.lose(role)
        for name in ("running", "waiting"):
            failed = failure(running.answer(name))
            assert failed.code == "worker_failed"
            # Whichever is noticed first: that it is lost, or that it stops.
            assert f"the {role} is" in failed.reason
        running.on_staging = lambda reads: None
        running.attach(role)
        for number, (again, num_new) in enumerate([(SHORT, 8), (LONG, 4)]):
            running.ask(f"{number}", again, num_new)
            check(running.answer(f"{number}"), alone(again, num_new), len(again))


def test_work_space_of_a_prompt_whose_cpu_worker_is_lost(path: Path, alone: Alone) -> None:
    """Is given back before the next token is decoded, though whoever took it is gone."""
    with running_with(path, ALL // 2, prefill_stream_min=STREAM_MIN, pcie_frac=0.5) as running:
        wait_until_loaded(running)
        # As if there were more to do all the time.
        running.workers.rest = lambda: None  # type: ignore[method-assign]
        running.ask("a", LONG, 1)
        check(running.answer("a"), alone(LONG, 1), len(LONG))
        running.wait_idle()
        lent = placement_of(running).cache.lent_bytes
        running.ask("b", LONG[:32], 1)
        running.answer("b")
        running.wait_idle()
        running.lose(Role.CPU_WORKER)
        running.attach(Role.CPU_WORKER)
        running.ask("c", SHORT, 2)
        check(running.answer("c"), alone(SHORT, 2), len(SHORT))
        assert lent == 0
        assert placement_of(running).cache.lent_bytes == 0


def test_stager_lost_while_copies_are_under_way(
    path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is let go once they have ended; none of them is waited for in vain."""
    has_begun, goes_on, num_copies = threading.Event(), threading.Event(), 0

    def copy(target: int, source: int, num_bytes: int) -> None:
        nonlocal num_copies
        num_copies += 1
        has_begun.set()
        assert goes_on.wait(TIMEOUT_S)
        ctypes.memmove(target, source, num_bytes)

    with running_with(path, NUM_LAYERS, pcie_frac=1.0, expert_policy="static") as running:
        wait_until_loaded(running)
        monkeypatch.setattr(cpu_memory, "ctypes", SimpleNamespace(memmove=copy))
        running.ask("a", SHORT, 100)
        assert has_begun.wait(TIMEOUT_S)
        threading.Timer(0.1, goes_on.set).start()
        running.lose(Role.STAGER)
        assert "the stager is" in failure(running.answer("a")).reason
        assert goes_on.is_set()
        running.attach(Role.STAGER)
        running.ask("b", SHORT, 8)
        check(running.answer("b"), alone(SHORT, 8), len(SHORT))
        assert num_copies > 3


def test_a_stager_that_does_not_answer(path: Path, alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    """The watchdog ends the step, and says who it was; when the stager goes on, so does everything."""
    with running_with(path, NUM_LAYERS, stages_from_disk=True, pcie_frac=1.0, watchdog_s=0.2) as running:
        wait_until_loaded(running)
        held = Held(running)
        for name in "ab":
            # The second one finds places that are still under way.
            running.ask(name, SHORT, 4)
            failed = failure(running.answer(name))
            assert failed.code == "step_stalled"
            assert "the stager has not answered for 0.2 s" in failed.reason
            assert "--watchdog-s" in failed.reason
        assert "meanwhile the stager, for experts, works on" in caplog.text
        held.let_go()
        running.ask("c", SHORT, 4)
        check(running.answer("c"), alone(SHORT, 4), len(SHORT))


# Clients that leave, and many at a time.


def test_an_abort_in_the_middle_of_a_streamed_prompt(path: Path, alone: Alone) -> None:
    """What was lent to it is filled again while there is nothing else to do."""
    with running_with(
        path, ALL // 2, stages_from_disk=True, prefill_stream_min=STREAM_MIN, pcie_frac=0.5
    ) as running:
        wait_until_loaded(running)
        held = Held(running)
        running.ask("a", LONG, 100)
        held.wait()
        assert placement_of(running).cache.lent_bytes > 0
        running.engine.submit(AbortRequest(request_id="a"))
        held.let_go()
        answer = running.answer("a")
        assert isinstance(answer.end, RequestFinished)
        assert (answer.end.finish_reason, answer.token_ids) == ("abort", [])
        check_routes(answer.end.timings, 32)
        wait_until_loaded(running)
        assert placement_of(running).cache.lent_bytes == 0
        running.ask("b", SHORT, 8)
        check(running.answer("b"), alone(SHORT, 8), len(SHORT))


def test_many_at_once(path: Path, alone: Alone) -> None:
    """Prompts that are streamed and others, one after the other and while others decode."""
    lengths = {"a": (70, 20), "b": (9, 30), "c": (33, 10), "d": (5, 30), "e": (64, 1), "f": (64, 1)}
    with running_with(
        path, ALL // 2, prefill_stream_min=STREAM_MIN, pcie_frac=0.5, adapt_every=1, parallel=4
    ) as running:
        for name, (length, num_new) in lengths.items():
            running.ask(name, LONG[:length], num_new)
        for name, (length, num_new) in lengths.items():
            timings = check(running.answer(name), alone(LONG[:length], num_new), length)
            assert timings.routes.transferred > 0


def test_memory_that_comes_back_late(path: Path, alone: Alone) -> None:
    """Slots whose memory cannot be had when they are given back get it later."""
    with running_with(path, ALL // 2, prefill_stream_min=STREAM_MIN, kv_grow=True) as running:
        wait_until_loaded(running)
        placement = placement_of(running)
        allocate, num_refused = placement.memory.allocate, 0

        def refuse(num_bytes: int) -> Tensor:
            nonlocal num_refused
            if placement.cache.table.num_lent and num_refused < 3:
                num_refused += 1
                raise ResourceError("no memory")
            return allocate(num_bytes)

        placement.memory.allocate = refuse  # type: ignore[method-assign]
        running.ask("a", LONG, 80)
        check(running.answer("a"), alone(LONG, 80), len(LONG))
        wait_until(lambda: placement.cache.lent_bytes == 0)
        assert num_refused == 3


@pytest.mark.parametrize("policy", ["adaptive", "lru"])
def test_prompts_one_after_the_other(path: Path, alone: Alone, policy: str) -> None:
    """Slots are lent, given back and filled from RAM, and experts exchanged, all of it under way when the
    next prompt comes."""
    rng = np.random.default_rng(0)
    with running_with(
        path,
        ALL // 2,
        places_per_layer=4,
        prefill_stream_min=STREAM_MIN,
        pcie_frac=0.5,
        expert_policy=policy,
        adapt_every=1,
    ) as running:
        wait_until_loaded(running)
        placement_of(running).cache.keeps_lent = True
        for number in range(25):
            prompt = rng.integers(0, 256, int(rng.integers(9, 70))).tolist()
            num_new = int(rng.integers(1, 8))
            running.ask(f"{number}", prompt, num_new)
            check(running.answer(f"{number}"), alone(prompt, num_new), len(prompt))


def test_memory_that_cannot_be_lent(path: Path, alone: Alone) -> None:
    """A claim that fails is no claim: the next request makes it again."""
    with running_with(path, ALL, kv_grow=True, pcie_frac=0.0) as running:
        wait_until_loaded(running)
        placement = placement_of(running)
        cache, share = placement.cache, placement.cache.num_bytes // 4
        running.model.pages.bytes_with = lambda num_more: share  # type: ignore[method-assign]
        placement.rules = replace(placement.rules, set_aside_bytes=0)
        keep, cache.keeps_lent = cache._keep, True

        def fail(segment: Segment) -> None:
            raise MemoryError("no room in RAM")

        cache._keep = fail  # type: ignore[method-assign]
        running.ask("a", LONG, 4)
        end = running.answer("a").end
        assert isinstance(end, RequestFailed)
        assert "out of memory" in end.reason
        assert not any(cache.claims.values())
        cache._keep = keep  # type: ignore[method-assign]
        running.ask("b", LONG, 4)
        check(running.answer("b"), alone(LONG, 4), len(LONG))
        assert cache.claims["keys and values"] == share
        assert cache.lent_bytes >= share


# Routes that are left out, and written down.


def test_routes_that_are_left_out(path: Path) -> None:
    """Are counted, and change what is computed from then on; none is left out while a prompt is read, nor
    where the device has nearly all experts."""
    expected, _ = _answered(path, NUM_LAYERS, 0)
    for num_slots, is_off in ((NUM_LAYERS, False), (ALL, True)):
        logits, timings = _answered(path, num_slots, 1)
        assert (timings.routes.skipped == 0) == is_off
        differs = [np.abs(ours - theirs).max() > 1e-4 for ours, theirs in zip(logits, expected, strict=True)]
        assert not differs[0]
        assert any(differs) == (not is_off)


def _answered(path: Path, num_slots: int, skip_rank: int) -> tuple[list[NDArray[np.float32]], RequestTimings]:
    """The logits of an answer to the long prompt."""
    logits: list[NDArray[np.float32]] = []
    with running_with(path, num_slots, route_tail_skip=skip_rank, expert_policy="static") as running:
        wait_until_loaded(running)
        compute = running.model.logits

        def keep(streams: Tensor) -> Tensor:
            logits.append(compute(streams).numpy().copy())
            return compute(streams)

        running.model.logits = keep  # type: ignore[method-assign]
        running.ask("a", LONG, 6)
        answer = running.answer("a")
        assert isinstance(answer.end, RequestFinished)
        check_routes(answer.end.timings, len(LONG) + 5)
        running.wait_idle()
        assert running.engine.gauges()["tail_skip_active"] == (skip_rank > 0 and num_slots < ALL)
    return logits, answer.end.timings


def test_a_full_disk_ends_the_recording_of_routes(
    path: Path, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else, for good: also not when a worker has been replaced since."""
    with GGUFModel(path) as file:
        header = TraceHeader.of(model_identity(file, read_model_config(file)), NUM_USED)
    with (
        TraceWriter(tmp_path / "trace", header) as writer,
        running_with(path, NUM_LAYERS, recorder=writer) as running,
    ):
        running.ask("a", SHORT, 2)
        running.answer("a")
        running.wait_idle()
        writer._file.close()
        writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        for name in "bc":
            running.ask(name, SHORT, 3)
            check(running.answer(name), alone(SHORT, 3), len(SHORT))
            running.lose(Role.CPU_WORKER)
            running.attach(Role.CPU_WORKER)
    assert caplog.text.count("routes are not recorded any more") == 1
    assert f"in {tmp_path / 'trace'}: No space left on device" in caplog.text
    with TraceReader(tmp_path / "trace") as reader:
        assert len(list(reader)) == 2
