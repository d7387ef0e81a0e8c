"""Server-sent events: the response of a streamed answer.

Writing waits for the client, so a slow one slows its own stream. While there is nothing to say a comment goes
out now and then: proxies and clients drop connections that look dead.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
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

    async def send(self, payload: Any) -> None:
        """One event with a JSON body."""
        await self._write(f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n")

    async def done(self) -> None:
        """The marker that OpenAI clients take as the end."""
        await self._write("data: [DONE]\n\n")

    async def keep_alive(self, interval_s: float) -> None:
        """Sends a comment whenever nothing was sent for `interval_s`; runs until cancelled."""
        while True:
            # Not woken by what is sent: that would be a change of tasks for every token.
            rest_s = self._written_at + interval_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._write(": still working\n\n")

    async def _write(self, text: str) -> None:
        await self.response.write(text.encode("utf-8"))
        self._written_at = time.monotonic()


@asynccontextmanager
async def event_stream(
    request: web.Request, headers: dict[str, str], keepalive_interval_s: float
) -> AsyncIterator[EventStream]:
    """Opens the response and keeps it alive for as long as the context lasts."""
    response = web.StreamResponse(headers=_HEADERS | headers)
    await response.prepare(request)
    stream = EventStream(response)
    keep_alive = asyncio.create_task(stream.keep_alive(keepalive_interval_s), name="keep-alive")
    try:
        yield stream
    finally:
        keep_alive.cancel()
        await asyncio.gather(keep_alive, return_exceptions=True)
    await response.write_eof()
