"""Rings served in machine code: the same results as in Python, and the same behaviour where that ends."""

import functools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.native_slots import NativeExperts
from cpu_worker.worker import ExpertService
from shared.errors import StepStalledError
from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig, Qwen4ExpConfig, read_model_config
from shared.native.memory import load
from shared.native.ring import ARRIVED, CLIENT_SLEEPS, COMPLETED, await_above
from shared.native.team import Team
from shared.quants.jit import INTEGER, compile_kernel
from shared.ring import Arrays, RingClient, RingServer, SlotError
from shared.work_slots import ExpertHeader, NgramHeader, expert_ring, ngram_ring
from stager.native_slots import NativeNgrams
from stager.ngram_rows import RowReader, open_rows
from stager.ngram_table import TableOptions
from stager.read_queue import Faults
from stager.worker import NgramSlots
from tests.support.expert_ring import open_ring, served
from tests.support.tiny_model import NUM_EXPERTS, tiny_model

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

PEER = "worker"
MAX_TOKENS = 300


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFModel]:
    """A small model."""
    with GGUFModel(tiny_model().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as opened:
        yield opened


@pytest.fixture(scope="module")
def config(file: GGUFModel) -> Qwen4ExpConfig:
    """What the file says of itself."""
    return read_model_config(file)


@pytest.fixture
def ring(config: Qwen4ExpConfig) -> Iterator[RingClient]:
    """The ring of experts."""
    with open_ring(expert_ring(config, MAX_TOKENS)) as client:
        yield client


class Counted:
    """Work in Python, and the numbers of tokens that it was left with."""

    def __init__(self, service: ExpertService | NgramSlots, place: int) -> None:
        self._service = service
        self._place = place
        self.num_tokens: list[int] = []

    def __call__(self, slot: Arrays) -> None:
        self.num_tokens.append(int(slot["header"][self._place]))
        self._service(slot)


def experts_of(file: GGUFModel, config: Qwen4ExpConfig) -> tuple[Counted, NativeExperts]:
    """Both ways of serving them, with a fresh team."""
    layers, team = [ExpertLayer(file, layer) for layer in range(config.num_layers)], Team(1)
    counted = Counted(ExpertService(layers, team), ExpertHeader.NUM_TOKENS)
    return counted, NativeExperts(layers, team)


def submit(
    ring: RingClient, layer: int, num_tokens: int, seed: int = 0, last_expert: int | None = None
) -> int:
    """Random work for a layer."""
    rng = np.random.default_rng(seed)
    slot = ring.next_slot(10, PEER)
    slot["header"][ExpertHeader.LAYER], slot["header"][ExpertHeader.NUM_TOKENS] = layer, num_tokens
    slot["activations"][:] = rng.normal(size=slot["activations"].shape)
    slot["expert_ids"][:] = rng.integers(-1, NUM_EXPERTS, slot["expert_ids"].shape)
    if last_expert is not None:
        slot["expert_ids"][num_tokens - 1, -1] = last_expert
    slot["expert_weights"][:] = rng.random(slot["expert_weights"].shape)
    slot["outputs"][:] = 7
    return ring.submit()


def outputs(ring: RingClient, ticket: int) -> NDArray[np.float32]:
    """A copy of what a submission gave."""
    return ring.wait(ticket, 10, PEER)["outputs"].copy()


def test_experts_are_those_of_python(file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient) -> None:
    """Steps of all sizes in turn, equal to the bit, with the rest of the slot left alone; Python is only
    asked where the memory has to grow."""
    sizes = [1, 1, 5, 1, 40, 300, 1, 300, 2]
    work, native = experts_of(file, config)
    results = []
    for way in (None, native):
        work.num_tokens.clear()
        with served(ring, work, way):
            results.append(
                [
                    outputs(ring, submit(ring, number % config.num_layers, size, seed=number))
                    for number, size in enumerate(sizes)
                ]
            )
    assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(*results, strict=True))
    # The second way found the memory of the first.
    assert work.num_tokens == []
    work, native = experts_of(file, config)
    with served(ring, work, native):
        again = [
            outputs(ring, submit(ring, number % config.num_layers, size, seed=number))
            for number, size in enumerate(sizes)
        ]
    assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in zip(again, results[0], strict=True))
    assert work.num_tokens == [1, 5, 40, 300]


def test_time_of_a_slot(file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient) -> None:
    """It is told by machine code too."""
    work, native = experts_of(file, config)
    with served(ring, work, native):
        for _ in range(2):
            slot = ring.wait(submit(ring, 0, 3), 10, PEER)
            assert 0 < slot["header"][ExpertHeader.COMPUTE_NS] < 10e9
            slot["header"][ExpertHeader.COMPUTE_NS] = 0


def test_a_slot_that_makes_no_sense_fails_alone(
    file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient
) -> None:
    """With the words that Python has for it; the slots before and after it are computed."""
    work, native = experts_of(file, config)
    with served(ring, work, native):
        for _ in range(3):
            tickets = [submit(ring, 0, 2), submit(ring, 0, 2, last_expert=NUM_EXPERTS)]
            ring.wait(tickets[0], 10, PEER)
            with pytest.raises(SlotError, match=rf"^ValueError: expert {NUM_EXPERTS} of {NUM_EXPERTS}$"):
                ring.wait(tickets[1], 10, PEER)
            with pytest.raises(SlotError, match="IndexError"):
                ring.wait(submit(ring, config.num_layers, 2), 10, PEER)
            # Both slots again, without error.
            for _ in range(2):
                assert not (outputs(ring, submit(ring, 0, 2))[:2] == 7).any()


@pytest.mark.parametrize("num_slots_before", [0, 1, 2])
def test_stop_ends_an_idle_server(
    file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient, num_slots_before: int
) -> None:
    """A process that ends does not wait for work that never comes, even if it has not slept yet."""
    work, native = experts_of(file, config)
    server = RingServer(ring.shape, ring.descriptor, spin_s=0)
    thread = threading.Thread(target=server.serve, args=(work, native))
    thread.start()
    for _ in range(num_slots_before):
        ring.wait(submit(ring, 0, 1), 10, PEER)
    started = time.monotonic()
    server.stop()
    thread.join()
    assert time.monotonic() - started < 0.3
    server.close()


def test_a_second_server_goes_on(file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient) -> None:
    """Machine code and Python by turns serve one ring, and nothing is served twice or left out."""
    work, native = experts_of(file, config)
    expected = None
    for way in (native, None, native):
        with served(ring, work, way):
            got = outputs(ring, submit(ring, 0, 4))
            expected = got if expected is None else expected
            assert got.tobytes() == expected.tobytes()


def test_no_wake_up_is_lost(file: GGUFModel, config: Qwen4ExpConfig, ring: RingClient) -> None:
    """Both sides sleep between slots, at moments of every kind. One missed wake-up costs 50 ms."""
    work, native = experts_of(file, config)
    rng = np.random.default_rng(0)
    with served(ring, work, native):
        ring.wait(submit(ring, 0, 1), 10, PEER)
        slowest = 0.0
        waits = []
        for pause_s in rng.exponential(30e-6, 1500).tolist():
            time.sleep(pause_s)
            started = time.perf_counter()
            ring.wait(ring.submit(), 10, PEER)
            waits.append(time.perf_counter() - started)
            slowest = max(slowest, waits[-1])
    # A busy machine may delay a few; a race would delay many.
    assert sum(wait > 0.045 for wait in waits) <= 5, f"the slowest took {slowest:.3f} s"


def test_ngrams_are_those_of_python(file: GGUFModel, config: Qwen4ExpConfig) -> None:
    """Windows with ends of text and the start of a sequence at every place, in steps of any size; none is
    left to Python but one that makes no sense."""
    ngram = config.ngram
    assert ngram is not None
    rows, reference = open_rows(file, ngram), open_rows(file, ngram)
    work = Counted(NgramSlots(rows), NgramHeader.NUM_TOKENS)
    rng = np.random.default_rng(0)
    with (
        open_ring(ngram_ring(ngram, 40)) as ring,
        served(ring, work, NativeNgrams(rows, ngram.ngram_size)),
    ):
        for num_tokens in [*[1] * 60, 2, 16, 17, 40, 3]:
            windows = rng.integers(-1, config.vocab_size, (num_tokens, ngram.ngram_size)).astype(np.int32)
            windows[:, 0] = np.abs(windows[:, 0])
            windows[rng.random(windows.shape) < 0.2] = ngram.eos_token_id
            slot = ring.next_slot(10, PEER)
            slot["header"][NgramHeader.NUM_TOKENS] = num_tokens
            slot["windows"][:num_tokens] = windows
            slot["features"][:] = 7
            features = ring.wait(ring.submit(), 10, PEER)["features"]
            assert np.array_equal(features[:num_tokens], reference.features(windows))
            assert (features[num_tokens:] == 7).all()
        assert work.num_tokens == []
        for num_tokens in (0, -1, 41):
            ring.next_slot(10, PEER)["header"][NgramHeader.NUM_TOKENS] = num_tokens
            with pytest.raises(SlotError, match=f"a slot of {num_tokens} tokens"):
                ring.wait(ring.submit(), 10, PEER)
    rows.close()
    reference.close()


def slow_rows(file: GGUFModel, ngram: NgramConfig, delay_s: float) -> RowReader:
    return open_rows(file, ngram, TableOptions("direct", 1 << 20, 4, Faults(delay_s=delay_s)), 64)


def test_reads_that_complete_are_progress(file: GGUFModel, config: Qwen4ExpConfig) -> None:
    """A slot takes many times as long as a silent server would be waited for; in Python's wait as in that of
    machine code."""
    ngram = config.ngram
    assert ngram is not None
    with (
        slow_rows(file, ngram, 0.03) as rows,
        open_ring(ngram_ring(ngram, 64)) as ring,
        served(ring, NgramSlots(rows), NativeNgrams(rows, ngram.ngram_size)),
    ):
        slot = ring.next_slot(10, PEER)
        slot["header"][NgramHeader.NUM_TOKENS] = 64
        slot["windows"][:] = np.random.default_rng(0).integers(0, 200, (64, ngram.ngram_size))
        ticket = ring.submit()
        started = time.perf_counter()
        assert await_kernel()(ring.address, ticket, 200_000_000) == ARRIVED
        ring.wait(ticket, 0.2, PEER)
        elapsed = time.perf_counter() - started
        assert elapsed > rows.queue.counts.num_reads / 4 * 0.03 * 0.9
        assert not slot["failures"].any()


def test_reads_that_do_not_complete_are_none(file: GGUFModel, config: Qwen4ExpConfig) -> None:
    """The wait ends, and says what it was for."""
    ngram = config.ngram
    assert ngram is not None
    with (
        slow_rows(file, ngram, 0.3) as rows,
        open_ring(ngram_ring(ngram, 64)) as ring,
        served(ring, NgramSlots(rows), NativeNgrams(rows, ngram.ngram_size)),
    ):
        slot = ring.next_slot(10, PEER)
        slot["header"][NgramHeader.NUM_TOKENS] = 1
        slot["windows"][0] = 5
        ticket = ring.submit()
        with pytest.raises(
            StepStalledError,
            match=r"the worker has not answered for 0\.1 s, and none of the [1-9]\d* reads that it waits for",
        ):
            ring.wait(ticket, 0.1, PEER)
        ring.wait(ticket, 5, PEER)


def _await(ring: int, ticket: int, patience_ns: int) -> int:
    return await_above(ring, load(ring + COMPLETED), ticket, load(ring + CLIENT_SLEEPS), patience_ns)


@functools.cache
def await_kernel() -> Callable[[int, int, int], int]:
    return compile_kernel(_await, "await_in_a_test", *3 * (INTEGER,))
