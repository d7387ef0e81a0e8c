"""The sockets of a link: how they are made, written to without waiting, and closed."""

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

import zmq
import zmq.asyncio

_log = logging.getLogger(__name__)

# Large enough for every message of every running request; a peer so far behind is as good as lost.
_HIGH_WATER_MARK = 10_000
# How long the last word of a process may take to leave it.
_LINGER_MS = 1000


class Outbox:
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


def readable(address: bytes) -> str:
    return address.decode("utf-8", "replace")


def open_socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
