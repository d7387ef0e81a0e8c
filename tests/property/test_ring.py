"""The ring under random interleavings of its two sides, in threads and across processes."""

import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.ring import RingClient, RingServer
from tests.support.ring_work import drive, end, ring_shape, work
from tests.support.second_process import SecondProcess, second_process

# What the client does, and whether the server fails in the slot.
submissions = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.booleans()), max_size=30)
# How many submissions are under way before the client waits for the oldest.
depths = st.integers(1, 4)
# Moments at which the interpreter changes threads.
switch_intervals = st.sampled_from([1e-6, 1e-5, 5e-3])

SERVER = """
import sys
from shared.arena import SegmentDescriptor
from shared.ring import RingServer
from tests.support.ring_work import ring_shape, work
for line in sys.stdin:
    num_slots, spin_s, name, num_bytes = line.split()
    described = SegmentDescriptor(name, int(num_bytes))
    server = RingServer(ring_shape(int(num_slots)), described, spin_s=float(spin_s))
    server.serve(lambda slot: server.stop() if slot["last"][0] else work(slot))
    server.close()
"""


@pytest.fixture
def switching() -> Iterator[None]:
    """Puts back what the test changes in the interpreter."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@settings(
    deadline=None,
    print_blob=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(submissions, depths, st.integers(0, 3), st.sampled_from([0, 1e-4]), switch_intervals)
def test_threads(
    switching: None,
    todo: list[tuple[int, bool]],
    depth: int,
    spare_slots: int,
    spin_s: float,
    switch_interval: float,
) -> None:
    """Every submission gets its own result or its own error, whatever the number of slots and however the two
    threads take turns."""
    sys.setswitchinterval(switch_interval)
    client = RingClient(ring_shape(depth + spare_slots), "test", secrets.token_hex(8), spin_s=spin_s)
    server = RingServer(ring_shape(depth + spare_slots), client.descriptor, spin_s=spin_s)
    thread = threading.Thread(target=server.serve, args=(work,))
    thread.start()
    try:
        drive(client, todo, depth)
    finally:
        server.stop()
        thread.join()
        server.close()
        client.close()


class Servers:
    """A process that serves one ring after the other; a fresh one where a test left it in the middle."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.process = self._start()

    def _start(self) -> SecondProcess:
        return self._stack.enter_context(second_process(SERVER))

    def restart(self) -> None:
        self.close()
        self.process = self._start()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Started once for all examples."""
    made = Servers()
    yield made
    made.close()


@settings(deadline=None, print_blob=True, max_examples=150)
@given(submissions, depths, st.integers(0, 2), st.sampled_from([0, 1e-4]))
def test_processes(
    servers: Servers, todo: list[tuple[int, bool]], depth: int, spare_slots: int, spin_s: float
) -> None:
    """The same between two processes, where stores and loads really cross from one core to another."""
    num_slots = depth + spare_slots
    client = RingClient(ring_shape(num_slots), "test", secrets.token_hex(8), spin_s=spin_s)
    described = client.descriptor
    try:
        servers.process.say(f"{num_slots} {spin_s} {described.name} {described.num_bytes}")
        drive(client, todo, depth)
        end(client)
    except BaseException:
        servers.restart()
        raise
    finally:
        client.close()
