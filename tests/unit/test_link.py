"""The control link over real sockets: handshake, loss and return of either side, and peers that misbehave.

Every wait is for an event of the other side; the time limit of the test ends those that never come.
"""

import asyncio
import time
from collections.abc import Iterator

import pytest

from shared.config import CommonConfig
from shared.errors import ProtocolError, StartError
from shared.link import LinkServer, PeerState, transport
from shared.messages import (
    ForgetPrompt,
    Hello,
    StagePrompt,
    TokenChunk,
)
from shared.run_directory import Role, RunDirectory
from tests.support.link_sides import (
    BEAT,
    MUTE,
    QUICK,
    SEGMENT,
    BareServer,
    ClientSide,
    ServerSide,
    client,
    identity,
    living,
    running,
    server,
)
from tests.support.run_directories import temporary_run_directory
from tests.support.second_process import second_process


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    """A run directory of its own."""
    with temporary_run_directory() as made:
        yield made


async def test_handshake(directory: RunDirectory) -> None:
    """Hello, Init, heartbeats while it attaches, Ready with its capabilities, then messages both ways."""
    gateway, stager = ServerSide(), ClientSide()
    stager.may_attach.clear()
    async with server(directory, gateway) as server_link, client(directory, stager) as (client_link, _):
        assert await gateway.next() == ("greeted", Role.STAGER)
        assert await stager.next() == ("attaching", "s1")
        assert await gateway.next_beat() == BEAT
        peer = server_link.peers[Role.STAGER]
        assert (peer.state, peer.incarnation, peer.pid) == (PeerState.GREETED, "c1", 1)
        assert peer.heartbeat == BEAT
        stager.may_attach.set()
        assert await stager.next() == ("attached", SEGMENT)
        assert await gateway.next() == ("ready", {"device": "cpu"})
        assert peer.state is PeerState.READY
        assert server_link.peers[Role.GPU_WORKER].state is PeerState.ABSENT
        assert server_link.post(Role.STAGER, ForgetPrompt(request_id="r"))
        assert await stager.next() == ("said", ForgetPrompt(request_id="r"))
        client_link.post(TokenChunk(request_id="r", token_ids=[1, 2]))
        assert await gateway.next() == ("said", TokenChunk(request_id="r", token_ids=[1, 2]))


async def test_either_side_may_be_first(directory: RunDirectory) -> None:
    """Containers start in any order: a client whose server is not there yet waits for it."""
    gateway, stager = ServerSide(), ClientSide()
    async with client(directory, stager), server(directory, gateway):
        assert await gateway.next() == ("greeted", Role.STAGER)
        assert await gateway.next() == ("ready", {"device": "cpu"})


async def test_order(directory: RunDirectory) -> None:
    """Many messages arrive as they were sent, in both directions."""
    gateway, stager = ServerSide(), ClientSide()
    async with server(directory, gateway) as server_link, client(directory, stager) as (client_link, _):
        await gateway.until("ready")
        await stager.until("attached")
        for number in range(500):
            server_link.post(Role.STAGER, StagePrompt(request_id=str(number), prompt_token_ids=[number] * 50))
            client_link.post(TokenChunk(request_id=str(number), token_ids=[number]))
        for number in range(500):
            _, staged = await stager.next()
            _, chunk = await gateway.next()
            assert isinstance(staged, StagePrompt)
            assert isinstance(chunk, TokenChunk)
            assert (staged.request_id, chunk.request_id) == (str(number), str(number))


async def test_farewell_of_the_client(directory: RunDirectory) -> None:
    """A worker that leaves by itself is not taken for one that died, and what it said before arrives."""
    gateway, stager = ServerSide(), ClientSide()
    async with server(directory, gateway) as server_link:
        async with client(directory, stager) as (client_link, _):
            await gateway.until("ready")
            for number in range(200):
                client_link.post(TokenChunk(request_id="r", token_ids=[number]))
        for number in range(200):
            assert await gateway.next() == ("said", TokenChunk(request_id="r", token_ids=[number]))
        assert await gateway.next() == ("lost", "it left: it stops")
        assert server_link.peers[Role.STAGER].state is PeerState.ABSENT
        assert not server_link.post(Role.STAGER, ForgetPrompt(request_id="r"))
    assert await stager.until("detached") == "it stops"


async def test_farewell_of_the_server(directory: RunDirectory) -> None:
    """Likewise; and a server that has said it is not greeted again, though its process still lives."""
    gateway, stager = ServerSide(), ClientSide()
    with living(directory, Role.GATEWAY, "s1"):
        made = LinkServer(identity(Role.GATEWAY, "s1"), directory, [Role.STAGER], gateway, QUICK)
        async with client(directory, stager):
            async with running(made):
                await gateway.until("ready")
                await stager.until("attached")
                for number in range(200):
                    made.post(Role.STAGER, ForgetPrompt(request_id=str(number)))
            for number in range(200):
                assert await stager.next() == ("said", ForgetPrompt(request_id=str(number)))
            assert await stager.next() == ("detached", "it left: it stops")
            # Whoever listens in its place now would hear a Hello of this client within 0.2 s.
            listener = BareServer(directory)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await listener.hear(Hello)
            listener.close()


async def test_a_server_that_left_may_come_back(directory: RunDirectory) -> None:
    """Its successor is another incarnation, and is greeted."""
    gateway, stager = ServerSide(), ClientSide()
    async with client(directory, stager):
        async with server(directory, gateway):
            await gateway.until("ready")
            await stager.until("attached")
        assert await stager.next() == ("detached", "it left: it stops")
        with living(directory, Role.GATEWAY, "s2"):
            successor = BareServer(directory)
            await successor.hear(Hello)
            successor.close()


async def test_another_model(directory: RunDirectory) -> None:
    """Processes of one stack with different model files never begin: the client ends with the reason."""
    async with server(directory, ServerSide()), client(directory, ClientSide(), model="other") as (_, task):
        with pytest.raises(StartError, match="the stager has another model file than the gateway; give all"):
            await task


async def test_given_up_and_back(directory: RunDirectory) -> None:
    """A worker that was frozen longer than the time-out learns with its first word that it was given up, lets
    go of what it was offered, and is ready again at once, with a fresh offer."""
    gateway, stager = ServerSide(), ClientSide()
    async with server(directory, gateway, MUTE), client(directory, stager, MUTE) as (client_link, _):
        for _ in range(3):
            assert await gateway.next() == ("greeted", Role.STAGER)
            assert await gateway.next() == ("ready", {"device": "cpu"})
            await stager.until("attached")
            reason = await gateway.until("lost")
            assert str(reason).startswith("it has been silent for 0.")
            for _ in range(20):
                client_link.post(TokenChunk(request_id="r", token_ids=[1]))
            assert await stager.next() == ("detached", "you were given up for dead; begin anew")


async def test_a_server_that_was_held_up_blames_nobody(directory: RunDirectory) -> None:
    """A process that could not listen for longer than the time-out, being stopped or busy itself, must not
    take its peers for silent."""
    beats_often = CommonConfig(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.3)
    gateway, stager = ServerSide(), ClientSide()
    async with server(directory, gateway, beats_often), client(directory, stager, beats_often):
        await gateway.until("ready")
        for _ in range(2):
            time.sleep(0.6)  # noqa: ASYNC251 - the loop is to stand still
            await gateway.next_beat()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.25):
                    await gateway.next()


async def test_attaching_fails(directory: RunDirectory) -> None:
    """What was offered may be gone with a server that just died: the client lets go and asks again."""
    gateway, stager = ServerSide(), ClientSide()
    stager.failures = [ProtocolError("the segment is gone")]
    async with server(directory, gateway), client(directory, stager):
        assert await stager.next() == ("attaching", "s1")
        assert await stager.next() == ("detached", "the segment is gone")
        assert await stager.next() == ("attaching", "s1")
        assert await stager.next() == ("attached", SEGMENT)
        assert [await gateway.next() for _ in range(4)] == [
            ("greeted", Role.STAGER),
            ("lost", "it began anew"),
            ("greeted", Role.STAGER),
            ("ready", {"device": "cpu"}),
        ]


async def test_attaching_breaks(directory: RunDirectory) -> None:
    """Any other error is the process's own: it ends the link, and with it the process."""
    stager = ClientSide()
    stager.failures = [ValueError("a bug")]
    async with server(directory, ServerSide()), client(directory, stager) as (_, task):
        with pytest.raises(ValueError, match="a bug"):
            await task
        await stager.until("detached")


async def test_nobody_to_post_to(directory: RunDirectory) -> None:
    """Without a peer the server says so, and the client drops what nobody waits for any more."""
    async with server(directory, ServerSide()) as server_link:
        assert not server_link.post(Role.STAGER, ForgetPrompt(request_id="r"))
    stager = ClientSide()
    async with client(directory, stager) as (client_link, _):
        client_link.post(TokenChunk(request_id="r", token_ids=[1]))
        client_link.beat()


async def test_a_full_outbox(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a peer does not take is bounded: the sender is told, memory does not grow."""
    monkeypatch.setattr(transport, "_HIGH_WATER_MARK", 3)
    gateway, stager = ServerSide(), ClientSide()
    async with server(directory, gateway, MUTE) as server_link, client(directory, stager) as (client_link, _):
        await gateway.until("ready")
        posted = [server_link.post(Role.STAGER, ForgetPrompt(request_id=str(n))) for n in range(5)]
        assert posted == [True, True, True, False, False]
        for _ in range(5):
            client_link.post(TokenChunk(request_id="r", token_ids=[1]))
    assert "stager.c1.1 does not take messages; one was dropped" in caplog.text
    assert "the gateway does not take messages; one was dropped" in caplog.text


LEAVING = """
import asyncio, os, sys
from pathlib import Path
from shared.config import CommonConfig
from shared.link import Identity, LinkClient, close_links
from shared.messages import Heartbeat, TokenChunk
from shared.run_directory import Role, RoleLock, RunDirectory

class Listener:
    def __init__(self):
        self.attached = asyncio.Event()
    async def attach(self, init):
        self.attached.set()
        return {}
    async def detach(self, reason):
        pass
    def heartbeat(self):
        return Heartbeat(state="", activity="", progress=0, gauges={})
    def message(self, message):
        pass

async def main():
    directory, listener = RunDirectory(Path(sys.argv[1])), Listener()
    lock = RoleLock(directory, Role.STAGER, "c1")
    identity = Identity(Role.STAGER, "c1", "model", 1)
    link = LinkClient(identity, directory, Role.GATEWAY, listener, CommonConfig())
    task = asyncio.create_task(link.run())
    await listener.attached.wait()
    for number in range(300):
        link.post(TokenChunk(request_id="r", token_ids=[number] * 1000))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
close_links()
os._exit(0)
"""


async def test_last_words_leave_the_process(directory: RunDirectory) -> None:
    """A process that ends at once after it has drained has still said everything: its last tokens, that its
    requests are finished, and Farewell."""
    gateway = ServerSide()
    async with server(directory, gateway):
        with second_process(LEAVING, str(directory.path)) as process:
            assert await gateway.next() == ("greeted", Role.STAGER)
            assert await gateway.next() == ("ready", {})
            for number in range(300):
                assert await gateway.next() == ("said", TokenChunk(request_id="r", token_ids=[number] * 1000))
            assert await gateway.next() == ("lost", "it left: it stops")
            assert process.finish() == []
