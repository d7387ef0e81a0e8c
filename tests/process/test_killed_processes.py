"""Processes that die or freeze while an answer is being written: what the client sees, and that the stack
gets up again by itself with nothing left of the dead."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.stack import (
    DONE,
    NEVER,
    RECOVERY_TIMEOUT_S,
    ROLES,
    WORKERS,
    Stack,
    events,
    first_text,
    is_running,
    measured,
    serving,
    streaming_body,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

HEARTBEAT_TIMEOUT_S = 1.5


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One stack for the whole module: it has to survive all of it."""
    with serving(*NEVER, "--heartbeat-timeout-s", f"{HEARTBEAT_TIMEOUT_S}") as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def rest_of(stream: AsyncIterator[Any]) -> list[Any]:
    """Every further event, up to the end."""
    return [event async for event in stream]


def assert_serves_again(stack: Stack, began: float, what: str) -> None:
    """New requests are told to come back until they are served; nothing of the dead is left."""

    def is_served() -> bool:
        answer = stack.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        if answer.status == 200:
            return True
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error["code"] in ("model_loading", "worker_failed")
        return False

    wait_for(is_served, RECOVERY_TIMEOUT_S, "the next answer")
    measured(f"{what} to the next answer", time.monotonic() - began)
    health = stack.wait_ready()
    assert (health["running"], health["waiting"]) == (0, 0)
    stack.assert_only_living_remain()


@pytest.mark.parametrize("role", WORKERS)
async def test_a_killed_worker_ends_streams_with_an_error(
    stack: Stack, session: aiohttp.ClientSession, role: str
) -> None:
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        dead = stack.send(role, signal.SIGKILL)
        began = time.monotonic()
        *_, failure, last = await rest_of(stream)
        took = time.monotonic() - began
    measured(f"kill of the {role} to the error event", took)
    assert last == DONE
    assert failure["error"]["code"] == "worker_failed"
    assert failure["error"]["type"] == "server_error"
    assert role in failure["error"]["message"]
    assert took < 2
    metrics = stack.request("GET", "/metrics").body.decode()
    assert 'strata_request_failure_total{code="worker_failed"' in metrics
    assert_serves_again(stack, began, f"kill of the {role}")
    health = stack.health()
    assert health["processes"][role]["pid"] != dead
    assert health["processes"][role]["losses"] >= 1
    assert f"the {role} ended by signal SIGKILL; restarting it" in stack.log


async def test_a_killed_worker_ends_whole_answers_with_503(
    stack: Stack, session: aiohttp.ClientSession
) -> None:
    """The first byte has not been sent, so the status can still tell."""
    body = streaming_body(stream=False)
    request = session.post(f"{stack.url}/v1/completions", json=body)
    asking = asyncio.ensure_future(request.__aenter__())
    await asyncio.to_thread(stack.wait_counters, 1, 0)
    stack.send("cpu_worker", signal.SIGKILL)
    began = time.monotonic()
    response = await asking
    assert time.monotonic() - began < 2
    assert response.status == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert (await response.json())["error"]["code"] == "worker_failed"
    response.close()
    assert_serves_again(stack, began, "kill of the cpu_worker, again,")


async def test_a_killed_gateway_closes_connections_and_comes_back_at_its_address(
    stack: Stack, session: aiohttp.ClientSession
) -> None:
    """Though the port was picked by the system: clients know no other."""
    workers = {role: stack.pid(role) for role in WORKERS}
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        stack.send("gateway", signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(aiohttp.ClientError):
            await rest_of(stream)
    measured("kill of the gateway to the closed connection", time.monotonic() - began)
    assert time.monotonic() - began < 2
    stack.wait_ready()
    assert_serves_again(stack, began, "kill of the gateway")
    assert {role: stack.pid(role) for role in WORKERS} == workers, "a worker was restarted without need"


@pytest.mark.parametrize("role", WORKERS)
async def test_a_frozen_worker_is_given_up_and_replaced(
    stack: Stack, session: aiohttp.ClientSession, role: str
) -> None:
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        frozen = stack.send(role, signal.SIGSTOP)
        began = time.monotonic()
        *_, failure, last = await rest_of(stream)
        took = time.monotonic() - began
    measured(f"freeze of the {role} to the error event", took)
    assert last == DONE
    assert failure["error"]["code"] == "worker_failed"
    assert took < HEARTBEAT_TIMEOUT_S + 2
    wait_for(lambda: f"the {role} is stuck" in stack.log, 20, "the supervisor to notice")
    assert_serves_again(stack, began, f"freeze of the {role}")
    assert not is_running(frozen)


async def test_a_frozen_gateway_is_replaced(stack: Stack, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        stack.send("gateway", signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(aiohttp.ClientError):
            await rest_of(stream)
    measured("freeze of the gateway to the closed connection", time.monotonic() - began)
    stack.wait_ready()
    assert_serves_again(stack, began, "freeze of the gateway")


async def test_a_worker_that_only_paused_is_taken_back(stack: Stack) -> None:
    """It was given up for dead, and then speaks again: it begins anew without having been restarted."""
    paused = stack.send("stager", signal.SIGSTOP)
    losses = stack.health()["processes"]["stager"]["losses"]
    wait_for(lambda: stack.health()["processes"]["stager"]["losses"] > losses, 10, "the loss")
    os.kill(paused, signal.SIGCONT)
    began = time.monotonic()
    stack.wait_ready()
    assert_serves_again(stack, began, "return of a paused stager")
    assert stack.pid("stager") == paused


@pytest.mark.parametrize("role", ["cpu_worker", "stager"])
async def test_a_step_that_stalls_fails_alone(
    endless_stack: Stack, session: aiohttp.ClientSession, role: str
) -> None:
    """A worker may take longer than the watchdog allows without being dead: its step fails, the next one is
    computed when it is back, and nobody is restarted."""
    before = endless_stack.health()["processes"]
    async with session.post(f"{endless_stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        frozen = endless_stack.send(role, signal.SIGSTOP)
        *_, failure, last = await rest_of(stream)
        os.kill(frozen, signal.SIGCONT)
    assert last == DONE
    assert failure["error"]["code"] == "step_stalled"
    assert role in failure["error"]["message"]
    answer = endless_stack.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
    assert answer.status == 200
    after = endless_stack.health()["processes"]
    assert {name: process["pid"] for name, process in after.items()} == {
        name: process["pid"] for name, process in before.items()
    }


@pytest.mark.parametrize("role", ROLES)
async def test_a_process_that_is_told_to_stop_finishes_what_runs_and_is_replaced(
    stack: Stack, session: aiohttp.ClientSession, role: str
) -> None:
    """SIGTERM, as an operator sends it to one process: no answer is lost."""
    body = streaming_body(max_tokens=60)
    async with session.post(f"{stack.url}/v1/completions", json=body) as response:
        stream = events(response)
        await first_text(stream)
        leaving = stack.send(role, signal.SIGTERM)
        began = time.monotonic()
        *_, end, last = await rest_of(stream)
    assert last == DONE
    assert "error" not in end, end
    assert end["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: not is_running(leaving), 20, f"the {role} to leave")
    stack.wait_ready()
    assert_serves_again(stack, began, f"SIGTERM to the {role}")
    assert f"the {role} ended with code 0; restarting it" in stack.log


def test_the_log_has_no_accident(stack: Stack) -> None:
    """Runs last in this module: every loss above was expected by the code that met it."""
    assert "an unexpected error" not in stack.log
    assert "Traceback" not in stack.log
