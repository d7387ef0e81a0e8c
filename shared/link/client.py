"""The connecting side of a link: finds its server, again and again where that is replaced."""

import asyncio
import itertools
import logging
import time
from typing import Protocol

import zmq
import zmq.asyncio

from shared.codec import decode_from_binding, encode
from shared.config import CommonConfig
from shared.errors import ProtocolError, StartError
from shared.link.identity import LEFT, STOPS, Identity
from shared.link.transport import Outbox, open_socket
from shared.messages import (
    PROTOCOL_VERSION,
    Farewell,
    FromBinding,
    Heartbeat,
    Hello,
    Init,
    Message,
    Ready,
    Refusal,
)
from shared.run_directory import LOOK_INTERVAL_S, Role, RunDirectory

_log = logging.getLogger(__name__)

_HELLO_INTERVAL_S = 1.0


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
        self._outbox: Outbox | None = None

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
                await asyncio.sleep(LOOK_INTERVAL_S)
                continue
            reason = await self._session()
            is_orderly = reason.startswith(LEFT)
            left = sighting.incarnation if is_orderly else ""
            level = logging.INFO if is_orderly else logging.WARNING
            _log.log(level, "lost the %s: %s", self._server, reason)
            # Whatever ended the session may end the next one as quickly.
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _session(self) -> str:
        """One connection to one incarnation of the server; returns why it ended."""
        socket = open_socket(zmq.DEALER)
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
        reason = STOPS
        self._outbox = outbox = Outbox()
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
                await asyncio.sleep(LOOK_INTERVAL_S)
                continue
            if isinstance(message, Init):
                return message
        return None

    async def _serve(self, socket: zmq.asyncio.Socket, init: Init, outbox: Outbox) -> str:
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
                    return f"{LEFT}: {reason}"
                case _:
                    self._listener.message(message)

    async def _beat(self) -> str:
        while True:
            self.post(self._listener.heartbeat())
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def _watch(self, incarnation: str) -> str:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            sighting = self._directory.look_at(self._server)
            if not sighting.is_alive:
                return "its process died"
            if sighting.incarnation != incarnation:
                return "it was replaced"
