"""The ring between two threads: order, results, errors, loss of the peer, and no wake-up that is lost."""

import contextlib
import gc
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shared import futex
from shared.arena import SHARED_MEMORY, SegmentDescriptor
from shared.errors import ProtocolError, StepStalledError, WorkerFailedError
from shared.ring import Arrays, RingClient, RingServer, RingShape, SlotError

SHAPE = RingShape(2, {"x": (np.int64, (4,)), "y": (np.float32, (2, 3))})
PEER = "cpu_worker"


@pytest.fixture
def client() -> Iterator[RingClient]:
    """A client that never spins, so that every wait goes through the kernel."""
    ring = RingClient(SHAPE, "test", secrets.token_hex(8), spin_s=0)
    yield ring
    name = ring.descriptor.name
    ring.close()
    assert not (SHARED_MEMORY / name).exists()


@contextmanager
def served(client: RingClient, work: Callable[[Arrays], None], spin_s: float = 0) -> Iterator[RingServer]:
    """A server in a thread."""
    server = RingServer(SHAPE, client.descriptor, spin_s=spin_s)
    thread = threading.Thread(target=server.serve, args=(work,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


def double(slot: Arrays) -> None:
    slot["y"][...] = 2 * slot["x"][0]


def submit(client: RingClient, value: int) -> int:
    client.next_slot(10, PEER)["x"][0] = value
    return client.submit()


def test_common_arrays_are_seen_by_both_sides() -> None:
    """There is one of each, whatever the slot; who expects another one is refused."""
    shape = RingShape(2, SHAPE.arrays, {"z": (np.int64, (3,))})
    client = RingClient(shape, "test", "0" * 8, spin_s=0)
    server = RingServer(shape, client.descriptor, spin_s=0)
    server.common["z"][:] = 1, 2, 3
    assert client.common["z"].tolist() == [1, 2, 3]
    with pytest.raises(ProtocolError, match="another layout"):
        RingServer(SHAPE, client.descriptor, spin_s=0)
    server.close()
    client.close()


@pytest.mark.parametrize("spin_s", [0, 1e-3])
def test_results_come_back_in_their_slots(client: RingClient, spin_s: float) -> None:
    """Many more submissions than slots, two under way at a time: each ticket gets its own result."""
    with served(client, double, spin_s):
        previous = submit(client, 0)
        for value in range(1, 200):
            ticket = submit(client, value)
            assert client.wait(previous, 10, PEER)["y"][1, 2] == 2 * (value - 1)
            previous = ticket
        assert client.wait(previous, 10, PEER)["y"][0, 0] == 398


def test_waiting_twice(client: RingClient) -> None:
    """A ticket that is done stays done."""
    with served(client, double):
        ticket = submit(client, 4)
        assert client.wait(ticket, 10, PEER)["y"][0, 0] == 8
        assert client.wait(ticket, 10, PEER)["y"][0, 0] == 8


def test_a_slot_is_not_given_out_while_it_is_worked_in(client: RingClient) -> None:
    """With every slot under way, filling the next one would overwrite what the server reads."""
    is_seen, may_go_on = threading.Event(), threading.Event()

    def work(slot: Arrays) -> None:
        is_seen.set()
        may_go_on.wait()

    with served(client, work):
        submit(client, 1)
        submit(client, 2)
        is_seen.wait()
        with pytest.raises(StepStalledError):
            client.next_slot(0.01, PEER)
        may_go_on.set()
        assert client.next_slot(10, PEER)["x"][0] == 1


def test_an_error_belongs_to_its_slot(client: RingClient) -> None:
    """A failure reaches who waits for it, as text, and the next use of the same slot is clean."""

    def work(slot: Arrays) -> None:
        if slot["x"][0] == 13:
            raise ValueError("expert 600 of 512")
        double(slot)

    with served(client, work):
        tickets = [submit(client, value) for value in (13, 1)]
        with pytest.raises(SlotError, match=r"^ValueError: expert 600 of 512$") as caught:
            client.wait(tickets[0], 10, PEER)
        assert caught.value.code == "worker_error"
        assert client.wait(tickets[1], 10, PEER)["y"][0, 0] == 2
        assert client.wait(submit(client, 5), 10, PEER)["y"][0, 0] == 10


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("é" * 2000, "ValueError: " + "é" * 249),
        ("a name \udcff of a file", r"ValueError: a name \? of a file"),
        ("", "ValueError: "),
    ],
)
def test_errors_of_any_text(client: RingClient, text: str, shown: str) -> None:
    """Too long for its place, or not encodable at all: the server goes on, the client learns what can be
    said."""

    def work(slot: Arrays) -> None:
        raise ValueError(text)

    with served(client, work):
        for value in range(3):
            with pytest.raises(SlotError, match=f"^{shown}"):
                client.wait(submit(client, value), 10, PEER)


def test_silence_is_a_stall(client: RingClient) -> None:
    """Nobody serves: the wait ends after its time, and says who, how long and what to raise."""
    ticket = submit(client, 1)
    with pytest.raises(
        StepStalledError, match=r"the cpu_worker has not answered for 0\.01 s; raise --watchdog-s if"
    ) as caught:
        client.wait(ticket, 0.01, PEER)
    assert caught.value.code == "step_stalled"


def test_after_a_stall_the_ring_goes_on(client: RingClient) -> None:
    """A server that was only late finishes the old slots first; what the client then submits is served."""
    tickets = [submit(client, value) for value in (1, 2)]
    with pytest.raises(StepStalledError):
        client.wait(tickets[0], 0.01, PEER)
    with served(client, double):
        assert client.wait(submit(client, 3), 10, PEER)["y"][0, 0] == 6


def test_loss_of_the_peer_wakes_the_waiter(client: RingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread waits for a worker that died: it is woken with the reason, however long its
    time-out is, and every later wait ends the same way."""
    is_asleep = threading.Event()
    sleep = futex.wait

    def asleep(*arguments: object) -> None:
        is_asleep.set()
        sleep(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(futex, "wait", asleep)
    failure = WorkerFailedError("the cpu_worker is lost: its process died")

    def fail() -> None:
        is_asleep.wait()
        client.fail(failure)

    thread = threading.Thread(target=fail)
    thread.start()
    ticket = submit(client, 1)
    for _ in range(2):
        with pytest.raises(WorkerFailedError) as caught:
            client.wait(ticket, 1000, PEER)
        assert (str(caught.value), caught.value.code) == (str(failure), failure.code)
    thread.join()


def test_a_lost_ring_keeps_nothing_of_who_waited(client: RingClient) -> None:
    """The frames of a failed step hold its whole state: they shall go with its error, not with the ring."""

    class State:
        pass

    def step() -> weakref.ref[State]:
        state = State()
        with contextlib.suppress(WorkerFailedError):
            client.wait(0, 1000, PEER)
        return weakref.ref(state)

    client.fail(WorkerFailedError("lost"))
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_the_server_knows_whether_it_is_needed(client: RingClient) -> None:
    """By what the client says, and as long as a submission is open whatever it says."""
    server = RingServer(SHAPE, client.descriptor, spin_s=0)
    assert not server.is_in_use
    client.set_in_use(True)
    assert server.is_in_use
    client.set_in_use(False)
    assert not server.is_in_use
    client.submit()
    assert server.is_in_use
    server.close()


def test_a_finished_slot_outlives_the_peer(client: RingClient) -> None:
    """What was done before the peer died is still a result."""
    with served(client, double):
        ticket = submit(client, 4)
        client.wait(ticket, 10, PEER)
    client.fail(WorkerFailedError("it died"))
    assert client.wait(ticket, 10, PEER)["y"][0, 0] == 8


def test_no_wake_up_is_lost(client: RingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes between looking and sleeping must end the sleep at once. To sleep on the counter
    as it is *then* would take the full 50 ms, now and then, in every layer of every token."""
    server = RingServer(SHAPE, client.descriptor, spin_s=0)
    sleep = futex.wait
    slept_on: list[int] = []

    def answered_just_before(address: int, expected: int, timeout_s: float) -> None:
        slept_on.append(expected)
        thread = threading.Thread(target=server.serve, args=(lambda _: server.stop(),))
        thread.start()
        thread.join()
        sleep(address, expected, timeout_s)

    monkeypatch.setattr(futex, "wait", answered_just_before)
    client.wait(submit(client, 1), 1000, PEER)
    assert slept_on == [0], "the value that was looked at, so that the kernel finds it changed"
    server.close()


def test_stop_wakes_an_idle_server(client: RingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends does not wait for work that never comes."""
    sleep = futex.wait
    monkeypatch.setattr(futex, "wait", lambda address, expected, _: sleep(address, expected, 1000))
    server = RingServer(SHAPE, client.descriptor, spin_s=0)
    thread = threading.Thread(target=server.serve, args=(double,))
    thread.start()
    while thread.is_alive():
        # The first may come before it sleeps, which then ends by itself after 50 ms, but not here.
        server.stop()
        thread.join(0.01)
    server.close()


def test_stop_lets_the_running_slot_finish(client: RingClient) -> None:
    """Its result is still announced: the client on the other side may be draining too."""
    is_begun = threading.Event()
    server = RingServer(SHAPE, client.descriptor, spin_s=0)

    def work(slot: Arrays) -> None:
        is_begun.set()
        server.stop()
        double(slot)

    thread = threading.Thread(target=server.serve, args=(work,))
    thread.start()
    ticket = submit(client, 4)
    assert client.wait(ticket, 10, PEER)["y"][0, 0] == 8
    thread.join()
    server.close()


def test_a_second_server_goes_on_where_the_first_stopped(client: RingClient) -> None:
    """A worker whose link began anew serves the rest, and nothing twice."""
    seen: list[int] = []

    def work(slot: Arrays) -> None:
        seen.append(int(slot["x"][0]))

    for value in (1, 2, 3):
        with served(client, work):
            client.wait(submit(client, value), 10, PEER)
    assert seen == [1, 2, 3]


def test_the_other_side_must_have_the_same_shape(client: RingClient) -> None:
    """Another number of tokens in a step, or another model, is refused before anything is read."""
    other = RingShape(2, {"x": (np.int64, (5,)), "y": (np.float32, (2, 3))})
    with pytest.raises(ProtocolError, match="has another layout"):
        RingServer(other, client.descriptor, spin_s=0)
    with pytest.raises(ProtocolError, match="cannot be opened"):
        RingServer(SHAPE, SegmentDescriptor("strata-test-none", 4096), spin_s=0)


def test_waiting_for_a_word_of_memory() -> None:
    """The system call itself: returns at once where the word has changed, in time where it has not, and
    reports what is no address."""
    word = np.zeros(1, np.uint32)
    futex.wait(word.ctypes.data, 1, 1000)
    started = time.monotonic()
    futex.wait(word.ctypes.data, 0, 0.02)
    assert time.monotonic() - started >= 0.02
    with pytest.raises(OSError, match=r"Invalid argument|Bad address"):
        futex.wait(1, 0, 1)
