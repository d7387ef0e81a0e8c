"""Many requests, and clients that leave, dawdle or push: each gets its due and harms no other."""

import asyncio
import http.client
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from tests.support.stack import (
    DONE,
    Stack,
    events,
    first_text,
    measured,
    serving,
    stack_files,
    strata_command,
    streaming_body,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

COMPLETIONS = "/v1/completions"
# Idle is a gpu_worker that used less than this share of a CPU over the interval.
_IDLE_SHARE = 0.2
_IDLE_INTERVAL_S = 0.7


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def wait_idle(stack: Stack) -> None:
    """Waits until nothing runs or waits in the gateway, and the gpu_worker computes nothing either."""
    stack.wait_counters(0, 0)
    wait_for(lambda: _cpu_share(stack) < _IDLE_SHARE, 10, "an idle gpu_worker")


def _cpu_share(stack: Stack) -> float:
    before, began = _cpu_seconds(stack), time.monotonic()
    time.sleep(_IDLE_INTERVAL_S)
    return (_cpu_seconds(stack) - before) / (time.monotonic() - began)


def _cpu_seconds(stack: Stack) -> float:
    with open(f"/proc/{stack.pid('gpu_worker')}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def assert_serves(stack: Stack) -> None:
    answer = stack.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2})
    assert answer.status == 200, answer.body


def test_settings_come_from_file_variables_and_flags(endless_stack: Stack) -> None:
    """In rising order: the file's queue and aliases, the variable's places, the flag's name."""
    names = [model["id"] for model in endless_stack.request("GET", "/v1/models").json["data"]]
    assert names == ["of-the-flag" * 60, "a", "b"]


def test_a_misspelt_variable_is_pointed_out_once(endless_stack: Stack) -> None:
    """Not by each of the five processes."""
    assert endless_stack.log.count("the variable STRATA_PARALEL is set, but nothing reads it") == 1


async def test_a_full_queue_refuses_with_the_time_to_come_back(
    endless_stack: Stack, session: aiohttp.ClientSession
) -> None:
    url = f"{endless_stack.url}{COMPLETIONS}"
    async with AsyncExitStack() as open_streams:
        running = [
            await open_streams.enter_async_context(session.post(url, json=streaming_body())) for _ in "ab"
        ]
        for response in running:
            await first_text(events(response))
        for _ in "cd":
            await open_streams.enter_async_context(session.post(url, json=streaming_body()))
        await asyncio.to_thread(endless_stack.wait_counters, 2, 2)
        refused = endless_stack.post(COMPLETIONS, {"prompt": "Once"})
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["Retry-After"]) <= 120
        with (
            openai.OpenAI(base_url=f"{endless_stack.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(model="a", prompt="Once")
    await asyncio.to_thread(wait_idle, endless_stack)
    assert_serves(endless_stack)
    assert 'strata_request_failure_total{code="queue_full"' in str(
        endless_stack.request("GET", "/metrics").body
    )


async def test_who_waits_is_kept_alive_and_served_in_turn(
    endless_stack: Stack, session: aiohttp.ClientSession
) -> None:
    """Comments go out meanwhile, which clients pass over and proxies take as life."""
    url = f"{endless_stack.url}{COMPLETIONS}"
    async with AsyncExitStack() as open_streams:
        running = [
            await open_streams.enter_async_context(session.post(url, json=streaming_body())) for _ in "ab"
        ]
        await asyncio.to_thread(endless_stack.wait_counters, 2, 0)
        first = await open_streams.enter_async_context(session.post(url, json=streaming_body(max_tokens=3)))
        await asyncio.to_thread(endless_stack.wait_counters, 2, 1)
        second = await open_streams.enter_async_context(session.post(url, json=streaming_body(max_tokens=3)))
        await asyncio.to_thread(endless_stack.wait_counters, 2, 2)
        assert await first.content.readline() == b": 0 requests ahead, 2 running\n"
        for response in running:
            response.close()
        for response in (first, second):
            *_, end, last = [event async for event in events(response)]
            assert last == DONE
            # A comment came in between, so it was waiting for longer than between two of them.
            if response is first:
                assert end["timings"]["queue_ms"] > 200
    await asyncio.to_thread(wait_idle, endless_stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_waiting_frees_the_place_in_the_queue(
    endless_stack: Stack, session: aiohttp.ClientSession, stream: bool
) -> None:
    url = f"{endless_stack.url}{COMPLETIONS}"
    async with AsyncExitStack() as open_streams:
        for _ in "ab":
            await open_streams.enter_async_context(session.post(url, json=streaming_body()))
        await asyncio.to_thread(endless_stack.wait_counters, 2, 0)
        waiting = asyncio.ensure_future(_ask(session, url, streaming_body(stream=stream)))
        await asyncio.to_thread(endless_stack.wait_counters, 2, 1)
        waiting.cancel()
        began = time.monotonic()
        await asyncio.to_thread(endless_stack.wait_counters, 2, 0)
        measured("departure of who waits to the free place", time.monotonic() - began)
    await asyncio.to_thread(wait_idle, endless_stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_the_prompt_stops_reading_it(
    endless_stack: Stack, session: aiohttp.ClientSession, stream: bool
) -> None:
    prompt = [index % 4000 for index in range(12_000)]
    body = streaming_body(prompt=prompt, stream=stream)
    asking = asyncio.ensure_future(_ask(session, f"{endless_stack.url}{COMPLETIONS}", body))
    await asyncio.to_thread(endless_stack.wait_counters, 1, 0)
    asking.cancel()
    began = time.monotonic()
    await asyncio.to_thread(wait_idle, endless_stack)
    measured("departure during the prompt to an idle gpu_worker", time.monotonic() - began)
    assert_serves(endless_stack)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_the_answer_stops_writing_it(
    endless_stack: Stack, session: aiohttp.ClientSession, stream: bool
) -> None:
    body = streaming_body(max_tokens=20_000, stream=stream)
    asking = asyncio.ensure_future(_ask(session, f"{endless_stack.url}{COMPLETIONS}", body))
    await asyncio.to_thread(endless_stack.wait_counters, 1, 0)
    await asyncio.to_thread(wait_for, lambda: _cpu_share(endless_stack) > _IDLE_SHARE, 10, "the answer")
    asking.cancel()
    began = time.monotonic()
    await asyncio.to_thread(endless_stack.wait_counters, 0, 0)
    measured("departure during the answer to the free place", time.monotonic() - began)
    await asyncio.to_thread(wait_idle, endless_stack)
    assert_serves(endless_stack)
    assert 'code="client_closed"' in str(endless_stack.request("GET", "/metrics").body)


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """Asks and reads to the end, unless cancelled; then the connection is closed."""
    async with session.post(url, json=body) as response:
        return [event async for event in events(response)]


async def test_a_slow_reader_slows_only_itself(endless_stack: Stack, session: aiohttp.ClientSession) -> None:
    """It reads nothing until the gpu_worker is long done; its place is free by then, its answer whole."""
    num_tokens = 400
    body = streaming_body(max_tokens=num_tokens, stream_options={"include_usage": True})
    parts = urlsplit(endless_stack.url)
    with socket.socket() as slow:
        # Little room on the way, or the kernel would take the whole answer.
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        slow.connect((parts.hostname, parts.port))
        slow.sendall(_raw_request(COMPLETIONS, body))
        await asyncio.to_thread(endless_stack.wait_counters, 1, 0)
        began = time.monotonic()
        quick = await _ask(session, f"{endless_stack.url}{COMPLETIONS}", streaming_body(max_tokens=40))
        assert quick[-1] == DONE
        assert time.monotonic() - began < 20
        await asyncio.to_thread(endless_stack.wait_counters, 0, 0, 60)
        received = await asyncio.to_thread(_read_all, slow)
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    assert json.loads(lines[-2].removeprefix(b"data: "))["usage"]["completion_tokens"] == num_tokens


def _raw_request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _read_all(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    received = bytearray()
    while piece := connection.recv(65536):
        received += piece
    return bytes(received)


def test_half_a_request_holds_no_place(endless_stack: Stack) -> None:
    """The rest of the body never comes; then the connection breaks."""
    parts = urlsplit(endless_stack.url)
    whole = _raw_request(COMPLETIONS, streaming_body())
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        connection.sendall(whole[:-5])
        assert endless_stack.counters() == (0, 0)
        assert_serves(endless_stack)
    endless_stack.wait_counters(0, 0)


def test_requests_on_one_connection_survive_a_refusal(endless_stack: Stack) -> None:
    parts = urlsplit(endless_stack.url)
    bad, good = {"prompt": ""}, {"prompt": "Once", "max_tokens": 1}
    requests = [
        _raw_request(COMPLETIONS, body).replace(b"HTTP/1.0", b"HTTP/1.1") for body in (good, bad, good, bad)
    ]
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
        connection.sendall(
            b"".join(requests[:-1]) + requests[-1].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        received = _read_all(connection)
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1 400 Bad Request") == 2


async def test_clients_that_come_and_go_leave_no_trace(
    endless_stack: Stack, session: aiohttp.ClientSession
) -> None:
    """Sixty of them, each leaving at some moment of its own: queued, reading, writing, or refused."""
    rng = random.Random(5)
    num_files = _num_open_files(endless_stack)

    async def come_and_go(patience_s: float, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await _ask(session, f"{endless_stack.url}{COMPLETIONS}", body)
        except TimeoutError:
            return

    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            prompt = [rng.randrange(4000) for _ in range(rng.choice((1, 20, 400)))]
            body = streaming_body(
                prompt=prompt, max_tokens=rng.choice((1, 10, 2000)), stream=rng.random() < 0.7
            )
            group.create_task(come_and_go(rng.uniform(0, 3), body))
    await asyncio.to_thread(wait_idle, endless_stack)
    assert_serves(endless_stack)
    assert "an unexpected error" not in endless_stack.log
    assert "Error handling request" not in endless_stack.log
    wait_for(lambda: _num_open_files(endless_stack) <= num_files + 2, 10, "closed connections")


def _num_open_files(stack: Stack) -> int:
    return len(os.listdir(f"/proc/{stack.pid('gateway')}/fd"))


@pytest.fixture
def exact_stack() -> Iterator[Stack]:
    """A stack whose products do not depend on how many tokens are multiplied at once: elsewhere the last bit
    of a sum can decide between two codes of an activation, and that between two tokens."""
    with serving("--deterministic") as running:
        processes = running.wait_ready()["processes"]
        for role in ("gpu_worker", "cpu_worker"):
            assert processes[role]["kernels"].endswith("-rows")
        yield running


async def test_twenty_at_once_get_the_answers_they_would_get_alone(
    exact_stack: Stack, session: aiohttp.ClientSession
) -> None:
    """Five times as many as are computed at once, long prompts between short ones, greedy and sampled."""
    stack = exact_stack
    bodies = [
        {
            "prompt": f"Number {index} says " + "again and " * (7 * (index % 5)),
            "max_tokens": 12,
            "temperature": 0 if index % 2 else 1.5,
            "seed": index,
            "stream": index % 3 == 0,
        }
        for index in range(20)
    ]
    alone = [await _text(session, stack, body) for body in bodies]
    began = time.monotonic()
    together = await asyncio.gather(*(_text(session, stack, body) for body in bodies))
    measured("twenty requests at once", time.monotonic() - began)
    assert together == alone
    stack.wait_counters(0, 0)


async def _text(session: aiohttp.ClientSession, stack: Stack, body: dict[str, Any]) -> str:
    async with session.post(f"{stack.url}{COMPLETIONS}", json=body) as response:
        assert response.status == 200
        if not body["stream"]:
            text: str = (await response.json())["choices"][0]["text"]
            return text
        return "".join([event["choices"][0]["text"] async for event in events(response) if event != DONE])


def test_more_connections_than_descriptors() -> None:
    """Idle ones, from a scanner perhaps: the stack stays up, and serves again when they are gone."""
    with stack_files() as stack:
        limited = ("/bin/sh", "-c", 'ulimit -n 128; exec "$@"', "sh", strata_command())
        stack.launch(*limited, "serve", "--port", "0", "--run-dir", str(stack.run_dir))
        stack.wait_served()
        address = urlsplit(stack.url)
        kept = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)

        def memory_of_the_gateway() -> int:
            kept.request("GET", "/health")
            response = kept.getresponse()
            assert response.status == 200
            memory: int = json.loads(response.read())["processes"]["gateway"]["resident_memory_bytes"]
            return memory

        assert memory_of_the_gateway() > 0
        with ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection((address.hostname, address.port), timeout=5))
            # Even that cannot be read any more.
            wait_for(lambda: memory_of_the_gateway() == 0, 10, "a gateway without descriptors")
            until = time.monotonic() + 2.5  # The supervisor looks once a second.
            while time.monotonic() < until:
                assert stack.supervisor.poll() is None
                assert memory_of_the_gateway() == 0
        kept.close()
        stack.wait_ready()
        assert_serves(stack)
        assert stack.stop() == 0
        stack.assert_nothing_left()
