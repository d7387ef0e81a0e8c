"""The control link between two processes: handshake, heartbeats, loss and return of the peer.

The stable side binds a ROUTER and is a `LinkServer`; the side that may come and go connects a DEALER and is a
`LinkClient`. Which messages go over the link is not decided here, only that they reach the living peer and no
other: every connection has a transport identity of its own, made of role, incarnation and a running number,
so that words from a dead process, or from a connection that was given up, are not taken for new ones.

A peer is lost when its role's lock is free or in other hands (it died: noticed within `_LOOK_INTERVAL_S`),
when no heartbeat came for `heartbeat_timeout_s` (it is stuck), or when it said Farewell. Both sides then
start over with Hello; neither has to be restarted because the other was.

Heartbeats begin with Init, Ready follows when the connecting side has attached and can serve: while it loads
a model, its heartbeats say how far it is.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn, Protocol

import zmq
import zmq.asyncio

from shared.codec import decode_from_binding, decode_from_connecting, encode
from shared.config import CommonConfig
from shared.errors import ProtocolError, StartError
from shared.messages import (
    PROTOCOL_VERSION,
    Farewell,
    FromBinding,
    FromConnecting,
    Heartbeat,
    Hello,
    Init,
    Message,
    Ready,
    Refusal,
)
from shared.run_directory import Role, RunDirectory

_log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.1
_HELLO_INTERVAL_S = 1.0
# Large enough for every message of every running request; a peer so far behind is as good as lost.
_HIGH_WATER_MARK = 10_000
# How the reason begins where a process said Farewell.
_LEFT = "it left"
_STOPS = "it stops"
# How long the last word of a process may take to leave it.
_LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is on its links."""

    role: Role
    incarnation: str
    model_fingerprint: str
    pid: int


class PeerState(StrEnum):
    """What the binding side knows of one peer."""

    ABSENT = "absent"
    GREETED = "greeted"
    READY = "ready"


@dataclass(slots=True)
class Peer:
    """One expected peer, as the binding side sees it now. `address` is the identity of its connection."""

    role: Role
    state: PeerState = PeerState.ABSENT
    address: bytes = b""
    incarnation: str = ""
    pid: int = 0
    capabilities: Mapping[str, int | float | str] = field(default_factory=dict)
    heartbeat: Heartbeat | None = None
    last_heard: float = 0.0
    init: Init | None = None
    num_losses: int = 0

    def silence_s(self, now: float) -> float:
        """Seconds since its last sign of life."""
        return now - self.last_heard


class ServerListener(Protocol):
    """What the binding process does about its peers. All calls come from the event loop and return soon."""

    def greet(self, role: Role) -> Init:
        """A new incarnation of `role` says Hello: prepare what it is to attach to."""

    def peer_ready(self, peer: Peer) -> None:
        """The peer serves now."""

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """The peer is gone; nothing more will come from this incarnation."""

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """A message that is not part of the link itself (heartbeats included, for their content)."""


class ClientListener(Protocol):
    """What the connecting process does about the side it connects to. Calls come from the event loop."""

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        """Set up what Init offers, however long it takes; returns the capabilities to announce with Ready."""

    async def detach(self, reason: str) -> None:
        """The other side is gone: let go of everything it owned. Also called where attach did not finish."""

    def heartbeat(self) -> Heartbeat:
        """The sign of life to send now."""

    def message(self, message: FromBinding) -> None:
        """A message that is not part of the link itself."""


class _Outbox:
    """Encoded messages that wait to be sent over one socket."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue(_HIGH_WATER_MARK)

    def put(self, *frames: bytes) -> bool:
        """Queues one message; False where too many wait already."""
        try:
            self._queue.put_nowait(frames)
        except asyncio.QueueFull:
            return False
        return True

    async def write(self, socket: zmq.asyncio.Socket) -> NoReturn:
        """Sends what is put until cancelled."""
        while True:
            await _send(socket, await self._queue.get())

    async def write_rest(self, socket: zmq.asyncio.Socket) -> None:
        """Sends what is there, as far as the socket takes it at once, and lets it linger there."""
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        while not self._queue.empty():
            await _send(socket, self._queue.get_nowait(), zmq.NOBLOCK)


class LinkServer:
    """The binding side of a link, for several peers of different roles."""

    def __init__(
        self,
        identity: Identity,
        directory: RunDirectory,
        roles: Sequence[Role],
        listener: ServerListener,
        config: CommonConfig,
    ) -> None:
        self.peers = {role: Peer(role) for role in roles}
        self._identity = identity
        self._directory = directory
        self._listener = listener
        self._heartbeat_timeout_s = config.heartbeat_timeout_s
        self._outbox = _Outbox()

    async def run(self) -> None:
        """Serves the link until cancelled."""
        socket = _socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(self._directory.address(self._identity.role))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(socket), name="link reader")
                group.create_task(self._outbox.write(socket), name="link writer")
                group.create_task(self._watch(), name="link watch")
        except asyncio.CancelledError:
            for role in self.peers:
                self.post(role, Farewell(reason=_STOPS))
            await self._outbox.write_rest(socket)
            raise
        finally:
            socket.close()
            self._directory.remove_sockets(self._identity.role)

    def post(self, role: Role, message: Message) -> bool:
        """Queues a message for the living peer of that role; False where there is none."""
        peer = self.peers[role]
        return peer.state is not PeerState.ABSENT and self._post_to(peer.address, message)

    def _post_to(self, address: bytes, message: Message) -> bool:
        is_queued = self._outbox.put(address, encode(message))
        if not is_queued:
            _log.error("%s does not take messages; one was dropped", _readable(address))
        return is_queued

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            address, *payload = await socket.recv_multipart()
            try:
                message = decode_from_connecting(b"".join(payload), _readable(address))
            except ProtocolError as error:
                _log.error("%s", error)
                continue
            if isinstance(message, Hello):
                self._greet(address, message)
                continue
            peer = self._peer_at(address)
            if peer is None:
                refusal = Refusal(reason="you were given up for dead; begin anew", is_final=False)
                self._post_to(address, refusal)
                continue
            self._hear(peer, message)

    def _peer_at(self, address: bytes) -> Peer | None:
        for peer in self.peers.values():
            if peer.state is not PeerState.ABSENT and peer.address == address:
                return peer
        return None

    def _hear(self, peer: Peer, message: FromConnecting) -> None:
        peer.last_heard = time.monotonic()
        match message:
            case Ready(capabilities=capabilities):
                if peer.state is not PeerState.READY:
                    peer.state, peer.capabilities = PeerState.READY, capabilities
                    self._listener.peer_ready(peer)
            case Farewell(reason=reason):
                self._lose(peer, f"{_LEFT}: {reason}")
            case _:
                if isinstance(message, Heartbeat):
                    peer.heartbeat = message
                self._listener.message(peer, message)

    def _greet(self, address: bytes, hello: Hello) -> None:
        refusal = self._objection(hello)
        if refusal is not None:
            _log.error("refused %s: %s", _readable(address), refusal.reason)
            self._post_to(address, refusal)
            return
        peer = self.peers[Role(hello.role)]
        if peer.state is not PeerState.ABSENT and peer.address != address:
            is_same = peer.incarnation == hello.incarnation
            self._lose(peer, "it began anew" if is_same else "it was replaced")
        if peer.state is PeerState.ABSENT:
            peer.incarnation, peer.pid, peer.address = hello.incarnation, hello.pid, address
            peer.heartbeat, peer.init = None, self._listener.greet(peer.role)
            peer.state = PeerState.GREETED
        peer.last_heard = time.monotonic()
        assert peer.init is not None
        self._post_to(address, peer.init)

    def _objection(self, hello: Hello) -> Refusal | None:
        own = self._identity
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = (
                f"protocol {hello.protocol_version} of the {hello.role} is not {PROTOCOL_VERSION} "
                f"of the {own.role}; run one version of Strata"
            )
        elif hello.role not in self.peers:
            reason = f"a {own.role} takes no {hello.role}"
        elif hello.model_fingerprint != own.model_fingerprint:
            reason = (
                f"the {hello.role} has another model file than the {own.role}; give all processes one --model"
            )
        else:
            return None
        return Refusal(reason=reason, is_final=True)

    async def _watch(self) -> None:
        now = time.monotonic()
        while True:
            due = now + _LOOK_INTERVAL_S
            await asyncio.sleep(_LOOK_INTERVAL_S)
            now = time.monotonic()
            for peer in self.peers.values():
                # Where this process was held up itself, it did not hear anyone meanwhile.
                peer.last_heard = min(now, peer.last_heard + max(0.0, now - due))
                if peer.state is PeerState.ABSENT:
                    continue
                sighting = self._directory.look_at(peer.role)
                if not sighting.is_alive or sighting.incarnation != peer.incarnation:
                    self._lose(peer, "its process died")
                elif peer.silence_s(now) > self._heartbeat_timeout_s:
                    self._lose(peer, f"it has been silent for {peer.silence_s(now):.1f} s")

    def _lose(self, peer: Peer, reason: str) -> None:
        level = logging.INFO if reason.startswith(_LEFT) else logging.WARNING
        _log.log(level, "lost the %s: %s", peer.role, reason)
        peer.state = PeerState.ABSENT
        peer.heartbeat = None
        peer.num_losses += 1
        self._listener.peer_lost(peer, reason)


class LinkClient:
    """The connecting side of a link."""

    def __init__(
        self,
        identity: Identity,
        directory: RunDirectory,
        server: Role,
        listener: ClientListener,
        config: CommonConfig,
    ) -> None:
        self._identity = identity
        self._directory = directory
        self._server = server
        self._listener = listener
        self._config = config
        self._numbers = itertools.count(1)
        self._outbox: _Outbox | None = None

    def post(self, message: Message) -> None:
        """Queues a message for the server; dropped where there is none, whose requests ended with it."""
        if self._outbox is not None and not self._outbox.put(encode(message)):
            _log.error("the %s does not take messages; one was dropped", self._server)

    def beat(self) -> None:
        """Sends a sign of life now, between the regular ones: the state has changed."""
        self.post(self._listener.heartbeat())

    async def run(self) -> None:
        """Keeps the link up until cancelled. Raises StartError where the server refuses this process."""
        left = ""
        while True:
            sighting = self._directory.look_at(self._server)
            # A server that said Farewell takes a moment to be gone; there is no point in greeting it again.
            if not sighting.is_alive or sighting.incarnation == left:
                await asyncio.sleep(_LOOK_INTERVAL_S)
                continue
            reason = await self._session()
            is_orderly = reason.startswith(_LEFT)
            left = sighting.incarnation if is_orderly else ""
            level = logging.INFO if is_orderly else logging.WARNING
            _log.log(level, "lost the %s: %s", self._server, reason)
            # Whatever ended the session may end the next one as quickly.
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _session(self) -> str:
        """One connection to one incarnation of the server; returns why it ended."""
        socket = _socket(zmq.DEALER)
        name = f"{self._identity.role}.{self._identity.incarnation}.{next(self._numbers)}"
        socket.setsockopt(zmq.IDENTITY, name.encode())
        try:
            socket.connect(self._directory.address(self._server))
            init = await self._shake_hands(socket)
            return await self._attached(socket, init) if init is not None else "no answer to Hello"
        except ProtocolError as error:
            return str(error)
        finally:
            # Does not linger: what a lost server has not taken is not for its successor.
            socket.close()

    async def _attached(self, socket: zmq.asyncio.Socket, init: Init) -> str:
        reason = _STOPS
        self._outbox = outbox = _Outbox()
        try:
            reason = await self._serve(socket, init, outbox)
        except asyncio.CancelledError:
            self.post(Farewell(reason=reason))
            await outbox.write_rest(socket)
            raise
        finally:
            self._outbox = None
            await self._listener.detach(reason)
        return reason

    async def _shake_hands(self, socket: zmq.asyncio.Socket) -> Init | None:
        """Says Hello until Init comes; None where the server went away meanwhile."""
        hello = Hello(
            role=self._identity.role,
            incarnation=self._identity.incarnation,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=self._identity.model_fingerprint,
            pid=self._identity.pid,
        )
        deadline = time.monotonic() + self._config.handshake_timeout_s
        while time.monotonic() < deadline and self._directory.look_at(self._server).is_alive:
            await socket.send(encode(hello))
            if not await socket.poll(int(_HELLO_INTERVAL_S * 1000)):
                continue
            message = decode_from_binding(await socket.recv(), self._server)
            if isinstance(message, Refusal):
                if message.is_final:
                    raise StartError(message.reason)
                continue
            if isinstance(message, Init):
                return message
        return None

    async def _serve(self, socket: zmq.asyncio.Socket, init: Init, outbox: _Outbox) -> str:
        """Reads, writes, beats and watches until one of them finds that the session is over."""
        loops = {
            "reader": self._read(socket),
            "writer": outbox.write(socket),
            "heartbeat": self._beat(),
            "watch": self._watch(init.incarnation),
        }
        tasks = [
            asyncio.create_task(loop, name=f"{self._server} link {name}") for name, loop in loops.items()
        ]
        attaching = asyncio.create_task(self._attach(init), name=f"attaching to the {self._server}")
        try:
            done, _ = await asyncio.wait([*tasks, attaching], return_when=asyncio.FIRST_COMPLETED)
            if attaching in done:
                if failure := await attaching:
                    return failure
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return await done.pop()
        finally:
            for task in (*tasks, attaching):
                task.cancel()
            await asyncio.gather(*tasks, attaching, return_exceptions=True)

    async def _attach(self, init: Init) -> str:
        """Returns why it failed, or nothing: what was offered may be gone with a server that just died."""
        try:
            self.post(Ready(capabilities=await self._listener.attach(init)))
        except ProtocolError as error:
            return str(error)
        return ""

    async def _read(self, socket: zmq.asyncio.Socket) -> str:
        while True:
            try:
                message = decode_from_binding(await socket.recv(), self._server)
            except ProtocolError as error:
                return str(error)
            match message:
                case Refusal(reason=reason):
                    return reason
                case Init():
                    continue  # The answer to a Hello that was repeated.
                case Farewell(reason=reason):
                    return f"{_LEFT}: {reason}"
                case _:
                    self._listener.message(message)

    async def _beat(self) -> str:
        while True:
            self.post(self._listener.heartbeat())
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def _watch(self, incarnation: str) -> str:
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            sighting = self._directory.look_at(self._server)
            if not sighting.is_alive:
                return "its process died"
            if sighting.incarnation != incarnation:
                return "it was replaced"


def close_links() -> None:
    """Waits until the last words of this process have left it, for a second at most. All links must have
    ended."""
    zmq.asyncio.Context.instance().term()


async def _send(socket: zmq.asyncio.Socket, frames: Sequence[bytes], flags: int = 0) -> None:
    try:
        await socket.send_multipart(frames, flags)
    except zmq.ZMQError as error:
        # The connection is gone; the watch notices why.
        _log.debug("a message was not delivered: %s", error)


def _readable(address: bytes) -> str:
    return address.decode("utf-8", "replace")


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
