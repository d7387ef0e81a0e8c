"""The gateway's view of the workers: who is there, whether requests can run, and the requests that do.

The workers connect to the gateway. Requests go to the gpu_worker, prompts to the stager, answers come back
and are handed to the request they belong to. This module knows messages, not HTTP and not text.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from gateway.attribution import Totals
from shared.config import GatewayConfig
from shared.errors import GenerationError, ModelLoadingError, WorkerFailedError
from shared.link import Identity, LinkServer, Peer, PeerState
from shared.messages import (
    AbortRequest,
    ForgetPrompt,
    FromConnecting,
    GenerateRequest,
    Heartbeat,
    Init,
    PrefillProgress,
    PromptStaged,
    RequestFailed,
    RequestFinished,
    StagePrompt,
    TokenChunk,
)
from shared.process import ProcessState
from shared.run_directory import WORKER_ROLES, Role, RunDirectory

_log = logging.getLogger(__name__)

# What a client is told about when a restarted stack may answer again.
_RETRY_AFTER_S = 5

Answer = TokenChunk | PrefillProgress | RequestFinished


class EngineStream:
    """The answers to one request. Leaving the context ends the request, whatever its state."""

    def __init__(
        self, client: "EngineClient", request: GenerateRequest, on_last_word: Callable[[], None]
    ) -> None:
        self._client = client
        self._request = request
        self._on_last_word = on_last_word
        # Bounded by the answer's length: one entry per token at most.
        self._answers: asyncio.Queue[tuple[float, Answer | GenerationError]] = asyncio.Queue()
        self._is_over = False
        # When the answer that `next` returned last had come, whenever it was asked for.
        self.answered_at = 0.0

    async def __aenter__(self) -> Self:
        self._client.begin(self, self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.end(self._request.request_id, is_over=self._is_over)

    async def next(self) -> Answer:
        """The next answer. Raises GenerationError where the request failed."""
        self.answered_at, answer = await self._answers.get()
        if isinstance(answer, GenerationError):
            self._is_over = True
            raise answer
        self._is_over = isinstance(answer, RequestFinished)
        return answer

    async def abort(self) -> RequestFinished:
        """Ends the generation early and returns its last word, which has the true timings.

        Raises GenerationError where it failed meanwhile.
        """
        self._client.abort(self._request.request_id)
        while True:
            answer = await self.next()
            if isinstance(answer, RequestFinished):
                return answer

    @property
    def staged(self) -> PromptStaged | None:
        """What staging the prompt took, as far as that is known by now."""
        return self._client.staged(self._request.request_id)

    def put(self, answer: Answer | GenerationError) -> None:
        """Hands an answer to whoever reads the stream."""
        self._answers.put_nowait((time.monotonic(), answer))
        if isinstance(answer, RequestFinished | GenerationError):
            self._on_last_word()


class EngineClient:
    """Links to the workers, and the running requests."""

    def __init__(self, identity: Identity, directory: RunDirectory, config: GatewayConfig) -> None:
        self._incarnation = identity.incarnation
        self._server = LinkServer(identity, directory, WORKER_ROLES, self, config)
        self._streams: dict[str, EngineStream] = {}
        # What came of the prompts that the stager was told of, until it is told to forget them.
        self._staged: dict[str, PromptStaged | None] = {}
        # One of the two is set at any time; see `_set_ready`.
        self._ready, self._absent = asyncio.Event(), asyncio.Event()
        self._set_ready(False)
        self._stop_failure: GenerationError | None = None
        self.max_context = 0
        self.totals = Totals()

    @property
    def peers(self) -> dict[Role, Peer]:
        """The workers as they are known now."""
        return self._server.peers

    @property
    def is_ready(self) -> bool:
        """Whether requests can run now."""
        return self._ready.is_set() and self._stop_failure is None

    @property
    def num_running(self) -> int:
        """Requests that were sent and are not over."""
        return len(self._streams)

    async def run(self) -> None:
        """Serves the links until cancelled."""
        await self._server.run()

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits for the workers, for example while one is restarted. Raises ModelLoadingError."""
        # Not wait_for: before Python 3.12 it loses a cancellation that comes as the wait ends.
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise self.not_ready() from None

    async def while_ready(self, future: "asyncio.Future[None]") -> None:
        """Waits until `future` is done, or until the workers are not ready any more."""
        absence: asyncio.Future[Any] = asyncio.ensure_future(self._absent.wait())
        waited_for: set[asyncio.Future[Any]] = {future, absence}
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        finally:
            absence.cancel()

    def not_ready(self) -> ModelLoadingError:
        """The error for requests that come while the workers are not ready."""
        worker = self.peers[Role.GPU_WORKER]
        activity = worker.heartbeat.activity if worker.heartbeat is not None else "it is being started"
        return ModelLoadingError(
            f"the model is not ready: {activity}; try again in a few seconds", retry_after_s=_RETRY_AFTER_S
        )

    def stage(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Tells the stager of a prompt that will be computed soon. To be followed by `forget`."""
        self._staged[request_id] = None
        message = StagePrompt(request_id=request_id, prompt_token_ids=list(prompt_token_ids))
        self._server.post(Role.STAGER, message)

    def forget(self, request_id: str) -> None:
        """Tells the stager that a prompt will not be computed any more. Does no harm the second time."""
        self._staged.pop(request_id, None)
        self._server.post(Role.STAGER, ForgetPrompt(request_id=request_id))

    def staged(self, request_id: str) -> PromptStaged | None:
        """What the stager said of a prompt that is not forgotten yet."""
        return self._staged.get(request_id)

    def open(self, request: GenerateRequest, on_last_word: Callable[[], None]) -> EngineStream:
        """A request, to be entered as a context. `on_last_word` is called once the gpu_worker is done with
        it, well or not, whether or not all its answers have been read."""
        return EngineStream(self, request, on_last_word)

    def begin(self, stream: EngineStream, request: GenerateRequest) -> None:
        """Sends a request and routes its answers to the stream.

        A gpu_worker that is not ready is not asked: one that still loads would not answer.
        """
        if self._stop_failure is not None:
            stream.put(self._stop_failure)
        elif not self.is_ready or not self._server.post(Role.GPU_WORKER, request):
            stream.put(WorkerFailedError("the gpu_worker is gone; it is being restarted, try again soon"))
        self._streams[request.request_id] = stream

    def abort(self, request_id: str) -> None:
        """Asks for an early end."""
        self._server.post(Role.GPU_WORKER, AbortRequest(request_id=request_id))

    def end(self, request_id: str, *, is_over: bool) -> None:
        """Stops routing answers; what still runs is aborted."""
        self._streams.pop(request_id, None)
        if not is_over:
            self.abort(request_id)
            self.forget(request_id)

    def stop(self, failure: GenerationError) -> None:
        """Ends every request with an error, those too that wait for the workers or have yet to begin."""
        self._stop_failure = failure
        self._set_ready(True)
        self._fail_all(failure)

    def _fail_all(self, failure: GenerationError) -> None:
        for stream in list(self._streams.values()):
            stream.put(failure)

    # What the link reports.

    def greet(self, role: Role) -> Init:
        """Workers get nothing but an answer from the gateway."""
        return Init(incarnation=self._incarnation)

    def peer_ready(self, peer: Peer) -> None:
        """The worker has loaded."""
        if peer.role is Role.GPU_WORKER:
            self.max_context = int(peer.capabilities["max_context"])
            self._judge()

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """Requests cannot survive the gpu_worker; the loss of others it reports itself."""
        self._judge()
        if peer.role is not Role.GPU_WORKER:
            return
        self._fail_all(
            WorkerFailedError(f"the gpu_worker is lost: {reason}; it is being restarted, try again soon")
        )

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """Heartbeats change readiness; answers go to their streams."""
        match message:
            case Heartbeat():
                self._judge()
            case TokenChunk() | PrefillProgress():
                self._hand_on(message)
            case RequestFinished(timings=timings):
                self.totals.finished(timings)
                self._hand_on(message)
            case PromptStaged():
                self._note_staged(message)
            case RequestFailed(request_id=request_id, code=code, reason=reason, timings=timings):
                if timings is not None:
                    self.totals.finished(timings)
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.put(GenerationError(reason, code=code))
            case _:
                _log.error("%s sent a %s, which it may not", peer.role, type(message).__name__)

    def _hand_on(self, answer: Answer) -> None:
        stream = self._streams.get(answer.request_id)
        if stream is not None:
            stream.put(answer)

    def _note_staged(self, staged: PromptStaged) -> None:
        """Counts what was read, also for a request that is over by now, but never the same twice."""
        request_id = staged.request_id
        if self._staged.get(request_id) is not None:
            _log.error("the stager says twice what it read for %s", request_id)
            return
        self.totals.staged(staged)
        if request_id in self._staged:
            self._staged[request_id] = staged

    def _judge(self) -> None:
        """The stack can compute when the gpu_worker says that it has all it needs."""
        if self._stop_failure is not None:
            return
        worker = self.peers[Role.GPU_WORKER]
        is_ready = (
            worker.state is PeerState.READY
            and worker.heartbeat is not None
            and worker.heartbeat.state == ProcessState.READY
        )
        if is_ready and not self._ready.is_set():
            _log.info("the workers are ready")
            self._set_ready(True)
        elif not is_ready and self._ready.is_set():
            _log.warning("the workers are not ready any more")
            self._set_ready(False)

    def _set_ready(self, is_ready: bool) -> None:
        up, down = (self._ready, self._absent) if is_ready else (self._absent, self._ready)
        up.set()
        down.clear()
