"""Experts from a pool smaller than a layer: the same bits as from the mapped file, whatever is read when; and
what the pool knows of its places is true."""

import ctypes
import errno
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.native_slots import NativeExperts
from cpu_worker.worker import ExpertService
from shared.errors import WorkerFailedError
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.native.records import Record
from shared.native.ring import RingStatus
from shared.native.task import address_of
from shared.native.team import Team
from shared.ring import RingClient, SlotError
from shared.work_slots import ExpertHeader, expert_ring
from stager.read_queue import Faults
from tests.support.expert_pool import Pooled, pooled
from tests.support.expert_ring import open_ring, served
from tests.support.tiny_model import EXPERT_WIDTH, HIDDEN, TinyModel, tiny_model

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(60, method="thread")

Floats = NDArray[np.float32]
Routes = tuple[Floats, NDArray[np.int32], Floats]

NUM_EXPERTS = 24
NUM_USED = 3


def model_with_experts(num_experts: int = NUM_EXPERTS, num_used: int = NUM_USED) -> TinyModel:
    """The tiny model with more experts than the usual eight."""
    model = tiny_model()
    model.set("expert_count", num_experts)
    model.set("expert_used_count", num_used)
    for name, tensor in model.tensors.items():
        if "_exps" in name or name.endswith("ffn_gate_inp.weight"):
            tensor.shape = (num_experts, *tensor.shape[1:])
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_experts().write(tmp_path_factory.mktemp("pool") / "tiny.gguf")


@pytest.fixture(scope="module")
def file(path: Path) -> Iterator[GGUFModel]:
    with GGUFModel(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def routes(num_tokens: int, seed: int, num_experts: int = NUM_EXPERTS) -> Routes:
    """Activations, experts (each at most once a token; some of nobody), weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :NUM_USED].astype(np.int32)
    ids[rng.random(ids.shape) < 0.05] = -1
    return x, ids, rng.random((num_tokens, NUM_USED)).astype(np.float32)


def compute(layer: ExpertLayer, step: Routes, team: Team) -> bytes:
    out = np.full_like(step[0], np.nan)
    layer.compute(*step, out, team)
    return out.tobytes()


def some_late(reads: Record) -> None:
    """Nothing to change: now and then a delay in front of a batch, about as long as a layer takes."""
    threading.Event().wait(random.choice([0, 0, 1e-3]))


@pytest.mark.parametrize("places", [6, 7, 13, NUM_EXPERTS])
def test_the_same_bits_as_mapped(file: GGUFModel, team: Team, places: int) -> None:
    """Steps of all sizes by turns: one token, windows, and prompts that need every expert of a layer, and
    more routes than a wave has. Layers take turns, so that places are reused while others are kept."""
    sizes = [1, 1, 2, 5, 1, 40, 1, 3, 700, 1, 9, 1]
    mapped = [ExpertLayer(file, layer) for layer in range(2)]
    with pooled(file, places) as ours:
        ours.reader.before = some_late
        for number, size in enumerate(sizes):
            step, layer = routes(size, number), number % 2
            assert compute(ours.layers[layer], step, team) == compute(mapped[layer], step, team)
        assert ours.pool.num_read <= NUM_USED


def test_what_is_in_the_pool_is_not_read_again(file: GGUFModel, team: Team) -> None:
    """A repeat reads nothing; a pool as large as a layer reads each expert once."""
    with pooled(file, NUM_EXPERTS) as ours:
        steps = [routes(size, size) for size in (1, 3, 60)]
        for step in steps:
            compute(ours.layers[0], step, team)
        assert ours.reader.num_reads == 3 * NUM_EXPERTS
        for step in steps:
            compute(ours.layers[0], step, team)
            assert ours.pool.num_read == ours.pool.wait_ns == 0
        assert ours.reader.num_reads == 3 * NUM_EXPERTS


def test_those_in_use_stay(file: GGUFModel, team: Team) -> None:
    """Experts that every other token uses survive a stream of others through the rest of the pool."""
    hot = [1, 5]
    with pooled(file, 6) as ours:
        x = np.ones((1, HIDDEN), np.float32)
        weights = np.ones((1, 2), np.float32)
        cold = [expert for expert in range(NUM_EXPERTS) if expert not in hot]
        num_read = 0
        for number in range(120):
            ids = hot if number % 2 == 0 else [cold[number % len(cold)], cold[(number + 1) % len(cold)]]
            ours.layers[0].compute(x, np.array([ids], np.int32), weights, np.empty_like(x), team)
            num_read += ours.pool.num_read if number % 2 == 0 else 0
        assert num_read == len(hot)
        uses = ours.layers[0].uses
        assert set(np.argsort(uses)[-2:].tolist()) == set(hot)


def blob_of(file: GGUFModel, layer: int, expert: int) -> list[bytes]:
    """Gate, up and down of an expert, as the file has them."""
    return [
        file.rows(f"blk.{layer}.ffn_{part}_exps.weight")[expert].tobytes() for part in ("gate", "up", "down")
    ]


def blob_in_pool(ours: Pooled, file: GGUFModel, layer: int, place: int, expert: int) -> list[bytes]:
    """The same, from a place."""
    layout, pool = BlobLayout(file, len(ours.layers)), ours.ring.common["pool"]
    pool = pool[-address_of(pool) % mmap.PAGESIZE :]
    blobs = layout.layers[layer]
    at = layout.first_place(layer, ours.pool.places_per_layer) + place * blobs.place_bytes
    found = []
    for part in blobs.parts:
        begin = at + part.at + (part.offset + expert * part.num_bytes) % mmap.PAGESIZE
        found.append(pool[begin : begin + part.num_bytes].tobytes())
    return found


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_what_the_table_says_is_true(file: GGUFModel, team: Team, data: st.DataObject) -> None:
    """After any steps: no expert in two places, none of the step's missing from a pool that could hold it,
    every place has the bytes of the expert it is said to have, and what was read is what was booked."""
    places = data.draw(st.integers(2 * NUM_USED, NUM_EXPERTS))
    with pooled(file, places) as ours:
        for number in range(data.draw(st.integers(1, 6))):
            layer = data.draw(st.integers(0, 1))
            size = data.draw(st.sampled_from([1, 1, 2, 8, 200]))
            step = routes(size, data.draw(st.integers(0, 1000)))
            before = set(ours.pool.experts[layer].tolist()) - {-1}
            reads_before, bytes_before = ours.reader.num_reads, ours.reader.num_bytes
            booked = booking(size)
            ours.pool.book_into(booked)
            assert compute(ours.layers[layer], step, team) == compute(ExpertLayer(file, layer), step, team)
            chosen = set(step[1].ravel().tolist()) - {-1}
            after = ours.pool.experts[layer].tolist()
            kept = [expert for expert in after if expert >= 0]
            assert len(kept) == len(set(kept)), number
            if len(chosen) <= places // 2:
                assert chosen <= set(kept)
                assert ours.pool.num_read == len(chosen - before)
            for place, expert in enumerate(after):
                if expert >= 0:
                    assert blob_in_pool(ours, file, layer, place, expert) == blob_of(file, layer, expert)
            if ours.pool.num_read:
                assert booked["reads"].sum() == ours.reader.num_reads - reads_before
                assert booked["read_bytes"].sum() == ours.reader.num_bytes - bytes_before
                assert booked["disk_routes"].sum() >= ours.pool.num_read
            else:
                assert ours.reader.num_reads == reads_before


def booking(num_tokens: int) -> dict[str, NDArray[Any]]:
    """The arrays of a slot that reads are booked into, with something in them from before."""
    return {
        "disk_routes": np.full(num_tokens, 7, np.int32),
        "reads": np.full((num_tokens, 3), 7, np.int32),
        "read_bytes": np.full((num_tokens, 3), 7, np.int64),
        "failures": np.full((num_tokens, 2), 7, np.int32),
    }


def test_reads_are_booked_on_the_first_token(file: GGUFModel, team: Team) -> None:
    """Of two tokens that share an expert the first one has its reads, and both a route to the disk; an expert
    that was there counts for nobody."""
    with pooled(file, 8) as ours:
        x, weights = np.ones((3, HIDDEN), np.float32), np.ones((3, 2), np.float32)
        ours.layers[0].compute(x[:1], np.array([[4, 9]], np.int32), weights[:1], np.empty_like(x[:1]), team)
        booked = booking(3)
        ours.pool.book_into(booked)
        ids = np.array([[4, 9], [4, 11], [11, 2]], np.int32)
        ours.layers[0].compute(x, ids, weights, np.empty_like(x), team)
        assert ours.pool.num_read == 2
        assert booked["disk_routes"].tolist() == [0, 1, 2]
        assert booked["reads"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
        assert (booked["read_bytes"][1:] >= 4 * EXPERT_WIDTH * HIDDEN).all()
        assert not booked["failures"].any()


# What goes wrong.


def past_the_end(reads: Record) -> None:
    """The first read of a batch is for bytes that the file does not have."""
    reads["offset"][0] = 1 << 40


def from_nowhere(reads: Record) -> None:
    """Its file is closed."""
    reads["file"][0] = 9999


@pytest.mark.parametrize(
    ("spoil", "number"), [(past_the_end, errno.ENODATA), (from_nowhere, errno.EBADF)], ids=["short", "gone"]
)
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 700])
def test_a_blob_that_cannot_be_read(
    file: GGUFModel, team: Team, spoil: Callable[[Record], None], number: int, num_tokens: int
) -> None:
    """Costs the tokens that chose it, with expert and reason; the others have the bits that they always have.
    All that was read is booked, and the next one that needs the blob asks again."""
    step = routes(num_tokens, 3)
    mapped = ExpertLayer(file, 0)
    whole = np.frombuffer(compute(mapped, step, team), np.float32).reshape(step[0].shape)
    with pooled(file, 6) as ours:
        ours.reader.before = spoil
        for _ in range(2):
            booked, reads_before = booking(num_tokens), ours.reader.num_reads
            out = np.full_like(whole, np.nan)
            ours.pool.book_into(booked)
            ours.layers[0].compute(*step, out, team)
            numbers, experts = booked["failures"].T
            lost = numbers != 0
            assert set(numbers.tolist()) - {0} == {number}
            assert all(expert in ids for expert, ids in zip(experts[lost], step[1][lost], strict=True))
            # Whoever shares a lost expert has lost it too.
            assert (np.isin(step[1], experts[lost]).any(1) == lost).all()
            assert out[~lost].tobytes() == whole[~lost].tobytes()
            assert np.isfinite(out).all()
            assert ours.pool.num_lost >= lost.sum()
            assert booked["reads"].sum() == ours.reader.num_reads - reads_before
            if reads_before == 0:
                assert booked["disk_routes"].tolist() == (step[1] >= 0).sum(1).tolist()
        ours.reader.before = lambda reads: None
        for layer in (1, 0):
            assert compute(ours.layers[layer], step, team) == compute(ExpertLayer(file, layer), step, team)
        assert ours.pool.num_lost == 0


def test_a_disk_that_reads_nothing(file: GGUFModel, team: Team) -> None:
    """Is asked once for each expert, however many waves there are, and all of it is booked."""
    step = routes(40, 3)
    num_chosen = len(set(step[1].ravel().tolist()) - {-1})

    def spoil(reads: Record) -> None:
        reads["file"] = 9999

    with pooled(file, 6) as ours:
        ours.reader.before = spoil
        for turn in range(1, 6):
            booked = booking(40)
            ours.pool.book_into(booked)
            ours.layers[0].compute(*step, np.empty_like(step[0]), team)
            assert booked["reads"].sum() == 3 * num_chosen
            assert ours.reader.num_reads == turn * 3 * num_chosen
            assert (booked["failures"][:, 0] == errno.EBADF).all()
            assert ours.pool.num_lost == (step[1] >= 0).sum()


def test_an_expert_of_several_waves_is_asked_for_once(file: GGUFModel, team: Team) -> None:
    """More routes lead to it than a wave has, and its blob cannot be read: all of them are lost to the one
    read, and the next step asks again."""
    num_tokens, x = 1200, np.ones((1200, HIDDEN), np.float32)
    ids = np.full((num_tokens, 1), 4, np.int32)
    weights = np.ones((num_tokens, 1), np.float32)

    def spoil(reads: Record) -> None:
        reads["file"] = 9999

    with pooled(file, 6) as ours:
        ours.reader.before = spoil
        for turn in range(1, 4):
            booked = booking(num_tokens)
            ours.pool.book_into(booked)
            ours.layers[0].compute(x, ids, weights, np.empty_like(x), team)
            assert ours.reader.num_reads == turn * 3
            assert booked["reads"].sum() == 3
            assert (booked["failures"] == [errno.EBADF, 4]).all()
            assert (booked["disk_routes"] == 1).all()
            assert (ours.pool.num_read, ours.pool.num_lost) == (1, num_tokens)
        ours.reader.before = lambda reads: None
        step = (x, ids, weights)
        assert compute(ours.layers[0], step, team) == compute(ExpertLayer(file, 0), step, team)
        assert ours.pool.num_lost == 0


@pytest.mark.parametrize("ids", [[-1, -1], [3, 9999]], ids=["nobody's", "no such expert"])
def test_nothing_is_left_of_the_step_before(file: GGUFModel, team: Team, ids: list[int]) -> None:
    """A layer none of whose routes are to be computed here has read nothing, waited for nothing, and lost
    nothing."""
    x, weights = np.ones((1, HIDDEN), np.float32), np.ones((1, 2), np.float32)
    with pooled(file, 6) as ours:
        ours.reader.before = from_nowhere
        compute(ours.layers[0], (x, np.array([[4, 9]], np.int32), weights), team)
        assert min(ours.pool.num_read, ours.pool.wait_ns, ours.pool.num_lost) > 0
        if max(ids) < 0:
            assert compute(ours.layers[0], (x, np.array([ids], np.int32), weights), team) == bytes(4 * HIDDEN)
        else:
            with pytest.raises(ValueError, match="expert 9999"):
                compute(ours.layers[0], (x, np.array([ids], np.int32), weights), team)
        assert ours.pool.num_read == ours.pool.wait_ns == ours.pool.num_lost == 0


def test_a_stager_that_is_asked_to_stop(file: GGUFModel, team: Team) -> None:
    """Leaves what it has not read yet: nobody is told that the disk is bad."""
    with pooled(file, 6) as ours:

        def stop(reads: Record) -> None:
            ctypes.c_int64.from_address(int(ours.reader._record["interrupt"][0])).value = 1

        ours.reader.before = stop
        with pytest.raises(WorkerFailedError, match="there is no stager to read experts"):
            compute(ours.layers[0], routes(40, 3), team)


def test_without_a_stager(file: GGUFModel, team: Team) -> None:
    """Said at once, and nothing is waited for."""
    with (
        pooled(file, 6, attached=False) as ours,
        pytest.raises(WorkerFailedError, match="there is no stager to read experts"),
    ):
        compute(ours.layers[0], routes(1, 0), team)


def test_a_stager_that_is_lost_while_waited_for(file: GGUFModel, team: Team) -> None:
    """Ends the wait at once; with the next stager, whose pool is empty, all is well again."""
    step, release = routes(2, 0), threading.Event()
    lost = WorkerFailedError("the stager is lost: its process died")

    def hold_up(reads: Record) -> None:
        threading.Thread(target=lambda: ours.pool.shut(lost)).start()
        release.wait(30)

    with pooled(file, 6) as ours:
        ours.reader.before = hold_up
        with pytest.raises(WorkerFailedError, match="its process died"):
            compute(ours.layers[0], step, team)
        ours.pool.wait_until_left()
        with pytest.raises(WorkerFailedError, match="its process died"):
            compute(ours.layers[0], step, team)
        release.set()
        with pooled(file, 6) as successor:
            ours.pool.open(successor.ring)
            assert compute(ours.layers[0], step, team) == compute(ExpertLayer(file, 0), step, team)
            ours.pool.shut(lost)


# In the slots of a ring.


@pytest.fixture
def ring(file: GGUFModel) -> Iterator[RingClient]:
    with open_ring(expert_ring(read_model_config(file), 40)) as client:
        yield client


def submit(ring: RingClient, layer: int, step: Routes) -> int:
    slot = ring.next_slot(10, "worker")
    num_tokens = len(step[0])
    slot["header"][ExpertHeader.LAYER], slot["header"][ExpertHeader.NUM_TOKENS] = layer, num_tokens
    for name, values in zip(("activations", "expert_ids", "expert_weights"), step, strict=True):
        slot[name][:num_tokens] = values
    return ring.submit()


def serving(ours: Pooled, ring: RingClient, team: Team, *, natively: bool) -> AbstractContextManager[Any]:
    native = NativeExperts(ours.layers, team, ours.pool) if natively else None
    return served(ring, ExpertService(ours.layers, team, ours.pool), native)


@pytest.mark.parametrize("natively", [True, False])
def test_slots_say_what_was_read(file: GGUFModel, team: Team, ring: RingClient, natively: bool) -> None:
    """Machine code and Python alike; a slot all of whose experts are there says so."""
    step = routes(5, 1)
    chosen = set(step[1].ravel().tolist()) - {-1}
    with pooled(file, NUM_EXPERTS) as ours, serving(ours, ring, team, natively=natively):
        for layer in (0, 1):
            slot = ring.wait(submit(ring, layer, step), 10, "worker")
            assert slot["header"][ExpertHeader.NUM_READ] == len(chosen)
            assert slot["header"][ExpertHeader.DISK_WAIT_NS] > 0
            assert slot["header"][ExpertHeader.MAJOR_FAULTS] >= 0
            assert slot["reads"][:5].sum() == 3 * len(chosen)
            assert slot["disk_routes"][:5].tolist() == (step[1] >= 0).sum(1).tolist()
            slot = ring.wait(submit(ring, layer, step), 10, "worker")
            assert slot["header"][ExpertHeader.NUM_READ] == slot["header"][ExpertHeader.DISK_WAIT_NS] == 0


@pytest.mark.parametrize("natively", [True, False])
def test_slots_say_who_has_lost_an_expert(
    file: GGUFModel, team: Team, ring: RingClient, natively: bool
) -> None:
    """Machine code and Python alike; the next slot has nothing of it."""
    step = routes(4, 0)
    chosen = set(step[1].ravel().tolist()) - {-1}
    with pooled(file, NUM_EXPERTS) as ours, serving(ours, ring, team, natively=natively):
        ours.reader.before = from_nowhere
        slot = ring.wait(submit(ring, 1, step), 10, "worker")
        numbers, experts = slot["failures"][:4].T
        assert set(numbers.tolist()) == {0, errno.EBADF}
        (lost,) = set(experts[numbers != 0].tolist())
        assert slot["header"][ExpertHeader.NUM_LOST] == (step[1] == lost).sum() == (numbers != 0).sum()
        # Asked once: the failure is not tried again behind the back of who counts.
        assert ours.reader.num_reads == slot["reads"][:4].sum() == 3 * len(chosen)
        ours.reader.before = lambda reads: None
        slot = ring.wait(submit(ring, 1, step), 10, "worker")
        assert slot["header"][ExpertHeader.NUM_LOST] == 0
        assert slot["header"][ExpertHeader.NUM_READ] == 1


@pytest.mark.parametrize("natively", [True, False])
def test_slots_that_fail_say_what_was_read(
    file: GGUFModel, team: Team, ring: RingClient, natively: bool
) -> None:
    """Machine code and Python alike: a stager that is lost while the third wave waits leaves the reads of the
    two before, which were asked for together."""
    x, weights = np.ones((3, HIDDEN), np.float32), np.ones((3, NUM_USED), np.float32)
    lost, release = WorkerFailedError("the stager is lost: its process died"), threading.Event()
    num_batches = 0

    def lose_it(reads: Record) -> None:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 2:
            ours.pool.shut(lost)
            release.wait(30)

    with pooled(file, 6) as ours, serving(ours, ring, team, natively=natively):
        ours.reader.before = lose_it
        ticket = submit(ring, 1, (x, np.arange(9, dtype=np.int32).reshape(3, 3), weights))
        with pytest.raises(SlotError, match="its process died"):
            ring.wait(ticket, 10, "worker")
        release.set()
        slot = ring.slot(ticket)
        assert slot["header"][ExpertHeader.NUM_READ] == 6
        assert slot["header"][ExpertHeader.DISK_WAIT_NS] > 0
        assert slot["reads"][:3].tolist() == [[3, 3, 3], [3, 3, 3], [0, 0, 0]]


def test_a_slow_disk_is_no_stall(file: GGUFModel, team: Team, ring: RingClient) -> None:
    """Reads that complete are progress to who waits for the slot, though all together take longer than it
    would wait for one."""
    x, weights = np.ones((1, HIDDEN), np.float32), np.ones((1, NUM_USED), np.float32)
    # Nine reads, one after the other.
    slow = pooled(file, 6, depth=1, faults=Faults(delay_s=0.15))
    with slow as ours, serving(ours, ring, team, natively=True):
        ring.wait(submit(ring, 0, (x, np.array([[0, 1, 2]], np.int32), weights)), 1.2, "worker")
        assert ring.status[RingStatus.PROGRESS] >= 3 * NUM_USED
        assert ring.status[RingStatus.OUTSTANDING] == 0


def test_a_server_that_is_stopped_while_it_waits(file: GGUFModel, team: Team, ring: RingClient) -> None:
    """Does not wait for the disk. The pool serves the next one, with what has come meanwhile."""
    release = threading.Event()
    step = routes(1, 0)
    with pooled(file, 6) as ours:
        ours.reader.before = lambda reads: bool(release.wait(30)) and None
        with serving(ours, ring, team, natively=True):
            submit(ring, 0, step)
            while not ours.pool.is_in_use:
                threading.Event().wait(1e-3)
        release.set()
        with serving(ours, ring, team, natively=True):
            # The slot is still open; it is the next server's.
            ring.wait(submit(ring, 0, step), 10, "worker")
        assert ours.reader.num_reads == 3 * len(set(step[1].ravel().tolist()) - {-1})
