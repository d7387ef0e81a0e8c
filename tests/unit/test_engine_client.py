"""The gateway's view of the workers: readiness, and which answer goes to which request, also if late."""

import asyncio

import pytest

from gateway.attribution import Purpose
from gateway.engine_client import EngineStream
from shared.errors import GenerationError, ModelLoadingError, WorkerFailedError
from shared.link import PeerState
from shared.messages import (
    AbortRequest,
    ForgetPrompt,
    GenerateRequest,
    PrefillProgress,
    RequestFinished,
    RequestTimings,
    Sampling,
    StagePrompt,
    TokenChunk,
)
from shared.run_directory import Role
from tests.support.gateway_parts import InProcess, failed, finished, gateway, heartbeat, reads, staged

GREEDY = Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
NO_TIMES = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ngram_wait_s", "expert_wait_s"), 0.0)


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=[1], max_new_tokens=5, eos_token_ids=[2], sampling=GREEDY
    )


def chunk(request_id: str, *token_ids: int) -> TokenChunk:
    return TokenChunk(request_id=request_id, token_ids=list(token_ids))


def opened(running: InProcess, request_id: str, last_words: list[str] | None = None) -> EngineStream:
    words = last_words if last_words is not None else []
    return running.engine.open(request(request_id), lambda: words.append(request_id))


async def test_answers_go_to_their_request_in_order() -> None:
    async with gateway() as running, opened(running, "a") as a, opened(running, "b") as b:
        running.say(chunk("a", 1))
        running.say(chunk("b", 2))
        running.say(PrefillProgress(request_id="a", num_prefilled=1, num_prompt_tokens=1))
        running.say(chunk("a", 3))
        assert await b.next() == chunk("b", 2)
        assert await a.next() == chunk("a", 1)
        assert isinstance(await a.next(), PrefillProgress)
        assert await a.next() == chunk("a", 3)


async def test_answers_to_nobody_are_dropped() -> None:
    """They may be on their way when a client leaves."""
    async with gateway() as running:
        async with opened(running, "a"):
            pass
        for message in (chunk("a", 1), finished("a"), failed("a"), chunk("never", 1)):
            running.say(message)
        assert running.engine.num_running == 0


async def test_leaving_early_aborts_and_forgets() -> None:
    async with gateway() as running:
        async with opened(running, "a") as answers:
            running.say(chunk("a", 1))
            await answers.next()
        assert [message for _, message in running.workers.posted[1:]] == [
            AbortRequest(request_id="a"),
            ForgetPrompt(request_id="a"),
        ]


async def test_what_is_over_is_not_aborted() -> None:
    async with gateway() as running:
        async with opened(running, "a") as answers:
            running.say(finished("a"))
            assert await answers.next() == finished("a")
        async with opened(running, "b") as answers:
            running.say(failed("b"))
            with pytest.raises(GenerationError):
                await answers.next()
        assert running.workers.aborted == []


async def test_the_last_word_is_noticed_before_it_is_read() -> None:
    """So the place of a request whose client is slow goes to the next one."""
    async with gateway() as running:
        last_words: list[str] = []
        async with opened(running, "a", last_words), opened(running, "b", last_words):
            running.say(chunk("a", 1))
            assert last_words == []
            running.say(finished("a"))
            running.say(failed("b"))
            assert last_words == ["a", "b"]


async def test_an_abort_returns_the_last_word_past_the_tokens_before_it() -> None:
    async with gateway() as running, opened(running, "a") as answers:
        running.say(chunk("a", 1))
        running.say(chunk("a", 2))
        ending = asyncio.ensure_future(answers.abort())
        await asyncio.sleep(0)
        assert running.workers.aborted == ["a"]
        running.say(finished("a", "abort", 2))
        assert await ending == finished("a", "abort", 2)


async def test_the_loss_of_the_gpu_worker_fails_its_requests_after_what_it_said() -> None:
    async with gateway() as running, opened(running, "a") as a, opened(running, "b") as b:
        running.say(chunk("a", 1))
        running.say(finished("b"))
        running.lose_gpu_worker()
        assert await a.next() == chunk("a", 1)
        with pytest.raises(WorkerFailedError, match="its process died"):
            await a.next()
        assert isinstance(await b.next(), RequestFinished)


async def test_the_loss_of_another_worker_is_the_gpu_workers_to_report() -> None:
    """It may not have needed it."""
    async with gateway() as running, opened(running, "a") as answers:
        peer = running.engine.peers[Role.STAGER]
        peer.state = PeerState.ABSENT
        running.engine.peer_lost(peer, "it was replaced")
        running.say(chunk("a", 1))
        assert await answers.next() == chunk("a", 1)


async def test_a_request_to_nobody_fails_at_once() -> None:
    """The gpu_worker may be lost between the check and the sending."""
    async with gateway() as running:
        running.workers.are_reachable = False
        async with opened(running, "a") as answers:
            with pytest.raises(WorkerFailedError):
                await answers.next()


async def test_a_gpu_worker_that_loads_is_not_asked() -> None:
    """It would not answer, and the request would wait for ever."""
    async with gateway() as running:
        peer = running.engine.peers[Role.GPU_WORKER]
        running.lose_gpu_worker()
        peer.state, peer.heartbeat = PeerState.GREETED, heartbeat("starting", "loading")
        async with opened(running, "a") as answers:
            with pytest.raises(WorkerFailedError):
                await answers.next()
        assert running.workers.requests.empty()


async def test_a_workers_code_is_handed_on() -> None:
    async with gateway() as running, opened(running, "a") as answers:
        running.say(failed("a", "step_stalled"))
        with pytest.raises(GenerationError) as caught:
            await answers.next()
        assert caught.value.code == "step_stalled"


async def test_readiness_is_what_the_gpu_worker_says() -> None:
    async with gateway() as running:
        engine, peer = running.engine, running.engine.peers[Role.GPU_WORKER]
        assert engine.is_ready
        assert engine.max_context == 64
        peer.heartbeat = heartbeat("waiting", "waiting for stager")
        engine.message(peer, peer.heartbeat)
        assert not engine.is_ready
        with pytest.raises(ModelLoadingError, match="waiting for stager"):
            await engine.wait_ready(0.01)
        waiting = asyncio.ensure_future(engine.wait_ready(60))
        await asyncio.sleep(0)
        peer.heartbeat = heartbeat()
        engine.message(peer, peer.heartbeat)
        await waiting
        running.lose_gpu_worker()
        assert not engine.is_ready
        with pytest.raises(ModelLoadingError) as caught:
            await engine.wait_ready(0.01)
        assert caught.value.retry_after_s


async def test_a_stop_ends_who_runs_who_waits_and_who_comes() -> None:
    """At the end of a drain nobody may be left waiting, wherever it is on its way."""
    async with gateway() as running, opened(running, "running") as answers:
        engine = running.engine
        running.lose_gpu_worker()
        with pytest.raises(WorkerFailedError):
            await answers.next()
        waiting = asyncio.ensure_future(engine.wait_ready(60))
        await asyncio.sleep(0)
        engine.stop(GenerationError("the server is stopping", code="draining"))
        await waiting
        assert not engine.is_ready
        running.find_gpu_worker()
        assert not engine.is_ready
        async with opened(running, "late") as late:
            with pytest.raises(GenerationError, match="stopping"):
                await late.next()
        assert all(
            not isinstance(message, GenerateRequest) or message.request_id != "late"
            for _, message in running.workers.posted
        )


async def test_the_stager_is_told_of_prompts() -> None:
    async with gateway() as running:
        running.engine.stage("a", (1, 2))
        running.engine.forget("a")
        assert running.workers.posted == [
            (Role.STAGER, StagePrompt(request_id="a", prompt_token_ids=[1, 2])),
            (Role.STAGER, ForgetPrompt(request_id="a")),
        ]


async def test_what_the_stager_read_goes_to_the_request_it_was_for() -> None:
    """It comes before, while or after the gpu_worker is asked."""
    async with gateway() as running:
        engine = running.engine
        for request_id in "ab":
            engine.stage(request_id, (1, 2))
        early, late = staged("a", reads("file", 1, 100)), staged("b", reads("file", 2, 200))
        running.stager_says(early)
        async with opened(running, "a") as a, opened(running, "b") as b:
            running.stager_says(late)
            assert (a.staged, b.staged) == (early, late)
        async with opened(running, "never staged") as other:
            assert other.staged is None


async def test_what_was_read_counts_once_also_for_requests_that_are_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is kept of a request after its end, whatever still comes."""
    async with gateway() as running:
        engine = running.engine
        engine.stage("a", (1, 2))
        for _ in range(2):
            running.stager_says(staged("a", reads("file", 1, 100)))
        assert "twice" in caplog.text
        engine.forget("a")
        engine.stage("b", (1, 2))
        engine.forget("b")
        for unknown in ("b", "never"):
            running.stager_says(staged(unknown, reads("file", 2, 200)))
            assert engine.staged(unknown) is None
        assert engine.totals.reads == {(Purpose.STAGING, "file"): reads("file", 5, 500)}
        assert engine._staged == {}


async def test_what_an_aborted_request_needed_counts() -> None:
    """Its last word comes when nobody waits for it any more."""
    async with gateway() as running:
        async with opened(running, "a"):
            pass
        running.say(finished("a", "abort", timings=RequestTimings(**NO_TIMES, ngram_rows=7)))
        assert running.engine.totals.num_ngram_rows == 7
