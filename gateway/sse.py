"""Server-sent events: the response of a streamed answer.

Writing waits for the client, so a slow one slows its own stream. While there is nothing to say a comment goes
out now and then, which says how far the request is: proxies and clients drop connections that look dead, and
people give up on answers that do.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks buffering proxies to pass events on at once.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """An open event stream to one client."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response
        self._written_at = time.monotonic()
        self._is_sending = False

    async def send(self, payload: Any) -> None:
        """One event with a JSON body."""
        await self._send(f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n")

    async def done(self) -> None:
        """The marker that OpenAI clients take as the end."""
        await self._send("data: [DONE]\n\n")

    async def keep_alive(self, interval_s: float, comment: Callable[[], str]) -> None:
        """Sends a comment whenever nothing was sent for `interval_s`; runs until cancelled."""
        while True:
            # Not woken by what is sent: that would be a change of tasks for every token.
            rest_s = self._written_at + interval_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            elif self._is_sending:
                # The client has yet to read an event; a comment would only wait behind it.
                await asyncio.sleep(interval_s)
            else:
                # A line break would end the comment, and begin something else.
                await self._write(f": {' '.join(comment().split())}\n\n")

    async def _send(self, event: str) -> None:
        self._is_sending = True
        try:
            await self._write(event)
        finally:
            self._is_sending = False

    async def _write(self, text: str) -> None:
        # In one piece: what others write meanwhile comes before it or after it.
        await self.response.write(text.encode("utf-8"))
        self._written_at = time.monotonic()


@asynccontextmanager
async def event_stream(
    request: web.Request, headers: dict[str, str], keepalive_interval_s: float, comment: Callable[[], str]
) -> AsyncIterator[EventStream]:
    """Opens the response and keeps it alive, with comments made when they are needed, for as long as the
    context lasts."""
    response = web.StreamResponse(headers=_HEADERS | headers)
    await response.prepare(request)
    stream = EventStream(response)
    comments = stream.keep_alive(keepalive_interval_s, comment)
    keep_alive = asyncio.create_task(comments, name="keep-alive")
    try:
        yield stream
    finally:
        keep_alive.cancel()
        await asyncio.gather(keep_alive, return_exceptions=True)
    await response.write_eof()
