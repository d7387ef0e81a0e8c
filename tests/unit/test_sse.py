"""Event streams: framing, life signs, and clients that are gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.sse import EventStream, event_stream

Play = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def streaming(
    play: Play, keepalive_interval_s: float = 60
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A server whose one page is a stream on which `play` is played."""

    async def handler(request: web.Request) -> web.StreamResponse:
        async with event_stream(request, {"x-request-id": "1"}, keepalive_interval_s) as stream:
            await play(stream)
        return stream.response

    app = web.Application()
    app.add_routes([web.get("/", handler)])
    async with TestClient(TestServer(app, handler_cancellation=True)) as client:
        yield client


async def test_events_are_one_line_each_and_utf8() -> None:
    async def play(stream: EventStream) -> None:
        await stream.send({"text": "é\n\u2028😀"})
        await stream.done()

    async with streaming(play) as client:
        response = await client.get("/")
        assert response.headers["x-request-id"] == "1"
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        body = await response.read()
    assert body == 'data: {"text":"é\\n\u2028😀"}\n\ndata: [DONE]\n\n'.encode()


async def test_a_silent_stream_says_that_it_lives() -> None:
    gone_on = asyncio.Event()

    async def play(stream: EventStream) -> None:
        await gone_on.wait()
        await stream.send(1)

    async with streaming(play, 0.01) as client:
        response = await client.get("/")
        for _ in range(3):
            assert await response.content.readline() == b": still working\n"
            assert await response.content.readline() == b"\n"
        gone_on.set()
        rest = await response.read()
    assert rest.endswith(b"data: 1\n\n")


async def test_a_busy_stream_says_nothing_else() -> None:
    async def play(stream: EventStream) -> None:
        for number in range(20):
            await stream.send(number)
            await asyncio.sleep(0.001)

    async with streaming(play, 5) as client:
        body = await (await client.get("/")).read()
    assert b"working" not in body


async def test_the_stream_opens_before_the_first_event() -> None:
    """A client that waits for its turn sees that it was accepted."""
    may_begin = asyncio.Event()

    async def play(stream: EventStream) -> None:
        await may_begin.wait()

    async with streaming(play) as client:
        response = await client.get("/")
        assert response.status == 200
        may_begin.set()
        assert await response.read() == b""


async def test_nothing_goes_on_when_the_client_has_left() -> None:
    """The handler is cancelled, and with it the sign of life."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def play(stream: EventStream) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set_result("cancelled")
            raise

    async with streaming(play, 0.01) as client:
        response = await client.get("/")
        await response.content.readline()
        response.close()
        assert await ended == "cancelled"
        while any(task.get_name() == "keep-alive" for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0)
