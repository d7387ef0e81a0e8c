"""One request through the gateway in this process, where a real gpu_worker could not be made to do this."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway.api import responding
from shared.errors import WorkerFailedError
from shared.link import PeerState
from shared.messages import ExpertBytes, Heartbeat, PrefillProgress, RouteCounts, TokenChunk
from shared.run_directory import Role
from tests.support.gateway_parts import TIMINGS, InProcess, failed, finished, gateway, reads, staged

ASK = {"prompt": "a", "max_tokens": 5}


async def ask(running: InProcess, body: dict[str, Any]) -> aiohttp.ClientResponse:
    return await running.client.post("/v1/completions", json=body)


async def waiting(running: InProcess, number: int) -> None:
    """Returns once so many requests wait for their turn."""
    while running.services.admission.num_waiting != number:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    text = (await response.read()).decode()
    payloads = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_a_failure_before_the_first_byte_is_a_status() -> None:
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK))
        request = await running.workers.requests.get()
        running.say(failed(request.request_id, "step_stalled"))
        response = await asking
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "step_stalled"


async def test_a_failure_after_it_is_an_event() -> None:
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        request = await running.workers.requests.get()
        running.say(TokenChunk(request_id=request.request_id, token_ids=[ord("x")]))
        running.say(failed(request.request_id))
        first, failure, done = await events_of(await asking)
        assert first["choices"][0]["text"] == "x"
        assert failure["error"]["code"] == "worker_failed"
        assert request.request_id in failure["error"]["message"]
        assert done == "[DONE]"


async def test_an_unexpected_error_in_a_stream_is_an_event_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another response in the middle of this one would be noise; the log has what happened."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr("gateway.api.completions.CompletionShape.piece", broken)
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        running.answer(await running.workers.requests.get(), "xyz")
        failure, done = await events_of(await asking)
        assert failure["error"]["code"] == "internal_error"
        assert "a slip" not in failure["error"]["message"]
        assert done == "[DONE]"
        assert running.services.admission.is_idle
    assert "a slip" in caplog.text


async def test_a_request_waits_for_a_worker_that_is_restarted_in_its_turn() -> None:
    """It was accepted, so it is served once it can be."""
    async with gateway(parallel=1) as running:
        first = asyncio.ensure_future(ask(running, ASK))
        request = await running.workers.requests.get()
        second = asyncio.ensure_future(ask(running, ASK))
        await waiting(running, 1)
        running.lose_gpu_worker()
        assert (await first).status == 503
        refused = await ask(running, ASK)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "model_loading")
        assert running.workers.requests.empty()
        running.find_gpu_worker()
        request = await running.workers.requests.get()
        running.answer(request, "ab")
        assert (await (await second).json())["choices"][0]["text"] == "ab"


async def test_nobody_waits_longer_for_a_worker_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those either whose turn has not come: their waits do not add up."""
    monkeypatch.setattr(responding, "_RECOVERY_TIMEOUT_S", 0.2)
    async with gateway(parallel=1) as running:
        first = asyncio.ensure_future(ask(running, ASK))
        await running.workers.requests.get()
        others = [asyncio.ensure_future(ask(running, ASK)) for _ in range(4)]
        await waiting(running, 4)
        running.lose_gpu_worker()
        assert (await first).status == 503
        began = time.monotonic()
        for other in others:
            response = await other
            assert (response.status, (await response.json())["error"]["code"]) == (503, "model_loading")
        assert time.monotonic() - began < 4 * 0.2
        assert (running.services.admission.num_running, running.services.admission.num_waiting) == (0, 0)


async def test_the_next_request_runs_while_the_last_answer_is_still_being_sent() -> None:
    """The worker's last word gives the place back, though nobody has read it yet."""
    async with gateway(parallel=1) as running:
        running.client.session.headers["Connection"] = "close"
        first = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        request = await running.workers.requests.get()
        second = asyncio.ensure_future(ask(running, ASK))
        await waiting(running, 1)
        running.answer(request, "ab")
        assert running.services.admission.num_running == 1
        assert running.services.admission.num_waiting == 0
        running.answer(await running.workers.requests.get(), "cd")
        assert (await second).status == (await first).status == 200


async def test_defaults_come_from_the_settings_and_limits_from_the_context() -> None:
    settings = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "seed": 99, "max_new": 9}
    async with gateway(**settings, eos_ids=(3, 2)) as running:

        async def asked(**fields: Any) -> Any:
            asking = asyncio.ensure_future(ask(running, {"prompt": "abc"} | fields))
            request = await running.workers.requests.get()
            running.answer(request, "x")
            await asking
            return request

        request = await asked()
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.25, 7, 0.5, 0.125)
        assert (sampling.seed, request.max_new_tokens, request.eos_token_ids) == (99, 9, [2, 3])
        zeros = await asked(temperature=0, top_k=0, min_p=0, seed=0, max_tokens=4)
        assert (zeros.sampling.temperature, zeros.sampling.top_k, zeros.sampling.seed) == (0, 0, 0)
        assert zeros.max_new_tokens == 4
        assert (await asked(max_tokens=10_000)).max_new_tokens == 9
        for seed in (-1, 2**63, 10**40):
            assert 0 <= (await asked(seed=seed)).sampling.seed < 2**63
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, {"prompt": "abc", "max_tokens": 10_000}))
        request = await running.workers.requests.get()
        assert request.max_new_tokens == 64 - 3
        running.answer(request, "x")
        await asking


async def comments_of(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Every comment that says something new, without its colon; events are passed over."""
    last = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(": ") and line != last:
            last = line
            yield line.removeprefix(": ")


async def test_a_stream_says_how_far_it_is_at_every_stage() -> None:
    """In the queue, while its prompt is read, and in the pauses of its answer."""
    body = ASK | {"stream": True, "prompt": "abcdefgh"}
    async with gateway(parallel=1, keepalive_interval_s=0.1) as running, asyncio.timeout(20):
        first = asyncio.ensure_future(ask(running, ASK))
        blocker = await running.workers.requests.get()
        between = asyncio.ensure_future(ask(running, body))
        await waiting(running, 1)
        response = await ask(running, body)
        comments = comments_of(response)
        assert await anext(comments) == "1 request ahead, 1 running"
        await (await between).release()
        (await between).close()
        assert await anext(comments) == "0 requests ahead, 1 running"
        running.answer(blocker, "x")
        await first
        request = await running.workers.requests.get()
        assert await anext(comments) == "prompt 0/8 tokens read"

        def read(num_read: int) -> None:
            progress = PrefillProgress(
                request_id=request.request_id, num_prefilled=num_read, num_prompt_tokens=8
            )
            running.say(progress)

        read(2)
        assert await anext(comments) == "prompt 2/8 tokens read"
        read(4)
        assert re.fullmatch("prompt 4/8 tokens read, [0-9]+ s to go", await anext(comments))
        running.say(TokenChunk(request_id=request.request_id, token_ids=[ord("a")]))
        async for comment in comments:
            if comment == "1 token generated":
                break
            assert comment.startswith("prompt 4/8")
        running.say(finished(request.request_id))
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_says_that_it_waits_for_the_workers() -> None:
    async with gateway(parallel=1, keepalive_interval_s=0.1) as running, asyncio.timeout(20):
        asking = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        async with running.services.admission.enter():
            response = await asking
            await waiting(running, 1)
            running.lose_gpu_worker()
        comments = comments_of(response)
        async for comment in comments:
            if comment == "waiting for the workers to be ready":
                break
        running.find_gpu_worker()
        running.answer(await running.workers.requests.get(), "x")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_without_a_seed_every_request_draws_its_own() -> None:
    async with gateway() as running:
        seeds = set()
        for _ in range(3):
            asking = asyncio.ensure_future(ask(running, ASK))
            request = await running.workers.requests.get()
            seeds.add(request.sampling.seed)
            running.answer(request, "x")
            await asking
        assert len(seeds) == 3


async def test_the_stager_hears_of_a_prompt_before_the_gpu_worker_and_is_told_to_forget_it() -> None:
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK))
        running.answer(await running.workers.requests.get(), "x")
        await asking
        kinds = [type(message).__name__ for _, message in running.workers.posted]
        assert kinds == ["StagePrompt", "GenerateRequest", "ForgetPrompt"]


NEEDED = msgspec.structs.replace(
    TIMINGS,
    ngram_rows=120,
    ngram_hits=117,
    routes=RouteCounts(device=400, ram=300, disk=100, transferred=150, skipped=50),
    expert_bytes=ExpertBytes(device=4000, ram=3000),
    transfer_wait_s=0.125,
    device_wait_s=0.25,
    disk=[reads("part-2", 3, 12288, 0.015), reads("part-1", 1, 4096, 0.001)],
    major_faults=2,
)


async def test_timings_say_what_was_needed_and_where_it_came_from() -> None:
    """Reads ahead of time and those of steps together by file, the former once more by themselves."""
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK))
        request = await running.workers.requests.get()
        running.stager_says(staged(request.request_id, reads("part-2", 40, 163840)))
        running.answer(request, "x", timings=NEEDED)
        timings = (await (await asking).json())["timings"]
    assert (timings["ngram_n"], timings["ngram_hits_n"], timings["major_faults_n"]) == (120, 117, 2)
    assert timings["expert_routes"] == {
        "device": {"n": 400, "share": 0.4},
        "ram": {"n": 300, "share": 0.3},
        "disk": {"n": 100, "share": 0.1},
        "transferred": {"n": 150, "share": 0.15},
        "skipped": {"n": 50, "share": 0.05},
    }
    assert timings["expert_bytes_n"] == {"device": 4000, "ram": 3000}
    waits = ("expert_wait_ms", "transfer_wait_ms", "device_wait_ms")
    assert [timings[name] for name in waits] == [300, 125, 250]
    assert timings["disk"] == [
        {"file": "part-1", "reads_n": 1, "bytes_n": 4096, "wait_ms": 1},
        {"file": "part-2", "reads_n": 43, "bytes_n": 176128, "wait_ms": 15},
    ]
    assert timings["disk_bytes_n"] == 4096 + 176128
    assert timings["staged"] == {
        "ngram_n": 50,
        "ngram_hits_n": 10,
        "ms": 250,
        "depth": 31.5,
        "file": "part-2",
        "reads_n": 40,
        "bytes_n": 163840,
        "wait_ms": 0,
    }
    assert (timings["prompt_n"], timings["predicted_n"], timings["prompt_ms"]) == (1, 1, 200)


async def test_timings_are_short_where_nothing_was_read() -> None:
    """As on a warm repeat; also where the stager says that it found everything."""
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        request = await running.workers.requests.get()
        running.stager_says(staged(request.request_id, reads("part-2", 0, 0)))
        running.answer(request, "x")
        *_, end, _ = await events_of(await asking)
    timings = end["timings"]
    assert (timings["ngram_n"], timings["ngram_hits_n"], timings["major_faults_n"]) == (0, 0, 0)
    assert timings["disk_bytes_n"] == 0
    assert not {"disk", "staged", "expert_routes", "expert_bytes_n"} & timings.keys()


async def test_what_the_stager_says_too_late_is_not_in_the_answer() -> None:
    async with gateway() as running:
        asking = asyncio.ensure_future(ask(running, ASK))
        request = await running.workers.requests.get()
        running.answer(request, "x")
        timings = (await (await asking).json())["timings"]
        running.stager_says(staged(request.request_id, reads("part-2", 40, 163840)))
        assert timings["disk_bytes_n"] == 0
        assert running.engine.staged(request.request_id) is None


async def test_a_chat_needs_a_template() -> None:
    async with gateway() as running:
        body = {"messages": [{"role": "user", "content": "a"}]}
        response = await running.client.post("/v1/chat/completions", json=body)
        assert response.status == 400
        assert "tokenizer.chat_template" in (await response.json())["error"]["message"]


async def test_while_the_tokenizer_loads_requests_are_told_to_come_back() -> None:
    async with gateway() as running:
        running.services.text = None
        for path in ("/v1/completions", "/tokenize"):
            response = await running.client.post(path, json={"prompt": "a"})
            assert (response.status, (await response.json())["error"]["code"]) == (503, "model_loading")
        health = await (await running.client.get("/health")).json()
        assert (health["status"], health["loaded"]) == ("loading", False)
        assert (await running.client.get("/readyz")).status == 503


async def test_health_says_recovering_whoever_was_lost() -> None:
    """Not "loading", which would look like the first start."""
    async with gateway() as running:
        stager, gpu_worker = (running.engine.peers[role] for role in (Role.STAGER, Role.GPU_WORKER))
        stager.num_losses = 1
        gpu_worker.heartbeat = None
        running.engine.peer_lost(stager, "its process died")
        health = await (await running.client.get("/health")).json()
        assert (health["status"], health["loaded"]) == ("recovering", False)


async def status_of(running: InProcess) -> Any:
    response = await running.client.get("/v1/status")
    assert response.status == 200
    return await response.json()


async def test_status_shows_what_workers_found_out_and_how_they_do() -> None:
    """But not what the predecessor of one that still loads had found out."""
    found = {"ple_io": "direct", "ple_probe_direct_64": 37000.5, "ple_cache_mib": 512}
    beat = Heartbeat(state="ready", activity="serving", progress=1, gauges={"row_cache_hit_rate": 0.75})
    async with gateway() as running:
        stager = running.engine.peers[Role.STAGER]
        assert (await status_of(running))["processes"]["stager"] == {"state": "absent", "losses": 0}
        stager.state, stager.capabilities, stager.heartbeat = PeerState.READY, found, beat
        described = (await status_of(running))["processes"]["stager"]
        assert described["capabilities"] == found
        assert described["gauges"] == {"row_cache_hit_rate": 0.75}
        stager.state = PeerState.GREETED
        assert "capabilities" not in (await status_of(running))["processes"]["stager"]
        whole = await status_of(running)
        assert whole["processes"]["gpu_worker"]["capabilities"]["device"] == "cpu"
        assert whole["processes"]["gateway"]["gauges"]["cpu_seconds"] > 0
        assert (whole["status"], whole["loaded"], whole["model"]) == ("ok", True, "tiny")


async def test_status_follows_every_request_to_its_end() -> None:
    async with gateway(parallel=1) as running:

        async def requests() -> list[Any]:
            found = (await status_of(running))["requests"]
            for request in found:
                assert request.pop("age_s") >= 0
            return [tuple(request.values()) for request in found]

        asking = asyncio.ensure_future(ask(running, ASK | {"prompt": "abcdefgh"}))
        request = await running.workers.requests.get()
        request_id = request.request_id
        waiter = asyncio.ensure_future(ask(running, ASK))
        await waiting(running, 1)
        first, second = await requests()
        assert first == (request_id, "reading", 0, 8, 0, None, 0)
        assert second[1:] == ("waiting", 0, 1, 0, None, 0)
        running.say(PrefillProgress(request_id=request_id, num_prefilled=6, num_prompt_tokens=8))
        running.say(TokenChunk(request_id=request_id, token_ids=[ord("a")]))
        first, _ = await requests()
        assert first == (request_id, "generating", 0, 8, 8, None, 1)
        running.say(finished(request_id))
        answer = await (await asking).json()
        assert (await status_of(running))["last_timings"] == answer["timings"]
        waiter.cancel()
        while await requests():
            pass


async def test_at_the_end_of_a_drain_who_waits_is_told() -> None:
    """In the queue, and in the wait for a worker that is being restarted."""
    async with gateway(parallel=1) as running:
        services = running.services
        first = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        await running.workers.requests.get()
        second = asyncio.ensure_future(ask(running, ASK | {"stream": True}))
        third = asyncio.ensure_future(ask(running, ASK))
        await waiting(running, 2)
        running.lose_gpu_worker()
        await waiting(running, 1)
        services.admission.dismiss()
        services.engine.stop(WorkerFailedError("the server is stopping", code="draining"))
        *_, failure, _ = await events_of(await first)
        assert failure["error"]["code"] == "worker_failed"
        failure, _ = await events_of(await second)
        assert failure["error"]["code"] == "draining"
        response = await third
        assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")
        refused = await ask(running, ASK)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        assert services.admission.is_idle
