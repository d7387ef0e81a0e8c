"""The gateway in this process, with a gpu_worker that says what a test tells it to say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, Request

from gateway.admission import Admission
from gateway.app import build_app
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics, StackCollector
from gateway.services import Services
from gateway.text_model import TextModel
from gateway.tokenizer import Tokenizer
from shared.config import GatewayConfig
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.link import Identity, PeerState
from shared.messages import (
    AbortRequest,
    FileReads,
    FromConnecting,
    GenerateRequest,
    Heartbeat,
    Message,
    PromptStaged,
    RequestFailed,
    RequestFinished,
    RequestTimings,
    TokenChunk,
)
from shared.process import ProcessContext
from shared.run_directory import Role
from tests.support.run_directories import temporary_run_directory
from tests.support.vocabulary import small_vocabulary

Client = TestClient[Request, Application]

TIMINGS = RequestTimings(queue_s=0.1, prefill_s=0.2, decode_s=0.4, ngram_wait_s=0.0, expert_wait_s=0.3)


def small_tokenizer() -> Tokenizer:
    """All bytes and a few words."""
    return Tokenizer.from_metadata(small_vocabulary(), "test")


def heartbeat(state: str = "ready", activity: str = "serving") -> Heartbeat:
    return Heartbeat(state=state, activity=activity, progress=1.0, gauges={})


def reads(file: str, num_reads: int, num_bytes: int, wait_s: float = 0.0) -> FileReads:
    return FileReads(file=file, num_reads=num_reads, num_bytes=num_bytes, wait_s=wait_s)


def staged(request_id: str, what: FileReads) -> PromptStaged:
    return PromptStaged(request_id=request_id, num_rows=50, num_hits=10, reads=what, seconds=0.25, depth=31.5)


def finished(
    request_id: str, reason: str = "length", num_output_tokens: int = 1, timings: RequestTimings = TIMINGS
) -> RequestFinished:
    return RequestFinished(
        request_id=request_id,
        finish_reason=reason,
        num_prompt_tokens=1,
        num_output_tokens=num_output_tokens,
        timings=timings,
    )


def failed(request_id: str, code: str = "worker_failed") -> RequestFailed:
    return RequestFailed(request_id=request_id, code=code, reason="it broke")


class ScriptedWorkers:
    """Stands where the link to the workers is: notes what is posted, and lets a test answer."""

    def __init__(self) -> None:
        self.posted: list[tuple[Role, Message]] = []
        self.requests: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.aborted: list[str] = []
        self.are_reachable = True

    def post(self, role: Role, message: Message) -> bool:
        self.posted.append((role, message))
        if isinstance(message, GenerateRequest):
            self.requests.put_nowait(message)
        if isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
        return self.are_reachable


class InProcess:
    """A gateway that serves, and the test's hold on its parts."""

    def __init__(self, services: Services, workers: ScriptedWorkers, client: Client) -> None:
        self.services = services
        self.workers = workers
        self.client = client

    @property
    def engine(self) -> EngineClient:
        return self.services.engine

    def say(self, message: FromConnecting) -> None:
        """The gpu_worker says something."""
        self.engine.message(self.engine.peers[Role.GPU_WORKER], message)

    def stager_says(self, message: FromConnecting) -> None:
        self.engine.message(self.engine.peers[Role.STAGER], message)

    def answer(
        self, request: GenerateRequest, text: str, reason: str = "length", timings: RequestTimings = TIMINGS
    ) -> None:
        """The gpu_worker writes this text, a token for each byte, and is done."""
        for byte in text.encode():
            self.say(TokenChunk(request_id=request.request_id, token_ids=[byte]))
        self.say(finished(request.request_id, reason, len(text.encode()), timings))

    def lose_gpu_worker(self, reason: str = "its process died") -> None:
        peer = self.engine.peers[Role.GPU_WORKER]
        peer.state, peer.heartbeat = PeerState.ABSENT, None
        peer.num_losses += 1
        self.engine.peer_lost(peer, reason)

    def find_gpu_worker(self) -> None:
        """The gpu_worker is there and ready."""
        peer = self.engine.peers[Role.GPU_WORKER]
        peer.state, peer.heartbeat = PeerState.READY, heartbeat()
        peer.capabilities = {"max_context": 64, "parallel": 1, "device": "cpu"}
        self.engine.peer_ready(peer)


def make_engine(context: ProcessContext[GatewayConfig], workers: ScriptedWorkers) -> EngineClient:
    engine = EngineClient(context.identity, context.directory, context.config)
    engine._server.post = workers.post  # type: ignore[method-assign]
    return engine


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[InProcess]:
    """A gateway with these settings whose gpu_worker is ready."""
    config = GatewayConfig(**settings)
    workers = ScriptedWorkers()
    with temporary_run_directory() as directory, GGUFModel(DEMO_MODEL_PATH) as model:
        identity = Identity(Role.GATEWAY, "abcdef01", "model", 1)
        context = ProcessContext(config, identity, directory, model)
        engine = make_engine(context, workers)
        admission = Admission(config.parallel, config.queue_size)
        metrics = Metrics("tiny")
        metrics.registry.register(StackCollector(engine, admission, context.heartbeat, "tiny"))
        text = TextModel(small_tokenizer(), None)
        services = Services(context, "tiny", 0, engine, admission, metrics, text)
        async with TestClient(TestServer(build_app(services)), raise_for_status=False) as client:
            running = InProcess(services, workers, client)
            running.find_gpu_worker()
            yield running
