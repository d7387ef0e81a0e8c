"""Experts that the stager brings to staging places: the file's bytes, wherever they come from, and the truth
about what cannot be had."""

import errno
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_worker.experts.staging import Staging
from shared.errors import StepStalledError, WorkerFailedError
from shared.expert_blobs import BlobLayout, ExpertMode, expert_tensor
from shared.gguf.model import GGUFModel
from shared.native.records import Record
from shared.ring import RingServer
from shared.work_slots import PARTS, BlobHeader, blob_ring
from stager.blob_sources import BlobSources, PoolContents
from stager.expert_blobs import BlobService
from stager.read_queue import Faults, ReadQueue
from tests.support.expert_pool import Pooled, pooled
from tests.support.expert_ring import open_ring
from tests.support.staging import staged
from tests.support.tiny_model import NUM_LAYERS, TinyModel, tiny_model

pytestmark = pytest.mark.timeout(60, method="thread")

NUM_EXPERTS = 16


def model_with_experts() -> TinyModel:
    """The tiny model with more experts than the usual eight, those of its second layer twice as wide."""
    model = tiny_model()
    model.set("expert_count", NUM_EXPERTS)
    for name, tensor in model.tensors.items():
        if "_exps" in name or name.endswith("ffn_gate_inp.weight"):
            tensor.shape = (NUM_EXPERTS, *tensor.shape[1:])
        if name.startswith("blk.1.") and "_exps" in name:
            _, rows, columns = tensor.shape
            tensor.shape = (
                (NUM_EXPERTS, rows, 2 * columns) if "down" in name else (NUM_EXPERTS, 2 * rows, columns)
            )
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFModel]:
    path = model_with_experts().write(tmp_path_factory.mktemp("staging") / "tiny.gguf")
    with GGUFModel(path) as opened:
        yield opened


def expected(file: GGUFModel, layer: int, expert: int) -> list[bytes]:
    """The rows of an expert, as the file has them."""
    return [file.rows(expert_tensor(layer, part))[expert].tobytes() for part in PARTS]


def bytes_of(staging: Staging, place: int, layer: int, expert: int) -> list[bytes]:
    return [rows.tobytes() for rows in staging.parts(place, layer, expert)]


def bring(staging: Staging, layer: int, experts: list[int]) -> list[int]:
    places = staging.request(layer, experts)
    staging.wait(places)
    return places


def ask_pool(ours: Pooled, layer: int, experts: list[int], places: list[int]) -> int:
    """As the cpu_worker does; returns the ticket."""
    slot, per_layer = ours.ring.next_slot(60, "stager"), ours.pool.places_per_layer
    slot["header"][BlobHeader.LAYER], slot["header"][BlobHeader.COUNT] = layer, len(experts)
    slot["experts"][: len(experts)], slot["places"][: len(places)] = experts, places
    ours.ring.common["states"][layer * per_layer + np.array(places)] = 0
    return ours.ring.submit()


@pytest.mark.parametrize("mode", [ExpertMode.MAPPED, ExpertMode.RESIDENT, ExpertMode.POOL, None])
def test_the_bytes_of_the_file(file: GGUFModel, mode: ExpertMode | None) -> None:
    """Of experts of all layers, in places that are used again; read from the disk only where they are not
    kept in memory, and then counted."""
    with staged(file, BlobSources(mode), 5) as ours:
        staging = ours.staging
        for number in range(20):
            layer = number % NUM_LAYERS
            experts = random.Random(number).sample(range(NUM_EXPERTS), 1 + number % 5)
            places = bring(staging, layer, experts)
            assert len(places) == len(experts)
            assert staging.num_free == 5 - len(experts)
            for place, expert in zip(places, experts, strict=True):
                assert staging.state(place) == 1
                assert bytes_of(staging, place, layer, expert) == expected(file, layer, expert)
                num_reads, num_bytes = staging.reads(place)
                if mode in (ExpertMode.MAPPED, ExpertMode.RESIDENT):
                    assert (num_reads, num_bytes) == ([0, 0, 0], [0, 0, 0])
                else:
                    assert num_reads == [1, 1, 1]
                    parts = BlobLayout(file, NUM_LAYERS).layers[layer].parts
                    assert all(got >= part.num_bytes for got, part in zip(num_bytes, parts, strict=True))
                staging.free(place)
        assert (ours.reader.num_reads > 0) == (mode in (ExpertMode.POOL, None))


def test_memory_is_on_whole_pages(file: GGUFModel) -> None:
    """What is pinned: all places, each as large as the largest blob needs."""
    with staged(file, BlobSources(), 3) as ours:
        memory = ours.staging.memory
        assert memory.ctypes.data % 4096 == 0
        assert memory.nbytes == 3 * BlobLayout(file, NUM_LAYERS).largest_place_bytes
        (place,) = bring(ours.staging, 0, [7])
        for rows in ours.staging.parts(place, 0, 7):
            assert np.shares_memory(rows, memory)


def test_more_experts_than_places(file: GGUFModel) -> None:
    """The first ones get the places there are; the rest is asked for again, and nobody waits."""
    with staged(file, BlobSources(ExpertMode.MAPPED), 3) as ours:
        staging, rest, got = ours.staging, list(range(NUM_EXPERTS)), []
        while rest:
            places = staging.request(1, rest)
            assert len(places) == min(3, len(rest))
            assert staging.num_free == 3 - len(places)
            if not staging.num_free:
                assert staging.request(1, rest) == []
            staging.wait(places)
            for place in places:
                got.append(rest.pop(0))
                assert bytes_of(staging, place, 1, got[-1]) == expected(file, 1, got[-1])
                staging.free(place)
        assert got == list(range(NUM_EXPERTS))


def test_more_requests_than_slots(file: GGUFModel) -> None:
    """A full ring gives no places either, and takes more once it was served."""
    gate = threading.Event()
    with staged(file, BlobSources(), 100) as ours:
        staging = ours.staging
        ours.reader.before = lambda reads: gate.wait(30)  # type: ignore[assignment, return-value]
        places = []
        for number in range(100):
            places += staging.request(0, [number % NUM_EXPERTS])
        assert len(places) == ours.ring.shape.num_slots
        assert staging.num_free == 100 - len(places)
        gate.set()
        staging.wait(places)
        for number, place in enumerate(places):
            assert bytes_of(staging, place, 0, number) == expected(file, 0, number) if number < 16 else True
        assert len(bring(staging, 0, [1])) == 1


def test_a_place_given_back_too_early(file: GGUFModel) -> None:
    """It is not given out while something is still being written to it."""
    gate = threading.Event()
    with staged(file, BlobSources(), 2) as ours:
        staging = ours.staging
        ours.reader.before = lambda reads: gate.wait(30)  # type: ignore[assignment, return-value]
        first = staging.request(0, [1])
        staging.free(first[0])
        assert staging.num_free == 1
        second = staging.request(0, [2, 3])
        assert len(second) == 1
        assert second != first
        gate.set()
        staging.wait(second)
        # Served in order.
        assert staging.num_free == 1
        assert staging.request(0, [3]) == first


def test_reads_that_fail(file: GGUFModel) -> None:
    """Only the blobs that needed them, with the disk's errno, and the next try may do."""
    with staged(file, BlobSources(), 4, faults=Faults(fail_every=5)) as ours:
        staging, num_failed = ours.staging, 0
        for number in range(20):
            experts = [(3 * number + i) % NUM_EXPERTS for i in range(4)]
            for place, expert in zip(bring(staging, 0, experts), experts, strict=True):
                if staging.state(place) == 1:
                    assert bytes_of(staging, place, 0, expert) == expected(file, 0, expert)
                else:
                    assert staging.state(place) == -errno.EIO
                    num_failed += 1
                staging.free(place)
        # Every fifth of 3 reads for each of 80 blobs; two may be of one blob.
        assert 24 <= num_failed <= 48


@pytest.mark.parametrize("mode", [ExpertMode.MAPPED, None])
def test_a_file_that_was_truncated(tmp_path: Path, mode: ExpertMode | None) -> None:
    """Says so of the blobs that are gone, however they would have come."""
    path = model_with_experts().write(tmp_path / "tiny.gguf")
    with GGUFModel(path) as file:
        last = NUM_LAYERS - 1
        info = file.info(expert_tensor(last, "down"))
        os.truncate(path, info.offset + info.num_bytes // 2)
        with staged(file, BlobSources(mode), 2) as ours:
            places = bring(ours.staging, last, [0, NUM_EXPERTS - 1])
            assert [ours.staging.state(place) for place in places] == [1, -errno.ENODATA]


def test_from_the_pool(file: GGUFModel) -> None:
    """What the stager has read for the cpu_worker is not read again; what it has not, is."""
    with pooled(file, 8, attached=False) as pool, staged(file, pool.sources, 8) as ours:
        pool.ring.wait(ask_pool(pool, 1, [3, 9, 12], [0, 5, 7]), 60, "stager")
        pool.ring.wait(ask_pool(pool, 0, [4], [5]), 60, "stager")
        experts = [9, 4, 12, 3]
        places = bring(ours.staging, 1, experts)
        for place, expert in zip(places, experts, strict=True):
            assert bytes_of(ours.staging, place, 1, expert) == expected(file, 1, expert)
        assert [sum(ours.staging.reads(place)[0]) for place in places] == [0, 3, 0, 0]
        # Refilled: the expert before is not there any more.
        pool.ring.wait(ask_pool(pool, 1, [10], [5]), 60, "stager")
        for place in places:
            ours.staging.free(place)
        places = bring(ours.staging, 1, [9, 10])
        assert [sum(ours.staging.reads(place)[0]) for place in places] == [3, 0]


def test_the_pool_is_let_go(file: GGUFModel) -> None:
    """Its memory is most of what there is: with the cpu_worker that made it lost, nothing keeps it."""
    layout, sources = BlobLayout(file, NUM_LAYERS), BlobSources(ExpertMode.POOL)
    service = BlobService(layout, ReadQueue(4), sources)
    with open_ring(blob_ring(NUM_LAYERS, 2, layout.pool_bytes(2))) as ring:
        server = RingServer(ring.shape, ring.descriptor, spin_s=0)
        service.open(server, 2)
        assert sources.pool is not None
        kept = weakref.ref(server.common["pool"])
        server.close()
        service.forget_ring()
        del server
        assert kept() is None
        assert sources.pool is None
        with staged(file, sources, 1) as ours:
            (place,) = bring(ours.staging, 0, [3])
            assert bytes_of(ours.staging, place, 0, 3) == expected(file, 0, 3)
    service.close()


def test_a_read_for_the_pool_that_failed(file: GGUFModel) -> None:
    """Leaves nothing that could be copied."""
    with (
        pooled(file, 8, attached=False, faults=Faults(fail_every=1)) as pool,
        staged(file, pool.sources, 2) as ours,
    ):
        pool.ring.wait(ask_pool(pool, 0, [6], [2]), 60, "stager")
        (place,) = bring(ours.staging, 0, [6])
        assert bytes_of(ours.staging, place, 0, 6) == expected(file, 0, 6)
        assert ours.reader.num_reads == 3


def test_copies_while_the_pool_is_refilled(file: GGUFModel) -> None:
    """One place whose expert changes all the time: never a mixture of two, nor the one before."""
    stopped = threading.Event()

    def refill() -> None:
        number = 0
        while not stopped.is_set():
            experts = [(number + i) % NUM_EXPERTS for i in range(4)]
            pool.ring.wait(ask_pool(pool, 0, experts, [0, 1, 2, 3]), 60, "stager")
            number += 1

    with pooled(file, 8, attached=False) as pool, staged(file, pool.sources, 4) as ours:
        thread = threading.Thread(target=refill)
        thread.start()
        try:
            num_copied, deadline = 0, time.monotonic() + 30
            number = 0
            while (num_copied < 50 or number < 500) and time.monotonic() < deadline:
                experts = random.sample(range(NUM_EXPERTS), 4)
                places = bring(ours.staging, 0, experts)
                for place, expert in zip(places, experts, strict=True):
                    assert bytes_of(ours.staging, place, 0, expert) == expected(file, 0, expert)
                    num_copied += sum(ours.staging.reads(place)[0]) == 0
                    ours.staging.free(place)
                number += 1
        finally:
            stopped.set()
            thread.join()
        assert num_copied >= 50


class Watched(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Memory that a refill gets at while it is being copied to."""

    during: object = None

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)  # type: ignore[index, assignment]
        assert callable(self.during)
        self.during()


def test_a_refill_in_the_midst_of_a_copy(file: GGUFModel) -> None:
    """Is noticed afterwards, whether or not the new blob has come by then."""
    layout = BlobLayout(file, NUM_LAYERS)
    pool = np.zeros(layout.pool_bytes(4) + 4096, np.uint8)
    contents = PoolContents(layout, 4, pool)
    numbers = np.array([1])

    def rows(during: object) -> list[NDArray[np.uint8]]:
        made = [np.zeros(part.num_bytes, np.uint8).view(Watched) for part in layout.layers[0].parts]
        for each in made:
            each.during = during  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    contents.expert_of[1] = 5
    assert contents.copy(0, 5, rows(lambda: None))
    assert not contents.copy(1, 5, rows(lambda: None))

    def refill_with_the_same() -> None:
        contents.begin_refill(numbers)
        contents.expert_of[1] = 5

    assert not contents.copy(0, 5, rows(lambda: contents.begin_refill(numbers)))
    assert not contents.copy(0, 5, rows(lambda: None))
    contents.expert_of[1] = 5
    assert not contents.copy(0, 5, rows(refill_with_the_same))


def test_a_stager_that_stops(file: GGUFModel) -> None:
    """Is no bad disk: whoever waits is told that it stops."""
    with staged(file, BlobSources(), 8) as ours:
        stop = ours.server.stop
        ours.reader.before = lambda reads: stop()
        places = ours.staging.request(0, [1, 2, 3])
        for place in places:
            with pytest.raises(WorkerFailedError, match="the stager is stopping"):
                ours.staging.wait([place])
        assert {ours.staging.state(place) for place in places} == {-errno.ECANCELED}


def test_a_stager_that_is_lost(file: GGUFModel) -> None:
    """Ends a wait at once with what the link knows."""
    gate = threading.Event()
    with staged(file, BlobSources(), 8) as ours:
        ours.reader.before = lambda reads: gate.wait(30)  # type: ignore[assignment, return-value]
        places = ours.staging.request(0, [1])
        timer = threading.Timer(0.1, ours.ring.fail, [WorkerFailedError("the stager is lost: it died")])
        timer.start()
        with pytest.raises(WorkerFailedError, match="it died"):
            ours.staging.wait(places)
        with pytest.raises(WorkerFailedError, match="it died"):
            ours.staging.wait_any(ours.staging.arrived)
        gate.set()


def test_a_stager_that_does_not_answer(file: GGUFModel) -> None:
    """Is given up after the watchdog's time."""
    gate = threading.Event()
    with staged(file, BlobSources(), 8, timeout_s=0.2) as ours:
        ours.reader.before = lambda reads: gate.wait(30)  # type: ignore[assignment, return-value]
        places = ours.staging.request(0, [1])
        with pytest.raises(StepStalledError, match=r"the stager has not answered for 0\.2 s"):
            ours.staging.wait(places)
        gate.set()


def test_a_slow_disk_is_waited_for(file: GGUFModel) -> None:
    """As long as something comes: four reads at a time, 24 of them, each slower than half of the patience."""
    faults = Faults(delay_s=0.1)
    with staged(file, BlobSources(), 8, timeout_s=0.2, faults=faults) as ours:
        started = time.monotonic()
        places = bring(ours.staging, 0, list(range(8)))
        assert time.monotonic() - started > 0.4
        assert {ours.staging.state(place) for place in places} == {1}


def test_work_that_fails(file: GGUFModel, caplog: pytest.LogCaptureFixture) -> None:
    """No layer of that number: none of the blobs comes, and the next slot is served."""
    with staged(file, BlobSources(), 3) as ours:
        places = bring(ours.staging, NUM_LAYERS, [0, 1])
        assert {ours.staging.state(place) for place in places} == {-errno.EIO}
        (place,) = bring(ours.staging, 0, [2])
        assert bytes_of(ours.staging, place, 0, 2) == expected(file, 0, 2)
    assert "the work of one slot failed" in caplog.text


def test_waiting_for_any(file: GGUFModel) -> None:
    """Each that arrives ends one wait, and none is slept through."""

    def one_by_one(reads: Record) -> None:
        time.sleep(0.01)

    with staged(file, BlobSources(), 8) as ours:
        ours.reader.before = one_by_one
        staging = ours.staging
        places = [place for expert in range(8) for place in staging.request(0, [expert])]
        while True:
            seen = staging.arrived
            if all(staging.state(place) for place in places):
                break
            staging.wait_any(seen)
        assert staging.arrived == 8


class AnsweredMeanwhile:
    """States of places, all of which are answered between the first and the second look at them."""

    def __init__(self) -> None:
        self._looked: set[int] = set()

    def __getitem__(self, place: int) -> int:
        if place in self._looked:
            return 1
        self._looked.add(place)
        return 0


def test_an_answer_while_it_is_looked_for(file: GGUFModel) -> None:
    """A place that was given back too early comes back once, whenever the stager answers."""
    with staged(file, BlobSources(ExpertMode.MAPPED), 4) as both:
        staging = both.staging
        places = staging.request(0, [0, 1])
        staging.wait(places)
        states, staging._abandoned = staging._states, list(places)
        staging._states = AnsweredMeanwhile()  # type: ignore[assignment]
        assert staging.num_free == 2
        assert staging.num_free == 4
        staging._states = states
        assert sorted(staging._free) == [0, 1, 2, 3]
        assert len(staging.request(0, [0, 1, 2, 3, 4])) == 4
