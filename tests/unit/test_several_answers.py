"""Several answers of one request, through the gateway in this process."""

import asyncio
import json
from typing import Any

import aiohttp

from shared.messages import REPETITION, RequestFinished, TokenChunk
from tests.support.gateway_parts import TIMINGS, InProcess, failed, finished, gateway
from tests.unit.test_answering import ASK, ask, events_of, waiting


async def requests_of(running: InProcess, number: int) -> list[Any]:
    return [await running.workers.requests.get() for _ in range(number)]


async def test_each_has_its_id_its_seed_and_its_place() -> None:
    async with gateway(parallel=2, queue_size=1) as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"n": 3, "seed": 2**63 - 2}))
        first, second = await requests_of(running, 2)
        assert (running.services.admission.num_running, running.services.admission.num_waiting) == (2, 1)
        assert list(running.services.requests) == [
            first.request_id,
            second.request_id,
            first.request_id.removesuffix("0") + "2",
        ]
        running.answer(second, "two")
        (third,) = await requests_of(running, 1)
        assert [one.sampling.seed for one in (first, second, third)] == [2**63 - 2, 2**63 - 1, 0]
        running.answer(third, "three", "stop")
        running.answer(first, "one")
        answer = await (await asking).json()
        assert [choice["text"] for choice in answer["choices"]] == ["one", "two", "three"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length", "stop"]
        assert [choice["timings"]["predicted_n"] for choice in answer["choices"]] == [3, 3, 5]
        assert "timings" not in answer
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 11)
        staged = [message for _, message in running.workers.posted if type(message).__name__ == "StagePrompt"]
        assert len(staged) == 1
        assert running.services.admission.is_idle
        assert not running.services.requests


async def test_without_a_seed_each_has_its_own() -> None:
    async with gateway(parallel=2) as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"n": 2}))
        requests = await requests_of(running, 2)
        assert len({one.sampling.seed for one in requests}) == 2
        for one in requests:
            running.answer(one, "x")
        await asking


async def test_a_stream_interleaves_them() -> None:
    async with gateway(parallel=2) as running:
        body = ASK | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
        asking = asyncio.ensure_future(ask(running, body))
        first, second = await requests_of(running, 2)
        for one, letter in ((first, "a"), (second, "b"), (first, "c")):
            running.say(TokenChunk(request_id=one.request_id, token_ids=[ord(letter)]))
        running.say(finished(second.request_id, "stop"))
        running.say(finished(first.request_id, num_output_tokens=2))
        *chunks, usage, done = await events_of(await asking)
        choices = [chunk["choices"][0] for chunk in chunks]
        told = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]
        assert [part for part in told if not part[0]] == [(0, "a", None), (0, "c", None), (0, "", "length")]
        assert [part for part in told if part[0]] == [(1, "b", None), (1, "", "stop")]
        assert (usage["usage"]["completion_tokens"], usage["choices"], done) == (3, [], "[DONE]")


async def test_one_that_fails_fails_the_response_and_ends_the_others() -> None:
    async with gateway(parallel=2) as running:
        for is_streamed in (False, True):
            asking = asyncio.ensure_future(ask(running, ASK | {"n": 2, "stream": is_streamed}))
            first, second = await requests_of(running, 2)
            running.say(failed(second.request_id, "step_stalled"))
            response = await asking
            error = (await events_of(response))[0] if is_streamed else await response.json()
            assert error["error"]["code"] == "step_stalled"
            assert running.workers.aborted[-1] == first.request_id
            assert running.services.admission.is_idle


async def test_a_client_that_leaves_ends_all() -> None:
    async with gateway(parallel=1) as running:
        asking = asyncio.ensure_future(ask(running, ASK | {"n": 3}))
        (first,) = await requests_of(running, 1)
        await waiting(running, 2)
        asking.cancel()
        while not running.services.admission.is_idle:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        assert running.workers.aborted == [first.request_id]


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, Any]:
    return response.status, (await response.json())["error"]


async def test_more_than_there_can_ever_be_are_a_bad_request() -> None:
    """And more than there are places now are to come back later; nothing of them is begun."""
    async with gateway(parallel=1, queue_size=2) as running:
        status, error = await refusal(await ask(running, ASK | {"n": 4}))
        assert (status, error["param"]) == (400, "n")
        assert (
            "n is 4; this server holds 3 answers at most, 1 that run (--parallel) and 2" in error["message"]
        )
        asking = asyncio.ensure_future(ask(running, ASK))
        (request,) = await requests_of(running, 1)
        status, error = await refusal(await ask(running, ASK | {"n": 3}))
        assert (status, error["code"]) == (429, "queue_full")
        assert running.services.admission.num_waiting == 0
        running.answer(request, "x")
        assert (await asking).status == 200


async def test_best_of_may_only_be_n() -> None:
    async with gateway(parallel=2) as running:
        status, error = await refusal(await ask(running, ASK | {"n": 2, "best_of": 3}))
        assert (status, error["param"]) == (400, "best_of")
        asking = asyncio.ensure_future(ask(running, ASK | {"n": 2, "best_of": 2}))
        for request in await requests_of(running, 2):
            running.answer(request, "x")
        assert (await asking).status == 200


async def test_a_degenerate_answer_is_named_and_counted() -> None:
    async with gateway() as running:
        for is_streamed in (False, True):
            asking = asyncio.ensure_future(ask(running, ASK | {"stream": is_streamed}))
            request = await running.workers.requests.get()
            end = RequestFinished(
                request_id=request.request_id,
                finish_reason="length",
                num_prompt_tokens=1,
                num_output_tokens=1,
                timings=TIMINGS,
                stop_reason=REPETITION,
            )
            running.say(TokenChunk(request_id=request.request_id, token_ids=[ord("-")]))
            running.say(end)
            response = await asking
            whole = (await events_of(response))[-2] if is_streamed else json.loads(await response.read())
            (choice,) = whole["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition_detected")
        exposition, _ = running.services.metrics.exposition()
        assert (
            b'strata_request_success_total{finished_reason="repetition",model_name="tiny"} 2.0' in exposition
        )


async def test_what_a_body_says_reaches_the_sampler_and_the_settings_fill_in() -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
    async with gateway(**penalties, typical_p=0.75, repeat_last_n=64) as running:

        async def asked(**fields: Any) -> Any:
            asking = asyncio.ensure_future(ask(running, ASK | fields))
            request = await running.workers.requests.get()
            running.answer(request, "x")
            assert (await asking).status == 200
            return request

        sampling = (await asked()).sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert (sampling.repetition_penalty, sampling.typical_p, sampling.repeat_last_n) == (1.25, 0.75, 64)
        zeros = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "typical_p": 1}
        sampling = (await asked(**zeros, repeat_last_n=0)).sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
        assert (sampling.repetition_penalty, sampling.typical_p, sampling.repeat_last_n) == (1, 1, 0)
        request = await asked(logit_bias={"5": -3, "0": 1.5}, min_tokens=2, stop_token_ids=[9, 4, 9])
        assert request.sampling.logit_bias == [(5, -3.0), (0, 1.5)]
        assert (request.sampling.min_tokens, request.stop_token_ids) == (2, [4, 9])
        assert request.eos_token_ids
        assert not request.may_repeat
        request = await asked(ignore_eos=True, logprobs=3)
        assert (request.eos_token_ids, request.may_repeat) == ([], True)
        assert request.sampling.num_top_logprobs == 3
