"""The control link with a peer that dies without a word, repeats itself or talks nonsense, played by hand.

Every wait is for an event of the other side; the time limit of the test ends those that never come.
"""

import logging
from collections.abc import Iterator

import pytest

from shared.config import CommonConfig
from shared.errors import StartError
from shared.link import PeerState
from shared.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    Farewell,
    ForgetPrompt,
    Hello,
    Init,
    Ready,
    Refusal,
    TokenChunk,
)
from shared.run_directory import Role, RunDirectory
from tests.support.link_sides import (
    BEAT,
    MUTE,
    SEGMENT,
    BareClient,
    BareServer,
    ClientSide,
    ServerSide,
    client,
    living,
    server,
)
from tests.support.run_directories import temporary_run_directory


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    """A run directory of its own."""
    with temporary_run_directory() as made:
        yield made


# A client played by hand.


async def test_death_of_the_client(directory: RunDirectory) -> None:
    """A worker that dies without a word is missed as soon as its lock is free, and its successor greeted."""
    gateway = ServerSide()
    async with server(directory, gateway) as server_link:
        for incarnation in ("c1", "c2"):
            with living(directory, Role.STAGER, incarnation):
                stager = BareClient(directory, f"stager.{incarnation}.1".encode())
                await stager.say_hello(incarnation=incarnation)
                assert await stager.hear() == Init(incarnation="s1", segment=SEGMENT, ring_tokens=7)
                await stager.say(Ready(capabilities={}))
                assert [await gateway.next() for _ in range(2)] == [("greeted", Role.STAGER), ("ready", {})]
                stager.close()
            assert await gateway.next() == ("lost", "its process died")
        assert server_link.peers[Role.STAGER].num_losses == 2


async def test_a_successor_before_the_death_was_noticed(directory: RunDirectory) -> None:
    """A worker restarted within the blink between two looks: the old one is lost before the new one counts,
    and words of the old one that come late are refused."""
    gateway = ServerSide()
    async with server(directory, gateway) as server_link:
        with living(directory, Role.STAGER, "c1"):
            old = BareClient(directory, b"stager.c1.1")
            await old.say_hello()
            await old.hear()
        with living(directory, Role.STAGER, "c2"):
            new = BareClient(directory, b"stager.c2.1")
            await new.say_hello(incarnation="c2")
            await new.hear()
            assert [await gateway.next() for _ in range(3)] == [
                ("greeted", Role.STAGER),
                ("lost", "it was replaced"),
                ("greeted", Role.STAGER),
            ]
            await old.say(Ready(capabilities={"of": "the old one"}))
            assert await old.hear() == Refusal(
                reason="you were given up for dead; begin anew", is_final=False
            )
            await new.say(Ready(capabilities={"of": "the new one"}))
            assert await gateway.next() == ("ready", {"of": "the new one"})
            assert server_link.peers[Role.STAGER].incarnation == "c2"
        old.close()
        new.close()


async def test_a_connection_that_was_given_up(directory: RunDirectory) -> None:
    """A client that begins anew has a new connection; what is still under way on the old one, a Ready for an
    offer that it has let go of, say, is not taken for new."""
    gateway = ServerSide()
    async with server(directory, gateway) as server_link:
        with living(directory, Role.STAGER, "c1"):
            old, new = (BareClient(directory, f"stager.c1.{number}".encode()) for number in (1, 2))
            for connection in (old, new):
                await connection.say_hello()
                await connection.hear()
            assert [await gateway.next() for _ in range(3)] == [
                ("greeted", Role.STAGER),
                ("lost", "it began anew"),
                ("greeted", Role.STAGER),
            ]
            for message in (Ready(capabilities={}), Farewell(reason="it stops")):
                await old.say(message)
                assert isinstance(await old.hear(), Refusal)
            assert server_link.peers[Role.STAGER].state is PeerState.GREETED
        old.close()
        new.close()


async def test_hello_repeated(directory: RunDirectory) -> None:
    """A client that had to wait for its answer repeats itself: each Hello is answered, with the same offer,
    made once; and one that comes late changes nothing."""
    gateway = ServerSide()
    async with server(directory, gateway) as server_link:
        with living(directory, Role.STAGER, "c1"):
            stager = BareClient(directory)
            for _ in range(3):
                await stager.say_hello()
            answers = [await stager.hear() for _ in range(3)]
            assert answers == [Init(incarnation="s1", segment=SEGMENT, ring_tokens=7)] * 3
            await stager.say(Ready(capabilities={}))
            await stager.say_hello()
            await stager.hear()
            await stager.say(Ready(capabilities={}))
            await stager.say(TokenChunk(request_id="r", token_ids=[]))
            assert [await gateway.next() for _ in range(3)] == [
                ("greeted", Role.STAGER),
                ("ready", {}),
                ("said", TokenChunk(request_id="r", token_ids=[])),
            ]
            assert server_link.peers[Role.STAGER].state is PeerState.READY
        stager.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            {"version": PROTOCOL_VERSION + 1},
            f"protocol {PROTOCOL_VERSION + 1} of the stager is not {PROTOCOL_VERSION} of the gateway; "
            "run one version of Strata",
        ),
        ({"role": "cpu_worker"}, "a gateway takes no cpu_worker"),
        ({"role": "gateway"}, "a gateway takes no gateway"),
        ({"role": "\u2603"}, "a gateway takes no \u2603"),
    ],
)
async def test_refused_for_good(hello: dict[str, object], reason: str, directory: RunDirectory) -> None:
    """Another version, or a role that has no business here: refused with the reason, and not let in."""
    gateway = ServerSide()
    async with server(directory, gateway) as server_link:
        # Without a name of its own, too: zmq then makes one up that is no text.
        for name in (b"stager.c1.1", b""):
            stager = BareClient(directory, name)
            await stager.say_hello(**hello)  # type: ignore[arg-type]
            assert await stager.hear() == Refusal(reason=reason, is_final=True)
            stager.close()
        assert all(peer.state is PeerState.ABSENT for peer in server_link.peers.values())


async def test_strangers(directory: RunDirectory) -> None:
    """Whoever speaks without having said Hello is told to begin with it."""
    async with server(directory, ServerSide()):
        stranger = BareClient(directory)
        for message in (Ready(capabilities={}), BEAT, TokenChunk(request_id="r", token_ids=[1])):
            await stranger.say(message)
            assert isinstance(await stranger.hear(), Refusal)
        stranger.close()


async def test_nonsense_from_a_client(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no message, too many frames, too few, a message of the other direction, and a stranger
    that has gone before it could be refused: each is logged, and the link goes on for everyone else."""
    gateway = ServerSide()
    async with server(directory, gateway):
        with living(directory, Role.STAGER, "c1"):
            stager = BareClient(directory)
            await stager.say_hello()
            await stager.hear()
            nameless = BareClient(directory, b"")
            for connection in (stager, nameless):
                await connection.send(b"\xc1nonsense")
                await connection.send(b"")
                await connection.send(b"a", b"b", b"c")
                await connection.say(AbortRequest(request_id="r"))
            for _ in range(100):
                await nameless.say(Ready(capabilities={}))
            nameless.close()
            await stager.say(Ready(capabilities={}))
            assert [await gateway.next() for _ in range(2)] == [("greeted", Role.STAGER), ("ready", {})]
        stager.close()
    assert caplog.text.count("stager.c1.1 sent a message that is not understood") == 4


async def test_silence(directory: RunDirectory) -> None:
    """A worker that lives and says nothing is stuck: given up after the time-out, which its losses count."""
    gateway = ServerSide()
    async with server(directory, gateway, MUTE) as server_link:
        with living(directory, Role.STAGER, "c1"):
            stager = BareClient(directory)
            await stager.say_hello()
            assert isinstance(await stager.hear(), Init)
            assert await gateway.next() == ("greeted", Role.STAGER)
            reason = await gateway.until("lost")
            assert str(reason).startswith("it has been silent for 0.")
            peer = server_link.peers[Role.STAGER]
            assert (peer.num_losses, peer.heartbeat) == (1, None)
        stager.close()


# A server played by hand.


async def test_death_of_the_server(directory: RunDirectory) -> None:
    """A client lets go when the server's lock is free, and greets the next one; what the first did not take
    is not said to the second."""
    stager = ClientSide()
    async with client(directory, stager) as (client_link, _):
        with living(directory, Role.GATEWAY, "s1"):
            first = BareServer(directory)
            hello = await first.hear(Hello)
            assert hello == Hello(
                role="stager",
                incarnation="c1",
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint="model",
                pid=1,
            )
            await first.say(Init(incarnation="s1"))
            assert (await first.hear(Ready)) == Ready(capabilities={"device": "cpu"})
            first.close()
            for _ in range(50):
                client_link.post(TokenChunk(request_id="old", token_ids=[1]))
        assert await stager.until("detached") == "its process died"
        with living(directory, Role.GATEWAY, "s2"):
            second = BareServer(directory)
            await second.hear(Hello)
            await second.say(Init(incarnation="s2"))
            await second.hear(Ready)
            client_link.post(TokenChunk(request_id="new", token_ids=[1]))
            assert await second.hear(TokenChunk) == TokenChunk(request_id="new", token_ids=[1])
            second.close()


async def test_a_server_that_was_replaced(directory: RunDirectory) -> None:
    """A successor that has the lock before anyone looked is noticed by its name."""
    stager = ClientSide()
    async with client(directory, stager):
        with living(directory, Role.GATEWAY, "s1"):
            first = BareServer(directory)
            await first.hear(Hello)
            await first.say(Init(incarnation="s1"))
            await first.hear(Ready)
        with living(directory, Role.GATEWAY, "s2"):
            assert await stager.until("detached") == "it was replaced"
        first.close()


async def test_the_server_dies_while_the_client_attaches(directory: RunDirectory) -> None:
    """Attaching may take long; it is broken off, and what was begun is let go of."""
    stager = ClientSide()
    stager.may_attach.clear()
    async with client(directory, stager):
        with living(directory, Role.GATEWAY, "s1"):
            gateway = BareServer(directory)
            await gateway.hear(Hello)
            await gateway.say(Init(incarnation="s1"))
            assert await stager.next() == ("attaching", "s1")
            gateway.close()
        assert await stager.next() == ("detached", "its process died")


async def test_nonsense_from_the_server(directory: RunDirectory) -> None:
    """In answer to Hello, or later: the client begins anew, and does not end."""
    stager = ClientSide()
    async with client(directory, stager):
        with living(directory, Role.GATEWAY, "s1"):
            gateway = BareServer(directory)
            await gateway.hear(Hello)
            await gateway.send(b"nonsense")
            await gateway.hear(Hello)
            await gateway.say(Init(incarnation="s1"))
            await gateway.hear(Ready)
            await gateway.send(b"nonsense")
            assert await stager.until("attached") is None
            reason = await stager.until("detached")
            assert str(reason).startswith("gateway sent a message that is not understood")
            await gateway.hear(Hello)
            gateway.close()


async def test_a_late_init(directory: RunDirectory) -> None:
    """The answer to a Hello that was repeated comes when all is set up already: it changes nothing."""
    stager = ClientSide()
    async with client(directory, stager):
        with living(directory, Role.GATEWAY, "s1"):
            gateway = BareServer(directory)
            await gateway.hear(Hello)
            await gateway.say(Init(incarnation="s1"))
            await gateway.say(Init(incarnation="s1"))
            await gateway.say(ForgetPrompt(request_id="r"))
            events = [await stager.next() for _ in range(3)]
            assert sorted(what for what, _ in events) == ["attached", "attaching", "said"]
            gateway.close()


async def test_refused_by_the_server(directory: RunDirectory) -> None:
    """The reason of a final refusal is what the process ends with; any other is waited out."""
    async with client(directory, ClientSide()) as (_, task):
        with living(directory, Role.GATEWAY, "s1"):
            gateway = BareServer(directory)
            await gateway.hear(Hello)
            await gateway.say(Refusal(reason="not now", is_final=False))
            await gateway.hear(Hello)
            await gateway.say(Refusal(reason="run one version of Strata", is_final=True))
            with pytest.raises(StartError, match=r"^run one version of Strata$"):
                await task
            gateway.close()


async def test_a_server_that_does_not_answer(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """Hello is given up after the handshake's time, and tried on a new connection."""
    caplog.set_level(logging.WARNING)
    impatient = CommonConfig(heartbeat_interval_s=0.02, handshake_timeout_s=0.2)
    async with client(directory, ClientSide(), impatient):
        with living(directory, Role.GATEWAY, "s1"):
            gateway = BareServer(directory)
            names = []
            for _ in range(2):
                await gateway.hear(Hello)
                names.append(gateway._peer[0])
            gateway.close()
    assert names == [b"stager.c1.1", b"stager.c1.2"]
    assert "lost the gateway: no answer to Hello" in caplog.text
