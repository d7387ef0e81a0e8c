"""Event streams: framing, life signs, and clients that are gone."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.sse import EventStream, event_stream

Play = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def streaming(
    play: Play, keepalive_interval_s: float = 60, comment: Callable[[], str] = lambda: "working"
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """A server whose one page is a stream on which `play` is played."""

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"x-request-id": "1"}
        async with event_stream(request, headers, keepalive_interval_s, comment) as stream:
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


async def test_a_silent_stream_says_how_far_it_is() -> None:
    gone_on = asyncio.Event()
    numbers = itertools.count()

    async def play(stream: EventStream) -> None:
        await gone_on.wait()
        await stream.send(1)

    async with streaming(play, 0.01, lambda: f"step {next(numbers)}") as client:
        response = await client.get("/")
        for number in range(3):
            assert await response.content.readline() == f": step {number}\n".encode()
            assert await response.content.readline() == b"\n"
        gone_on.set()
        rest = await response.read()
    assert rest.endswith(b"data: 1\n\n")


async def test_a_comment_is_one_line_whatever_it_says() -> None:
    """A line break would end it, and the rest would be an event."""

    async def play(stream: EventStream) -> None:
        await asyncio.Event().wait()

    async with streaming(play, 0.01, lambda: "one\n\ndata: two\r\nthree") as client:
        response = await client.get("/")
        assert await response.content.readline() == b": one data: two three\n"
        assert await response.content.readline() == b"\n"
        response.close()


async def test_no_comment_splits_an_event() -> None:
    """Neither a short one nor one that leaves in many packets, however often comments are due."""
    events = ["x" * size for size in (1, 100, 1 << 20, 5, 3 << 20, 7)]

    async def play(stream: EventStream) -> None:
        for event in events:
            await stream.send(event)
            await asyncio.sleep(0.003)

    async with streaming(play, 0.001) as client:
        body = await (await client.get("/")).text()
    blocks = body.removesuffix("\n\n").split("\n\n")
    assert [block for block in blocks if block != ": working"] == [f'data: "{event}"' for event in events]
    assert len(blocks) > len(events)


class HeldResponse:
    """A response whose client reads only when it is let."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_read = asyncio.Event()

    async def write(self, data: bytes) -> None:
        self.written.append(data)
        await self.is_read.wait()


async def test_behind_an_event_that_is_not_read_no_comments_queue_up() -> None:
    """And the stream beside it goes on."""
    held, free = HeldResponse(), HeldResponse()
    free.is_read.set()
    streams = [EventStream(response) for response in (held, free)]  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(streams[0].send(1))
        await asyncio.sleep(0)
        comments = [group.create_task(stream.keep_alive(0.001, lambda: "working")) for stream in streams]
        while len(free.written) < 5:  # noqa: ASYNC110 - comments come as time passes
            await asyncio.sleep(0.001)
        assert held.written == [b"data: 1\n\n"]
        held.is_read.set()
        await sending
        while len(held.written) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for task in comments:
            task.cancel()
    assert set(held.written[1:]) == set(free.written) == {b": working\n\n"}


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
