"""The engine thread: takes commands, computes step after step, posts what comes of them.

It owns the sequences, the model's state and the rings to the other workers; nobody else touches them.
Commands come in by a queue from the event loop, answers leave by `post`, which hands them to the event loop.

A step that fails takes its sequences with it, since their state is then half-advanced; the others go on. When
a worker is lost every request fails: all of them need it. A failure in the engine itself ends the thread, and
with it the process, which is then started anew.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from gpu_worker.checkpointing import Checkpointing
from gpu_worker.conversations import ConversationCache
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.sampler import Sampler
from gpu_worker.scheduler import Scheduler, Work
from gpu_worker.sequence import Clock, Sequence
from gpu_worker.speculation.drafter import Drafter, Followed
from gpu_worker.speculation.verification import verify
from gpu_worker.step import StepResult, account_failed, compute, places
from gpu_worker.ways import AttachedWorkers, Ways
from shared.errors import GenerationError, ModelOutputError, StepStalledError, WorkerFailedError
from shared.expert_blobs import ExpertMode
from shared.messages import (
    REPETITION,
    AbortRequest,
    GenerateRequest,
    Message,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    RequestTimings,
    TokenChunk,
)
from shared.process import major_faults
from shared.ring import RingClient
from shared.run_directory import Role

_log = logging.getLogger(__name__)

# Between two looks at experts that are being loaded while there is nothing else to do.
_LOADING_LOOK_S = 0.001
# Slots that a prompt has borrowed are not filled again before there was nothing to do for so long: the next
# prompt would borrow them again.
_REST_S = 0.25


@dataclass(frozen=True, slots=True)
class AttachRing:
    """A worker serves this ring from now on, where the model has one for it; and the stager one of staging
    places, where there are any."""

    role: Role
    ring: RingClient | None
    staging: RingClient | None = None
    experts: ExpertMode | None = None
    """Of the cpu_worker: how it keeps experts."""


@dataclass(frozen=True, slots=True)
class DetachRing:
    """The worker that serves the role's rings is lost; they are closed."""

    role: Role
    failure: WorkerFailedError


@dataclass(frozen=True, slots=True)
class AbortAll:
    """The gateway is lost, and with it everyone who waits for answers."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = GenerateRequest | AbortRequest | AttachRing | DetachRing | AbortAll | Stop


@dataclass(frozen=True, slots=True)
class _Waits:
    """What steps have waited for since the start, in seconds, and the faults of this process."""

    experts_s: float
    transfers_s: float
    device_s: float
    ngram_s: float
    major_faults: int

    @classmethod
    def of(cls, ways: Ways) -> "_Waits":
        """As it is now."""
        experts, ngram = ways.experts, ways.ngram
        return cls(
            experts_s=experts.waited_s,
            transfers_s=experts.transfer_waited_s,
            device_s=experts.device_waited_s,
            ngram_s=ngram.waited_s if ngram is not None else 0.0,
            major_faults=major_faults(),
        )

    def book_since(self, before: "_Waits", works: list[Work]) -> None:
        """Books what a step has waited for on its requests, in full for each, also where it has failed."""
        for work in works:
            clock = work.sequence.clock
            clock.expert_wait_s += self.experts_s - before.experts_s
            clock.transfer_wait_s += self.transfers_s - before.transfers_s
            clock.device_wait_s += self.device_s - before.device_s
            clock.ngram_wait_s += self.ngram_s - before.ngram_s
            clock.major_faults += self.major_faults - before.major_faults


class Engine:
    """The thread and its queue of commands."""

    def __init__(
        self,
        model: Qwen4Exp,
        torch_device: torch.device,
        scheduler: Scheduler,
        post: Callable[[Message], None],
        workers: AttachedWorkers,
        conversations: ConversationCache,
        drafter: Drafter,
        cpu: int | None = None,
    ) -> None:
        """`workers`, `conversations` and `drafter` are the thread's own; `cpu` is what it is pinned to, None
        for wherever the process may run."""
        self._model = model
        self._torch_device = torch_device
        self._scheduler = scheduler
        self._post = post
        self._workers = workers
        self._checkpointing = Checkpointing(model, conversations)
        self._drafter = drafter
        self._cpu = cpu
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_busy = time.monotonic()
        self._has_steps = True
        self.num_steps = 0
        # Done when the thread has ended; carries the failure that ended it, if one did.
        self.ended: Future[None] = Future()

    def start(self) -> None:
        """Starts the thread."""
        self.ended.set_running_or_notify_cancel()
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queues a command; it takes effect between two steps. Called from any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread; requests that still run end with an error."""
        self.submit(Stop())
        self._thread.join()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended or command came; 0 while there is one."""
        if self._scheduler.num_running or self._scheduler.num_waiting or not self._commands.empty():
            return 0.0
        return time.monotonic() - self._last_busy

    def gauges(self) -> dict[str, float]:
        """How experts are placed, for the heartbeat. Called from any thread."""
        kept = self._checkpointing.conversations
        return {
            **self._workers.gauges().as_heartbeat(),
            "conversation_cache_bytes": float(kept.num_bytes),
            "conversation_cache_entries": float(len(kept)),
            "conversation_cache_evictions_total": float(kept.num_evicted),
        }

    @property
    def num_running(self) -> int:
        """Requests being computed."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._scheduler.num_waiting

    def _run(self) -> None:
        try:
            if self._cpu is not None:
                os.sched_setaffinity(0, {self._cpu})
            while self._take_commands():
                # Nothing here keeps the step's sequences: their memory is free when they have ended.
                self._has_steps = self._step_if_any()
            self._fail_all(WorkerFailedError("the gpu_worker is stopping"))
        except BaseException as error:
            try:
                self._fail_all(WorkerFailedError("the gpu_worker failed; try again soon"))
            finally:
                self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            self._workers.close()

    def _take_commands(self) -> bool:
        """Carries out what is queued; sleeps where there is neither a command nor a sequence."""
        while True:
            has_work = bool(self._scheduler.num_running or self._scheduler.num_waiting)
            if self.idle_s >= _REST_S:
                self._model.pages.trim()
                self._workers.rest(self._model.pages.num_bytes)
            is_loading = self._workers.go_on_loading()
            self._workers.set_in_use(has_work or is_loading)
            patience_s = _REST_S if self._workers.has_lent else None
            # Sequences may wait for the disk, all of them.
            is_waiting = has_work and not self._has_steps
            try:
                command = self._commands.get(
                    block=not has_work or is_waiting,
                    timeout=_LOADING_LOOK_S if is_loading or is_waiting else patience_s,
                )
            except queue.Empty:
                if has_work:
                    return True
                continue
            self._last_busy = time.monotonic()
            self._has_steps = True
            if isinstance(command, Stop):
                return False
            self._carry_out(command)
            # Nor does a command that was the last for a while keep a ring.
            del command

    def _carry_out(
        self, command: GenerateRequest | AbortRequest | AttachRing | DetachRing | AbortAll
    ) -> None:
        match command:
            case GenerateRequest():
                self._begin(command)
            case AbortRequest(request_id=request_id):
                sequence = self._scheduler.find(request_id)
                if sequence is not None:
                    self._finish(sequence, "abort")
            case AttachRing(role=role, ring=ring, staging=staging, experts=experts):
                self._workers.attach(role, ring, staging, experts)
            case DetachRing(role=role, failure=failure):
                self._workers.detach(role)
                self._fail_all(failure)
            case AbortAll():
                for sequence in list(self._scheduler):
                    self._scheduler.remove(sequence)

    def _begin(self, request: GenerateRequest) -> None:
        if self._workers.ways is None:
            failure = WorkerFailedError("a worker process is missing; it is being restarted, try again soon")
            self._post_failure(request.request_id, failure)
            return
        self._scheduler.add(
            Sequence(
                request=request,
                sampler=Sampler(
                    request.sampling,
                    request.prompt_token_ids,
                    (*request.eos_token_ids, *request.stop_token_ids),
                ),
                clock=Clock(arrived_at=time.monotonic()),
                token_ids=list(request.prompt_token_ids),
            )
        )

    def _reader(self) -> Sequence | None:
        """The sequence that reads of its prompt next, with its state."""
        readers = self._scheduler.readers()
        for sequence in readers:
            if sequence.state is not None:
                return sequence
            if self._checkpointing.awaits(sequence, readers):
                continue
            try:
                # A page of a conversation that it goes on from is copied.
                self._workers.claim_context(self._model.pages.bytes_with(1))
                checkpoint = self._checkpointing.begin(sequence)
                self._drafter.begin(sequence, checkpoint)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                self._end_with_failure(sequence, self._failure_of(error, 1))
                continue
            return sequence
        return None

    def _step_if_any(self) -> bool:
        """Computes the next step; whether there is one."""
        works = self._scheduler.schedule(self._reader())
        if works:
            self._step(works)
        return bool(works)

    def _step(self, works: list[Work]) -> None:
        ways = self._workers.ways
        assert ways is not None, "sequences are failed when a worker is lost"
        started = time.monotonic()
        for work in works:
            clock = work.sequence.clock
            clock.started_at = clock.started_at or started
        num_prefilled = sum(work.num_tokens for work in works if work.sequence.is_prefilling)
        num_generating = sum(not work.sequence.is_prefilling for work in works)
        try:
            self._workers.claim_context(self._context_bytes_after(works))
            self._checkpointing.prepare(works)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            # Nothing has begun: the account is still that of the step before.
            self._fail(works, self._failure_of(error, len(works)))
            return
        before = _Waits.of(ways)
        try:
            ways.experts.begin_step([stop for _, _, stop in places(works)], num_prefilled)
            result = compute(self._model, works, ways, self._torch_device)
        except torch.AcceleratorError:
            # A device that has failed once in this way fails every time, until the process is started anew.
            raise
        except Exception as error:
            ways.experts.end_step(has_failed=True)
            self._end_failed_step(error, works, ways, before)
            return
        ways.experts.end_step()
        self.num_steps += 1
        after = _Waits.of(ways)
        after.book_since(before, works)
        ngram_wait_s = after.ngram_s - before.ngram_s
        config = self._model.config
        for work, start, stop in places(works):
            routes_per_token = config.num_layers * config.num_experts_used
            work.sequence.clock.add_experts(ways.experts.counts, start, stop, routes_per_token)
        if num_prefilled:
            self._scheduler.chunk.note(num_prefilled, ngram_wait_s)
        for sequence, failure in result.failures:
            _log.error("%s failed: %s", sequence.request_id, failure)
            self._end_with_failure(sequence, failure)
        self._choose(result, ngram_wait_s)
        following = time.monotonic()
        try:
            self._follow(works, result, ways)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._fail(self._running(works), self._failure_of(error, len(works)))
            return
        followed = time.monotonic()
        self._scheduler.share.note(followed - started, num_prefilled, has_answers=num_generating > 0)
        self._end_finished(works)
        if not num_prefilled:
            # All of it but drafting: what comes with a step however many tokens it has is saved by drafts.
            seconds = time.monotonic() - started - (followed - following)
            self._drafter.payoff.note_step(sum(work.num_tokens for work in works), seconds)

    def _running(self, works: list[Work]) -> list[Work]:
        """Those whose sequences have not failed."""
        return [work for work in works if work.sequence in self._scheduler.running]

    def _follow(self, works: list[Work], result: StepResult, ways: Ways) -> None:
        """Has drafts made for the next step, and keeps what this one has left of prompts."""
        if not self._drafter.drafts_any and not any(work.sequence.wanted for work in works):
            return
        followed = []
        for work, start, _ in places(works):
            if work.sequence in self._scheduler.running:
                streams = result.streams[start : start + work.sequence.num_computed - work.start]
                followed.append((work, streams))
        self._drafter.follow(
            [Followed(work.sequence, streams, work.snapshots) for work, streams in followed], ways
        )
        for work, streams in followed:
            self._checkpointing.keep(work, streams)

    def _context_bytes_after(self, works: list[Work]) -> int:
        """What keys and values take once there is room for a step."""
        pages = self._model.pages
        return pages.bytes_with(sum(work.num_new_pages() for work in works))

    def _end_failed_step(self, error: Exception, works: list[Work], ways: Ways, before: _Waits) -> None:
        """Ends the sequences of a step, each with what has gone wrong for it."""
        failure = self._failure_of(error, len(works))
        if failure is not error:
            self._fail(works, failure)
            return
        if isinstance(error, StepStalledError):
            for words in self._workers.describe():
                _log.error("meanwhile %s", words)
        _Waits.of(ways).book_since(before, works)
        account_failed(works, ways)
        for work, start, stop in places(works):
            own = ways.experts.counts.failure(start, stop)
            self._end_with_failure(work.sequence, own or failure)

    def _failure_of(self, error: Exception, num_requests: int) -> GenerationError:
        """What clients are told of an error, which is logged."""
        if isinstance(error, GenerationError):
            _log.error("a step of %d requests failed: %s", num_requests, error)
            return error
        if _is_out_of_memory(error):
            # For whoever comes next.
            self._checkpointing.conversations.clear()
            _log.error("a step of %d requests failed: %s", num_requests, error)
            return GenerationError(
                "the device is out of memory; lower --max-context, --parallel or --prefill"
            )
        _log.error("a step of %d requests failed", num_requests, exc_info=error)
        return GenerationError("an internal error; the server's log has the details")

    def _choose(self, result: StepResult, ngram_wait_s: float) -> None:
        """Chooses tokens, takes back what was drafted in vain, and tells the gateway."""
        now = time.monotonic()
        for work, logits in result.choices:
            sequence = work.sequence
            try:
                verified = verify(sequence, logits)
            except ModelOutputError as error:
                self._end_with_failure(sequence, error)
                continue
            assert sequence.state is not None
            sequence.state.roll_back(work.stop + verified.num_accepted)
            sequence.drafts.note(verified.num_accepted)
            if work.drafts:
                source = sequence.drafts.source
                self._drafter.payoff.note_verified(source, len(work.drafts), verified.num_accepted)
            sequence.clock.first_token_at = sequence.clock.first_token_at or now
            self._post(
                TokenChunk(
                    request_id=sequence.request_id,
                    token_ids=verified.token_ids,
                    logprobs=verified.logprobs,
                    ngram_wait_s=ngram_wait_s,
                )
            )

    def _end_finished(self, works: list[Work]) -> None:
        """Ends the sequences that are at their end; tells of the others how far they are with their
        prompts."""
        for work in self._running(works):
            sequence = work.sequence
            if sequence.is_prefilling:
                progress = PrefillProgress(
                    request_id=sequence.request_id,
                    num_prefilled=work.stop,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                )
                self._post(progress)
            elif sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self._scheduler.remove(sequence)
        self._checkpointing.keep_end(sequence)
        self._last_busy = time.monotonic()
        stop_reason = sequence.stop_reason if reason != "abort" else None
        if stop_reason == REPETITION:
            _log.warning(
                "%s ended after %d tokens: the model repeats token %d over and over",
                sequence.request_id,
                sequence.num_output_tokens,
                sequence.token_ids[-1],
            )
        self._post(
            RequestFinished(
                request_id=sequence.request_id,
                finish_reason=reason,
                stop_reason=stop_reason,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_output_tokens=sequence.num_output_tokens,
                timings=sequence.timings(time.monotonic()),
            )
        )

    def _fail(self, works: list[Work], failure: GenerationError) -> None:
        for work in works:
            self._end_with_failure(work.sequence, failure)

    def _fail_all(self, failure: GenerationError) -> None:
        for sequence in list(self._scheduler):
            self._end_with_failure(sequence, failure)

    def _end_with_failure(self, sequence: Sequence, failure: GenerationError) -> None:
        self._scheduler.remove(sequence)
        self._last_busy = time.monotonic()
        self._post_failure(sequence.request_id, failure, sequence.timings(time.monotonic()))

    def _post_failure(
        self, request_id: str, failure: GenerationError, timings: RequestTimings | None = None
    ) -> None:
        self._post(
            RequestFailed(request_id=request_id, code=failure.code, reason=str(failure), timings=timings)
        )


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a type for it on a device only; on the CPU it is a RuntimeError like any other."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
