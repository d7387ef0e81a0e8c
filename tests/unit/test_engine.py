"""What the engine answers to requests, aborts, failures and lost workers, with a real model of a megabyte."""

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.in_process import InProcessModel
from gpu_worker.engine import AbortAll
from gpu_worker.scheduler import Work
from gpu_worker.state.sequence_state import SequenceState
from shared.errors import WorkerFailedError
from shared.messages import REPETITION, AbortRequest, RequestFailed, RequestFinished, Sampling, TokenChunk
from shared.ring import Arrays
from shared.run_directory import Role
from tests.support.running_engine import GREEDY, TIMEOUT_S, Answer, running_engine
from tests.support.tiny_model import tiny_model

LONG = [int(token_id) for token_id in np.random.default_rng(0).integers(0, 256, 100)]
SHORT = LONG[:5]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model().write(tmp_path_factory.mktemp("engine") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(path: Path) -> Callable[[list[int], int], list[int]]:
    """What the model says greedily, without an engine."""
    return InProcessModel(path).greedy


def wait_until(condition: Callable[[], bool]) -> None:
    """For what the engine's thread says nothing about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def finish_reason(answer: Answer) -> str:
    assert isinstance(answer.end, RequestFinished), answer.end
    return answer.end.finish_reason


def failure(answer: Answer) -> RequestFailed:
    assert isinstance(answer.end, RequestFailed), answer.end
    return answer.end


def test_greedy_answer(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """A prompt in several chunks, then tokens until their number is reached."""
    with running_engine(path, prefill=16) as running:
        running.ask("a", LONG, 6)
        answer = running.answer("a")
        assert answer.token_ids == alone(LONG, 6)
        assert answer.prefilled == [16, 32, 48, 64, 80, 96]
        assert finish_reason(answer) == "length"
        end = answer.end
        assert isinstance(end, RequestFinished)
        assert (end.num_prompt_tokens, end.num_output_tokens) == (100, 6)
        timings = end.timings
        assert min(timings.queue_s, timings.prefill_s, timings.decode_s) >= 0
        assert 0 < timings.expert_wait_s <= timings.prefill_s + timings.decode_s
        assert timings.ngram_wait_s > 0
        # Chunks of the prompt, the last of which gives the first token, and five more tokens.
        assert running.engine.num_steps == 7 + 5


def test_end_of_text(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """The token that ends it is part of the answer, which the gateway needs to know why it ended."""
    expected = alone(SHORT, 8)
    last = next(place for place in range(8) if expected[place] not in expected[:place] and place >= 2)
    with running_engine(path) as running:
        running.ask("a", SHORT, 8, eos_token_ids=[expected[last], 1_000_000])
        answer = running.answer("a")
        assert answer.token_ids == expected[: last + 1]
        assert finish_reason(answer) == "stop"


def test_a_stop_token(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """It ends an answer as an end of text does, and is named."""
    expected = alone(SHORT, 8)
    last = next(place for place in range(8) if expected[place] not in expected[:place] and place >= 2)
    with running_engine(path) as running:
        running.ask("a", SHORT, 8, stop_token_ids=[expected[last]])
        answer = running.answer("a")
        assert answer.token_ids == expected[: last + 1]
        assert isinstance(answer.end, RequestFinished)
        assert (answer.end.finish_reason, answer.end.stop_reason) == ("stop", expected[last])


def test_one_token_over_and_over(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bias makes the model broken; who asks for it has it go on."""
    forced = msgspec.structs.replace(GREEDY, logit_bias=[(5, 100.0)])
    with running_engine(path) as running:
        running.ask("a", SHORT, 300, sampling=forced)
        running.ask("b", SHORT, 300, sampling=forced, may_repeat=True)
        for request_id, length, reason in (("a", 256, REPETITION), ("b", 300, None)):
            answer = running.answer(request_id)
            assert answer.token_ids == [5] * length
            assert isinstance(answer.end, RequestFinished)
            assert (answer.end.finish_reason, answer.end.stop_reason) == ("length", reason)
    assert "a ended after 256 tokens: the model repeats token 5" in caplog.text


def test_logprobs_come_with_their_tokens(path: Path) -> None:
    """Of the model, whose logits are known."""
    with running_engine(path) as running:
        running.ask("a", SHORT, 3, sampling=msgspec.structs.replace(GREEDY, num_top_logprobs=2))
        chunks = []
        while not isinstance(message := running.messages.get(timeout=TIMEOUT_S), RequestFinished):
            chunks += [message] if isinstance(message, TokenChunk) else []
    logits = InProcessModel(path).logits(SHORT)[-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    ranked = np.argsort(-expected)
    (first,) = chunks[0].logprobs
    assert chunks[0].token_ids == [ranked[0]]
    assert first.top_token_ids == ranked[:2].tolist()
    assert first.top_logprobs == pytest.approx(expected[ranked[:2]], abs=1e-3)
    assert first.logprob == first.top_logprobs[0]
    assert [len(chunk.logprobs) for chunk in chunks] == [1, 1, 1]


def test_logits_of_a_prompt(path: Path, tmp_path: Path) -> None:
    """Every position's, in order, over several chunks; and nothing is generated. The gateway has made the
    file."""
    (tmp_path / "logits").touch()
    with running_engine(path, prefill=16) as running:
        running.ask("a", LONG, 0, logits_path=str(tmp_path / "logits"))
        answer = running.answer("a")
        assert (answer.token_ids, finish_reason(answer)) == ([], "length")
    model = InProcessModel(path)
    logits = np.fromfile(tmp_path / "logits", np.float32).reshape(len(LONG), model.config.vocab_size)
    assert np.abs(logits - model.logits(LONG)).max() <= 1e-4


def test_logits_that_cannot_be_written(
    path: Path, tmp_path: Path, alone: Callable[[list[int], int], list[int]]
) -> None:
    """A full disk is the failure of the request that wanted them, not of the one computed with it."""
    with running_engine(path, prefill=100) as running:
        running.gate.clear()
        running.ask("plain", SHORT, 12)
        running.ask("logits", LONG, 0, logits_path=str(tmp_path / "nowhere" / "logits"))
        running.gate.set()
        assert "cannot be written" in failure(running.answer("logits")).reason
        assert running.answer("plain").token_ids == alone(SHORT, 12)


def test_two_requests_at_once(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """One reads its prompt while the other generates, then both generate."""
    with running_engine(path, prefill=16) as running:
        running.ask("short", SHORT, 30)
        running.ask("long", LONG, 20)
        assert running.answer("long").token_ids == alone(LONG, 20)
        assert running.answer("short").token_ids == alone(SHORT, 30)
        assert running.engine.num_steps < 7 + 30 + 20


def test_more_requests_than_places(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """The others wait for their turn, and a waiting one takes no memory."""
    num_states = 0
    with running_engine(path, parallel=1) as running:
        new_state = running.model.new_state

        def counted() -> SequenceState:
            nonlocal num_states
            num_states += 1
            return new_state()

        running.model.new_state = counted  # type: ignore[method-assign]
        running.ask("first", SHORT, 100_000)
        running.answer("first", until=lambda answer: answer.token_ids)
        running.ask("second", SHORT, 3)
        running.ask("third", SHORT, 3)
        wait_until(lambda: running.engine.num_waiting == 2)
        assert (running.engine.num_running, num_states) == (1, 1)
        running.engine.submit(AbortRequest(request_id="first"))
        for name in ("second", "third"):
            assert running.answer(name).token_ids == alone(SHORT, 3)
        assert num_states == 3


def test_sampling_with_a_seed(path: Path) -> None:
    """The same seed gives the same answer, whatever runs beside it."""
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11)
    with running_engine(path) as running:
        running.ask("first", SHORT, 12, sampling=sampling)
        first = running.answer("first").token_ids
        running.ask("beside", LONG, 12)
        running.ask("second", SHORT, 12, sampling=sampling)
        assert running.answer("second").token_ids == first


def test_abort_while_the_prompt_is_read(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """It ends between two steps, and nothing more is said of it."""
    with running_engine(path, prefill=4) as running:
        running.ask("a", LONG, 5)
        running.answer("a", until=lambda answer: answer.prefilled)
        running.engine.submit(AbortRequest(request_id="a"))
        answer = running.answer("a")
        assert (finish_reason(answer), answer.token_ids) == ("abort", [])
        running.wait_idle()
        assert running.no_more_messages()
        running.ask("b", SHORT, 4)
        assert running.answer("b").token_ids == alone(SHORT, 4)


def test_abort_while_tokens_are_generated(path: Path) -> None:
    """What was generated by then was sent."""
    with running_engine(path) as running:
        running.ask("a", SHORT, 10_000)
        running.answer("a", until=lambda answer: len(answer.token_ids) >= 3)
        running.engine.submit(AbortRequest(request_id="a"))
        answer = running.answer("a")
        assert finish_reason(answer) == "abort"
        assert isinstance(answer.end, RequestFinished)
        assert answer.end.num_output_tokens == len(answer.token_ids) < 10_000


def test_abort_of_a_waiting_request_and_of_an_unknown_one(path: Path) -> None:
    """The one never begins, the other is no error."""
    with running_engine(path, parallel=1) as running:
        running.gate.clear()
        running.ask("a", SHORT, 4)
        running.ask("b", SHORT, 4)
        running.engine.submit(AbortRequest(request_id="nobody"))
        running.engine.submit(AbortRequest(request_id="b"))
        running.gate.set()
        assert finish_reason(running.answer("b")) == "abort"
        assert finish_reason(running.answer("a")) == "length"
        running.engine.submit(AbortRequest(request_id="a"))
        running.wait_idle()
        assert running.no_more_messages()


def test_gateway_lost(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """Nobody waits for the answers any more, so there are none, and there is room for others."""
    with running_engine(path, parallel=1) as running:
        running.gate.clear()
        running.ask("a", SHORT, 1000)
        running.ask("b", SHORT, 1000)
        running.engine.submit(AbortAll())
        running.gate.set()
        running.ask("c", SHORT, 4)
        assert running.answer("c").token_ids == alone(SHORT, 4)
        assert running.engine.num_waiting == running.engine.num_running == 0


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (errno.EIO, "disk_error", "rows of the n-gram table could not be read from tiny.gguf: Input/output"),
        (errno.ECANCELED, "worker_failed", "the stager was asked to stop while it read rows"),
    ],
)
def test_rows_that_were_not_read(path: Path, number: int, code: str, reason: str) -> None:
    """By a bad disk, or since the stager was ending: only one of them is the disk's fault."""
    with running_engine(path) as running:
        shape, serve, native = running._work[Role.STAGER]

        def fail(slot: Arrays) -> None:
            serve(slot)
            slot["failures"][1] = number

        running.lose(Role.STAGER)
        running._work[Role.STAGER] = shape, fail, native
        running.attach(Role.STAGER)
        running.ask("a", SHORT)
        assert failure(running.answer("a")).code == code
        assert failure(running.answer("a")).reason.startswith(reason)


@pytest.mark.parametrize("role", [Role.CPU_WORKER, Role.STAGER])
def test_worker_lost(path: Path, role: Role, alone: Callable[[list[int], int], list[int]]) -> None:
    """In the middle of a step: all requests fail at once, new ones too, until there is another."""
    with running_engine(path, parallel=1) as running:
        running.gate.clear()
        running.ask("running", SHORT, 1000)
        running.ask("waiting", SHORT, 1000)
        wait_until(lambda: running.engine.num_running == 1)
        # The experts still hold up the step when the stager goes, and are let go then.
        threading.Timer(0.05, running.gate.set).start()
        running.lose(role)
        for name in ("running", "waiting"):
            assert failure(running.answer(name)).code == WorkerFailedError.default_code
            assert str(role) in failure(running.answer(name)).reason
        running.ask("early", SHORT, 4)
        assert "a worker process is missing" in failure(running.answer("early")).reason
        running.attach(role)
        running.ask("late", SHORT, 4)
        assert running.answer("late").token_ids == alone(SHORT, 4)


def test_worker_that_fails_a_slot(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """The requests of that step fail with what the worker said; the one that waited is computed."""

    def fail(slot: Arrays) -> None:
        running.on_experts = lambda slot: None
        raise RuntimeError("no such luck")

    with running_engine(path, parallel=2) as running:
        running.gate.clear()
        running.on_experts = fail
        for name in "abc":
            running.ask(name, SHORT, 4)
        running.gate.set()
        assert "no such luck" in failure(running.answer("a")).reason
        assert failure(running.answer("a")).code == "worker_error"
        assert running.answer("c").token_ids == alone(SHORT, 4)
        # Both were running, but a step reads one prompt at a time.
        assert running.answer("b").token_ids == alone(SHORT, 4)


def test_numbers_nobody_can_sample_from(path: Path, alone: Callable[[list[int], int], list[int]]) -> None:
    """They are the failure of their own request; the one decoded in the same step goes on."""

    def spoil_first_of_two(slot: Arrays) -> None:
        if slot["header"][1] == 2:
            slot["outputs"][0] = np.nan

    with running_engine(path, parallel=2) as running:
        running.ask("first", SHORT, 1000)
        running.answer("first", until=lambda answer: answer.token_ids)
        running.ask("second", LONG[:1], 5)
        running.answer("second", until=lambda answer: answer.token_ids)
        running.on_experts = spoil_first_of_two
        assert failure(running.answer("first")).code == "invalid_model_output"
        assert running.answer("second").token_ids == alone(LONG[:1], 5)


def test_worker_that_does_not_answer(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The watchdog ends the wait, and says which worker it was; the log says what each was at."""
    with running_engine(path, watchdog_s=0.2) as running:
        running.gate.clear()
        running.ask("a", SHORT, 4)
        failed = failure(running.answer("a"))
        assert failed.code == "step_stalled"
        assert "cpu_worker" in failed.reason
        assert "meanwhile the cpu_worker works on 1 slot, 0 slots done" in caplog.text
        assert "meanwhile the stager has nothing to do, 1 slots done" in caplog.text


def test_stop_ends_what_runs(path: Path) -> None:
    """Nobody is left without a last word."""
    with running_engine(path, parallel=1) as running:
        running.ask("a", SHORT, 100_000)
        running.ask("b", SHORT, 4)
        running.answer("a", until=lambda answer: answer.token_ids)
        running.engine.stop()
        for name in "ab":
            assert "stopping" in failure(running.answer(name)).reason
        assert running.engine.ended.result(timeout=0) is None


def test_failure_of_the_engine_itself(path: Path) -> None:
    """It must not die in silence: whoever started the thread is told, and so are its requests."""

    def fail(reader: object) -> list[Work]:
        raise MemoryError("out of everything")

    with running_engine(path) as running:
        running.scheduler.schedule = fail  # type: ignore[method-assign, assignment]
        running.ask("a", SHORT, 4)
        with pytest.raises(MemoryError):
            running.engine.ended.result(timeout=TIMEOUT_S)
        assert failure(running.answer("a")).code == WorkerFailedError.default_code


def test_a_device_that_is_lost_ends_the_process(path: Path) -> None:
    """After such an error every later one on the device would fail too: a new process is needed."""

    def fail(*arguments: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with running_engine(path) as running:
        running.model.forward = fail  # type: ignore[method-assign, assignment]
        running.ask("a", SHORT, 4)
        with pytest.raises(torch.AcceleratorError):
            running.engine.ended.result(timeout=TIMEOUT_S)
        assert failure(running.answer("a")).code == WorkerFailedError.default_code


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")]
)
def test_no_memory_for_a_step(
    path: Path, alone: Callable[[list[int], int], list[int]], error: Exception
) -> None:
    """Its requests are told what to lower; the next one is computed."""
    with running_engine(path) as running:
        forward = running.model.forward

        def fail(*arguments: object) -> None:
            running.model.forward = forward  # type: ignore[method-assign]
            raise error

        running.model.forward = fail  # type: ignore[method-assign, assignment]
        running.ask("a", SHORT, 4)
        assert "lower --max-context" in failure(running.answer("a")).reason
        running.ask("b", SHORT, 4)
        assert running.answer("b").token_ids == alone(SHORT, 4)


def test_memory_of_a_finished_request(path: Path) -> None:
    """Its state is given back when it ends, not when the next request comes."""
    states: list[weakref.ref[SequenceState]] = []
    with running_engine(path) as running:
        new_state = running.model.new_state

        def noted() -> SequenceState:
            state = new_state()
            states.append(weakref.ref(state))
            return state

        running.model.new_state = noted  # type: ignore[method-assign]
        running.ask("a", SHORT, 3)
        running.answer("a")
        # The last word is sent a moment before the step is over.
        wait_until(lambda: gc.collect() >= 0 and states[0]() is None)
        assert len(states) == 1


def test_idle_time(path: Path) -> None:
    """A draining process leaves when there was nothing to do for a while."""
    with running_engine(path) as running:
        running.ask("a", SHORT, 1000)
        running.answer("a", until=lambda answer: answer.token_ids)
        assert running.engine.idle_s == 0
        running.engine.submit(AbortRequest(request_id="a"))
        running.answer("a")
        running.wait_idle()
        assert 0 < running.engine.idle_s < TIMEOUT_S
