"""Random kills under load: every request ends in one of the ways it may, the stack is whole afterwards."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.support.stack import DONE, ROLES, Stack, events, is_running, measured, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

NUM_CLIENTS = 6
# Fewer than the supervisor takes for a process that will not stay up.
NUM_KILLS = 6
MAX_KILLS_OF_A_ROLE = 2
# No request waits for ever: a restart takes some seconds on a busy machine, and a request may wait for one.
REQUEST_TIMEOUT_S = 75.0
SEED = 20


async def one_request(session: aiohttp.ClientSession, url: str, rng: random.Random) -> str:
    """Asks once and says how it ended; fails for an end that may not be."""
    body: dict[str, Any] = {
        "prompt": [rng.randrange(4000) for _ in range(rng.choice((1, 30, 300)))],
        "max_tokens": rng.choice((1, 20, 150)),
        "stream": rng.random() < 0.6,
        "temperature": 2,
    }
    if rng.random() < 0.15:
        try:
            async with asyncio.timeout(rng.uniform(0, 1)):
                await _answer_to(session, url, body)
        except TimeoutError:
            return "left"
    return await _answer_to(session, url, body)


async def _answer_to(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status in (429, 503):
                assert int(response.headers["Retry-After"]) >= 1
                code: str = (await response.json())["error"]["code"]
                assert code in ("queue_full", "model_loading", "worker_failed"), code
                return code
            assert response.status == 200
            if not body["stream"]:
                assert (await response.json())["choices"][0]["finish_reason"] in ("stop", "length")
                return "answered"
            *_, end, last = [event async for event in events(response)]
            assert last == DONE
            if "error" in end:
                assert end["error"]["code"] in ("worker_failed", "model_loading"), end
                return "error event"
            assert end["choices"][0]["finish_reason"] in ("stop", "length")
            return "answered"
    except aiohttp.ClientError:
        # Only the gateway's own death may look like this.
        return "connection lost"


async def kill_at_random(stack: Stack, rng: random.Random) -> Counter[str]:
    """Kills processes until it has had its number; returns how often each role was hit."""
    killed: Counter[str] = Counter()
    while killed.total() < NUM_KILLS:
        # Not a wait for something to happen: the moment is to be any.
        await asyncio.sleep(rng.uniform(0.05, 2.5))
        role = rng.choice([role for role in ROLES if killed[role] < MAX_KILLS_OF_A_ROLE])
        health = await asyncio.to_thread(stack.health_if_any)
        pid = health["processes"][role].get("pid") if health is not None else None
        if pid is not None and is_running(pid):
            os.kill(pid, signal.SIGKILL)
            killed[role] += 1
            await asyncio.to_thread(wait_for, partial(_is_noticed, stack, role, pid), 5, "notice of the loss")
    return killed


def _is_noticed(stack: Stack, role: str, pid: int) -> bool:
    health = stack.health_if_any()
    return health is None or health["processes"][role].get("pid") != pid


async def test_random_kills_under_load(endless_stack: Stack) -> None:
    stack, rng = endless_stack, random.Random(SEED)
    ends: Counter[str] = Counter()
    calm = {"prompt": "Once upon", "temperature": 0, "max_tokens": 12}
    before = stack.post("/v1/completions", calm).json["choices"]
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    is_over = False

    async def client(own: random.Random) -> None:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not is_over:
                end = await one_request(session, stack.url, own)
                ends[end] += 1
                if end not in ("answered", "left"):
                    # As a well-behaved client, it does not ask again at once.
                    await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client(random.Random(rng.random())))
        killed = await kill_at_random(stack, rng)
        began = time.monotonic()
        health = await asyncio.to_thread(stack.wait_ready, 60)
        measured(f"recovery after kills of {dict(killed)}", time.monotonic() - began)
        is_over = True
    await asyncio.to_thread(stack.wait_counters, 0, 0)
    assert ends["answered"] > 0, ends
    assert killed["gateway"] > 0 or ends["connection lost"] == 0
    assert health["status"] == "ok"
    assert stack.post("/v1/completions", calm).json["choices"] == before
    stack.assert_only_living_remain()
    assert "Traceback" not in stack.log
