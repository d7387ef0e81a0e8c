"""The two sides of a control link for tests: real ones that note what happens to them, and bare sockets.

A bare socket plays a side that does what no proper process does: die without a word, repeat itself, send
nonsense.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import zmq
import zmq.asyncio

from shared.arena import SegmentDescriptor
from shared.codec import decode_from_binding, decode_from_connecting, encode
from shared.config import CommonConfig
from shared.link import Identity, LinkClient, LinkServer, Peer
from shared.messages import (
    PROTOCOL_VERSION,
    FromBinding,
    FromConnecting,
    Heartbeat,
    Hello,
    Init,
    Message,
)
from shared.run_directory import Role, RoleLock, RunDirectory

QUICK = CommonConfig(heartbeat_interval_s=0.02, heartbeat_timeout_s=60, handshake_timeout_s=60)
# Beats once when it is greeted, and then not before the test is over.
MUTE = CommonConfig(heartbeat_interval_s=1000, heartbeat_timeout_s=0.3, handshake_timeout_s=60)
BEAT = Heartbeat(state="ready", activity="serving", progress=1.0, gauges={"a": 0.5})
SEGMENT = SegmentDescriptor("strata-x", 4096)

Event = tuple[str, object]


class Side:
    """Notes what happens to one side, in order."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def note(self, what: str, value: object) -> None:
        self._events.put_nowait((what, value))

    async def next(self) -> Event:
        """The next thing that happened, heartbeats aside."""
        while True:
            event = await self._events.get()
            if not isinstance(event[1], Heartbeat):
                return event

    async def until(self, what: str) -> object:
        """Waits for something to happen, whatever happens before it; returns what was noted."""
        while True:
            event, value = await self.next()
            if event == what:
                return value

    async def next_beat(self) -> Heartbeat:
        while True:
            _, value = await self._events.get()
            if isinstance(value, Heartbeat):
                return value


class ServerSide(Side):
    """A binding process."""

    def greet(self, role: Role) -> Init:
        self.note("greeted", role)
        return Init(incarnation="s1", segment=SEGMENT, ring_tokens=7)

    def peer_ready(self, peer: Peer) -> None:
        self.note("ready", peer.capabilities)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        self.note("lost", reason)

    def message(self, peer: Peer, message: FromConnecting) -> None:
        self.note("said", message)


class ClientSide(Side):
    """A connecting process; `failures` are raised by its first attempts to attach."""

    def __init__(self) -> None:
        super().__init__()
        self.may_attach = asyncio.Event()
        self.may_attach.set()
        self.failures: list[Exception] = []

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        self.note("attaching", init.incarnation)
        if self.failures:
            raise self.failures.pop(0)
        await self.may_attach.wait()
        self.note("attached", init.segment)
        return {"device": "cpu"}

    async def detach(self, reason: str) -> None:
        self.note("detached", reason)

    def heartbeat(self) -> Heartbeat:
        return BEAT

    def message(self, message: FromBinding) -> None:
        self.note("said", message)


def identity(role: Role, incarnation: str, model: str = "model") -> Identity:
    return Identity(role, incarnation, model, 1)


@contextmanager
def living(directory: RunDirectory, role: Role, incarnation: str) -> Iterator[None]:
    """A process of that role lives."""
    lock = RoleLock(directory, role, incarnation)
    try:
        yield
    finally:
        lock.release()


@asynccontextmanager
async def running(link: LinkServer | LinkClient) -> AsyncIterator["asyncio.Task[None]"]:
    """A link at work, ended as a process that leaves ends it."""
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def server(
    directory: RunDirectory, side: ServerSide, config: CommonConfig = QUICK
) -> AsyncIterator[LinkServer]:
    """A gateway that expects a gpu_worker and a stager."""
    made = LinkServer(identity(Role.GATEWAY, "s1"), directory, [Role.GPU_WORKER, Role.STAGER], side, config)
    with living(directory, Role.GATEWAY, "s1"):
        async with running(made):
            yield made


@asynccontextmanager
async def client(
    directory: RunDirectory, side: ClientSide, config: CommonConfig = QUICK, model: str = "model"
) -> AsyncIterator[tuple[LinkClient, "asyncio.Task[None]"]]:
    """A stager that looks for the gateway."""
    made = LinkClient(identity(Role.STAGER, "c1", model), directory, Role.GATEWAY, side, config)
    with living(directory, Role.STAGER, "c1"):
        async with running(made) as task:
            yield made, task


class BareSocket:
    """One side played by hand."""

    def __init__(self, kind: int, name: bytes = b"") -> None:
        self._socket = zmq.asyncio.Context.instance().socket(kind)
        self._socket.linger = 0
        if name:
            self._socket.setsockopt(zmq.IDENTITY, name)
        self._peer: list[bytes] = []

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart([*self._peer, *frames])

    async def say(self, message: Message) -> None:
        await self.send(encode(message))

    def close(self) -> None:
        self._socket.close()


class BareClient(BareSocket):
    def __init__(self, directory: RunDirectory, name: bytes = b"stager.c1.1") -> None:
        super().__init__(zmq.DEALER, name)
        self._socket.connect(directory.address(Role.GATEWAY))

    async def hear(self) -> FromBinding:
        return decode_from_binding(await self._socket.recv(), "gateway")

    async def say_hello(
        self, *, role: str = "stager", incarnation: str = "c1", version: int = PROTOCOL_VERSION
    ) -> None:
        await self.say(
            Hello(
                role=role, incarnation=incarnation, protocol_version=version, model_fingerprint="model", pid=1
            )
        )


class BareServer(BareSocket):
    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.bind(directory.address(Role.GATEWAY))

    async def hear(self, kind: type[Message]) -> Message:
        """The next message of that kind; answers go to whoever sent it."""
        while True:
            name, payload = await self._socket.recv_multipart()
            message = decode_from_connecting(payload, "stager")
            if isinstance(message, kind):
                self._peer = [name]
                return message
