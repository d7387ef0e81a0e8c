"""A stack with experts on the device, whose part RAM plays: processes that die or freeze, and what is learned
from one run to the next."""

import asyncio
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from tests.support.stack import (
    DONE,
    NEVER,
    RECOVERY_TIMEOUT_S,
    WORKERS,
    Stack,
    events,
    first_text,
    measured,
    serving,
    streaming_body,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

NUM_SLOTS = 100
# Prompts of the second kind are streamed.
SHORT, LONG = "Once upon", [(7 * place) % 1000 for place in range(200)]
CACHED = ("--expert-cache", f"{NUM_SLOTS}", "--pcie-frac", "0.5", "--prefill", "128")
# Routes of tokens can be counted where none is drafted.
CACHED += ("--spec", "0", "--prefill-stream-min", "64", "--watchdog-s", "3", "--heartbeat-timeout-s", "20")


def ask(stack: Stack, prompt: str | list[int], max_tokens: int = 8) -> dict[str, Any]:
    """A greedy answer, whose routes are accounted for."""
    answer = stack.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
    assert answer.status == 200, answer.body
    timings = answer.json["timings"]
    with GGUFModel(DEMO_MODEL_PATH) as file:
        config = read_model_config(file)
    num_tokens = timings["prompt_n"] + timings["predicted_n"] - 1
    num_routes = num_tokens * config.num_layers * config.num_experts_used
    assert sum(way["n"] for way in timings["expert_routes"].values()) == num_routes
    return {"text": answer.json["choices"][0]["text"], "routes": timings["expert_routes"]}


def wait_until_loaded(stack: Stack) -> None:
    """Every slot has its expert."""

    def is_loaded() -> bool:
        found = stack.request("GET", "/v1/status").json["processes"]["gpu_worker"]["gauges"]
        return bool(found["expert_cache_resident"] == found["expert_cache_slots"] == NUM_SLOTS)

    wait_for(is_loaded, 20, "experts in all slots")


def is_served(stack: Stack) -> bool:
    """Whether a request is answered; where it is not, it is told to come back."""
    answer = stack.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
    if answer.status == 200:
        return True
    assert answer.status == 503
    assert answer.error["code"] in ("model_loading", "worker_failed")
    return False


async def lose_in_the_middle(stack: Stack, session: aiohttp.ClientSession, role: str) -> None:
    """Kills a process while one request decodes and the prompt of another is streamed."""
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        long = {"prompt": LONG * 8, "max_tokens": 200, "temperature": 0}
        streamed = asyncio.ensure_future(asyncio.to_thread(stack.post, "/v1/completions", long))
        await asyncio.to_thread(stack.wait_counters, 2, 0)
        stack.send(role, signal.SIGKILL)
        *_, failure, last = [event async for event in stream]
    assert last == DONE
    assert failure["error"]["code"] == "worker_failed"
    assert (await streamed).status == 503


async def test_processes_that_die_and_what_was_learned(tmp_path: Path) -> None:
    """Each time all is as before: the same texts, every slot with its expert, nothing left of the dead; and a
    later run begins with the experts that were used most."""
    profile = ("--expert-profile", f"{tmp_path / 'learned'}")
    with serving(*NEVER, *CACHED, *profile) as stack:
        wait_until_loaded(stack)
        assert "chosen without a profile" in stack.log
        before = [ask(stack, SHORT)["text"], ask(stack, LONG)["text"]]
        assert set(ask(stack, LONG)["routes"]) >= {"device", "ram", "transferred"}
        async with aiohttp.ClientSession() as session:
            for role in WORKERS:
                began = time.monotonic()
                await lose_in_the_middle(stack, session, role)
                wait_for(partial(is_served, stack), RECOVERY_TIMEOUT_S, "the next answer")
                what = f"kill of the {role}, with experts on the device, to the next answer"
                measured(what, time.monotonic() - began)
                assert [ask(stack, SHORT)["text"], ask(stack, LONG)["text"]] == before
                wait_until_loaded(stack)
                stack.wait_ready()
                stack.assert_only_living_remain()
            await leave_in_the_middle(stack, session)
            await stall(stack, session)
        assert [ask(stack, SHORT)["text"], ask(stack, LONG)["text"]] == before
        wait_until_loaded(stack)
    assert os.listdir(tmp_path) == ["learned"]
    with serving(*NEVER, *CACHED, *profile) as stack:
        wait_until_loaded(stack)
        assert f"chosen by {tmp_path / 'learned'}" in stack.log
        assert [ask(stack, SHORT)["text"], ask(stack, LONG)["text"]] == before


async def leave_in_the_middle(stack: Stack, session: aiohttp.ClientSession) -> None:
    """A client that goes while its prompt is streamed: slots that were lent to it come back."""
    body = streaming_body(prompt=LONG * 20)
    response = await session.post(f"{stack.url}/v1/completions", json=body)
    await asyncio.to_thread(stack.wait_counters, 1, 0)
    response.close()
    await asyncio.to_thread(stack.wait_counters, 0, 0)
    await asyncio.to_thread(wait_until_loaded, stack)


async def stall(stack: Stack, session: aiohttp.ClientSession) -> None:
    """A stager that is frozen while blobs are waited for: the step fails by the watchdog, nobody is
    restarted, and when it goes on so does everything."""
    pids = {role: stack.pid(role) for role in WORKERS}
    async with session.post(f"{stack.url}/v1/completions", json=streaming_body()) as response:
        stream = events(response)
        await first_text(stream)
        frozen = stack.send("stager", signal.SIGSTOP)
        try:
            *_, failure, last = [event async for event in stream]
        finally:
            os.kill(frozen, signal.SIGCONT)
    assert last == DONE
    assert failure["error"]["code"] == "step_stalled"
    assert "the stager has not answered for 3 s" in failure["error"]["message"]
    ask(stack, SHORT)
    assert {role: stack.pid(role) for role in WORKERS} == pids


def test_a_bad_disk_costs_the_requests_that_need_it() -> None:
    """With a third of the experts in RAM: what cannot be read, for a slot, a transfer or the pool, fails the
    request that needed it, by name. The others say the same each time, and nobody is restarted."""
    bad = ("--ram-budget", "0.005", "--ple-io", "ram", "--io-fail-every", "400")
    with serving(*NEVER, *CACHED, *bad) as stack:
        pids = {role: stack.pid(role) for role in WORKERS}
        texts, num_failed = set(), 0
        for number in range(30):
            body = {"prompt": SHORT if number % 2 else LONG, "max_tokens": 4, "temperature": 0}
            answer = stack.post("/v1/completions", body)
            if answer.status == 200:
                texts.add((number % 2, answer.json["choices"][0]["text"]))
                continue
            num_failed += 1
            assert (answer.status, answer.error["code"]) == (503, "disk_error")
            message = r"expert \d+ of layer \d+ could not be read from strata-demo.gguf: Input/output error"
            assert re.match(message, answer.error["message"])
        assert num_failed > 0
        assert 0 < len(texts) == len({which for which, _ in texts})
        assert {role: stack.pid(role) for role in WORKERS} == pids
