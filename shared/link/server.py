"""The binding side of a link: knows its peers, greets them, and notices when they are gone."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import zmq
import zmq.asyncio

from shared.codec import decode_from_connecting, encode
from shared.config import CommonConfig
from shared.errors import ProtocolError
from shared.link.identity import LEFT, STOPS, Identity
from shared.link.transport import Outbox, open_socket, readable
from shared.messages import (
    PROTOCOL_VERSION,
    Farewell,
    FromConnecting,
    Heartbeat,
    Hello,
    Init,
    Message,
    Ready,
    Refusal,
)
from shared.run_directory import LOOK_INTERVAL_S, Role, RunDirectory

_log = logging.getLogger(__name__)


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

    def greet(self, role: Role) -> Init | None:
        """A new incarnation of `role` says Hello: prepare what it is to attach to. None where that cannot be
        had now; the peer then asks again."""

    def peer_ready(self, peer: Peer) -> None:
        """The peer serves now."""

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """The peer is gone; nothing more will come from this incarnation."""

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """A message that is not part of the link itself (heartbeats included, for their content)."""


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
        self._outbox = Outbox()

    async def run(self) -> None:
        """Serves the link until cancelled."""
        socket = open_socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(self._directory.address(self._identity.role))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(socket), name="link reader")
                group.create_task(self._outbox.write(socket), name="link writer")
                group.create_task(self._watch(), name="link watch")
        except asyncio.CancelledError:
            for role in self.peers:
                self.post(role, Farewell(reason=STOPS))
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
            _log.error("%s does not take messages; one was dropped", readable(address))
        return is_queued

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            address, *payload = await socket.recv_multipart()
            try:
                message = decode_from_connecting(b"".join(payload), readable(address))
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
                self._lose(peer, f"{LEFT}: {reason}")
            case _:
                if isinstance(message, Heartbeat):
                    peer.heartbeat = message
                self._listener.message(peer, message)

    def _greet(self, address: bytes, hello: Hello) -> None:
        refusal = self._objection(hello)
        if refusal is not None:
            _log.error("refused %s: %s", readable(address), refusal.reason)
            self._post_to(address, refusal)
            return
        peer = self.peers[Role(hello.role)]
        if peer.state is not PeerState.ABSENT and peer.address != address:
            is_same = peer.incarnation == hello.incarnation
            self._lose(peer, "it began anew" if is_same else "it was replaced")
        if peer.state is PeerState.ABSENT:
            peer.incarnation, peer.pid, peer.address = hello.incarnation, hello.pid, address
            peer.heartbeat, peer.init = None, self._listener.greet(peer.role)
            if peer.init is None:
                self._post_to(address, Refusal(reason="not now; ask again", is_final=False))
                return
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
            due = now + LOOK_INTERVAL_S
            await asyncio.sleep(LOOK_INTERVAL_S)
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
        level = logging.INFO if reason.startswith(LEFT) else logging.WARNING
        _log.log(level, "lost the %s: %s", peer.role, reason)
        peer.state = PeerState.ABSENT
        peer.heartbeat = None
        peer.num_losses += 1
        self._listener.peer_lost(peer, reason)
