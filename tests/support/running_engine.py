"""The engine of the gpu_worker at work in this process: its thread, and a thread for each worker it needs.

The rings are real, and so is the work in their slots; `gate` and `on_experts` let a test hold it up or spoil
it.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.native_slots import NativeExperts
from cpu_worker.worker import ExpertService
from gpu_worker.conversation_files import ConversationFiles
from gpu_worker.conversations import ConversationCache
from gpu_worker.device.cpu import CpuDevice
from gpu_worker.device.interface import Device
from gpu_worker.device.torch_device import TorchDevice
from gpu_worker.engine import AttachRing, DetachRing, Engine
from gpu_worker.experts.counts import ExpertFiles
from gpu_worker.experts.placement import ExpertPlacement, open_placement
from gpu_worker.experts.profile_store import ProfileStore
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.prefill_share import PrefillShare
from gpu_worker.scheduler import Scheduler
from gpu_worker.speculation.drafter import Drafter
from gpu_worker.ways import AttachedWorkers, ModelFiles
from shared.config import GpuWorkerConfig
from shared.errors import WorkerFailedError
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.gguf.model import GGUFModel
from shared.messages import (
    GenerateRequest,
    Message,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    Sampling,
    TokenChunk,
    TokenLogprobs,
)
from shared.model_config import read_model_config
from shared.native.records import Record
from shared.native.team import Team
from shared.placement.trace import TraceWriter
from shared.ring import Arrays, NativeWork, RingClient, RingServer, RingShape
from shared.run_directory import Role, new_incarnation
from shared.window import WINDOW_TOKENS
from shared.work_slots import STAGING_PLACES, expert_ring, ngram_ring, staging_ring
from stager.blob_sources import BlobSources
from stager.ngram_rows import open_rows
from stager.read_queue import NO_FAULTS
from stager.staging import StagingService
from stager.worker import NgramSlots
from tests.support.expert_pool import Pooled, Reader, pooled

TIMEOUT_S = 60.0
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(slots=True)
class Answer:
    """What came back for one request so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)
    end: RequestFinished | RequestFailed | None = None


class RunningEngine:
    """An engine, its workers, and the answers it posts."""

    def __init__(
        self,
        path: Path,
        *,
        parallel: int = 4,
        prefill: int = 16,
        watchdog_s: float = TIMEOUT_S,
        torch_device: torch.device | None = None,
        places_per_layer: int = 0,
        natively: bool = False,
        staging_places: int = 0,
        settings: GpuWorkerConfig | None = None,
        recorder: TraceWriter | None = None,
        stages_from_disk: bool = False,
        conversation_cache_bytes: int = 0,
        conversation_folder: Path | None = None,
        prefill_share: float = 1.0,
        prefill_gap_s: float = 60.0,
        spec: int = 0,
        spec_min_p: float = 0.0,
        suffix_draft: bool = False,
    ) -> None:
        """On the CpuDevice, or on a TorchDevice where `torch_device` is given. Experts come from a pool with
        `places_per_layer`, if it is not 0, and are served in machine code if `natively`. Where there are
        `staging_places`, the stager brings experts there, from the pool or the mapped file, or read anew each
        time if `stages_from_disk`. Where the `settings` have experts on the device, those are placed by them,
        and there are staging places."""
        file = GGUFModel(path)
        config = read_model_config(file)
        self.device: Device = CpuDevice(file, 1) if torch_device is None else TorchDevice(file, torch_device)
        self.model = Qwen4Exp(
            self.device, config, has_own_head="output.weight" in file, report=lambda activity, progress: None
        )
        # Open lets the experts compute; a test closes it to hold up a step.
        self.gate = threading.Event()
        self.gate.set()
        # Called with every slot of experts after they were computed; may change the outputs, or raise.
        self.on_experts: Callable[[Arrays], None] = lambda slot: None
        # Called with all reads that are to be made for a slot of staging places; may change or delay them.
        self.on_staging: Callable[[Record], None] = lambda reads: None
        self.scheduler = Scheduler(
            max_running=parallel, prefill_tokens=prefill, share=PrefillShare(prefill_share, prefill_gap_s)
        )
        self.messages: queue.Queue[Message] = queue.Queue()
        max_tokens = parallel * WINDOW_TOKENS + prefill + 1
        self.layout = BlobLayout(file, config.num_layers)
        self.placement: ExpertPlacement | None = None
        if settings is not None:
            self.placement = open_placement(
                settings,
                file,
                config,
                self.device,
                ProfileStore(settings.expert_profile, file, config),
                lambda activity, progress: None,
            )
            staging_places = STAGING_PLACES if self.placement is not None else 0
        self.workers = AttachedWorkers(
            config,
            self.device.torch_device,
            ModelFiles(ExpertFiles.of(file, config.num_expert_layers), self.layout, path.name),
            max_tokens,
            watchdog_s,
            placement=self.placement,
            recorder=recorder,
        )
        files = None
        if conversation_folder is not None:
            files = ConversationFiles(conversation_folder, path.name, 1 << 30)
        self.conversations = ConversationCache(
            self.model.pages, conversation_cache_bytes, files, self.model.new_state
        )
        self.engine = Engine(
            self.model,
            self.device.torch_device,
            self.scheduler,
            self.messages.put,
            self.workers,
            self.conversations,
            Drafter(
                self.model,
                self.device.torch_device,
                most=spec,
                min_probability=spec_min_p,
                uses_suffixes=suffix_draft,
                max_tokens=max_tokens,
            ),
        )
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count()
        self._incarnation = new_incarnation()
        self._workers: dict[Role, list[_Worker]] = {}
        self._team = Team(1)
        self._pool_files = contextlib.ExitStack()
        self.pooled: Pooled | None = None
        if places_per_layer:
            self.pooled = self._pool_files.enter_context(pooled(file, places_per_layer))
        pool = self.pooled.pool if self.pooled is not None else None
        layers = [ExpertLayer(file, layer, pool) for layer in range(config.num_expert_layers)]
        service = ExpertService(layers, self._team, pool)
        native = NativeExperts(layers, self._team, pool) if natively else None

        def compute_experts(slot: Arrays) -> None:
            self.gate.wait(TIMEOUT_S)
            service(slot)
            self.on_experts(slot)

        self._work: dict[Role, tuple[RingShape, Callable[[Arrays], None], NativeWork | None]] = {
            Role.CPU_WORKER: (expert_ring(config, max_tokens), compute_experts, native)
        }
        if config.ngram is not None:
            slots = NgramSlots(open_rows(file, config.ngram))
            self._work[Role.STAGER] = (ngram_ring(config.ngram, max_tokens), slots, None)
        self._staging_places = staging_places
        self._sources = self.pooled.sources if self.pooled is not None else BlobSources(ExpertMode.MAPPED)
        if stages_from_disk:
            self._sources = BlobSources()

    def attach(self, role: Role) -> None:
        """Starts a worker and tells the engine."""
        purpose = f"{role}-{next(self._numbers)}"
        workers: list[_Worker] = []
        ring, staging = None, None
        if role in self._work:
            workers.append(_Worker(purpose, self._incarnation, *self._work[role]))
            ring = workers[-1].client
        if role is Role.STAGER and self._staging_places:
            workers.append(self._new_staging(f"{purpose}-staging"))
            staging = workers[-1].client
        self._workers[role] = workers
        self.engine.submit(AttachRing(role, ring, staging))

    def _new_staging(self, purpose: str) -> "_Worker":
        reader = Reader(4, NO_FAULTS)
        reader.before = lambda reads: self.on_staging(reads)
        service = StagingService(self.layout, self._sources, lambda: reader)
        shape = staging_ring(self._staging_places, self.layout.largest_place_bytes)
        worker = _Worker(purpose, self._incarnation, shape, service, None, starts=False)
        service.open(worker.server)
        worker.on_stop = service.close
        worker.start()
        return worker

    def attach_all(self) -> None:
        """Starts every worker the model needs."""
        roles = dict.fromkeys([*self._work, *([Role.STAGER] if self._staging_places else [])])
        for role in roles:
            self.attach(role)

    def lose(self, role: Role) -> None:
        """Ends a worker, as the link does when one died."""
        failure = WorkerFailedError(f"the {role} is lost")
        workers = self._workers.pop(role)
        for worker in workers:
            worker.client.fail(failure)
        self.engine.submit(DetachRing(role, failure))
        for worker in workers:
            worker.stop()

    def ask(self, request_id: str, prompt: list[int], max_new_tokens: int = 8, **changes: object) -> None:
        """Submits a request, greedy unless `changes` says otherwise."""
        fields: dict[str, object] = {"eos_token_ids": [], "sampling": GREEDY, **changes}
        self.engine.submit(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                max_new_tokens=max_new_tokens,
                **fields,  # type: ignore[arg-type]
            )
        )

    def answer(
        self, request_id: str, until: Callable[[Answer], object] = lambda answer: answer.end
    ) -> Answer:
        """Waits until a request has ended, or until what `until` says. Raises queue.Empty after a minute."""
        while not until(self._answers.setdefault(request_id, Answer())):
            self._take(self.messages.get(timeout=TIMEOUT_S))
        return self._answers[request_id]

    def wait_idle(self) -> None:
        """Waits until everything submitted has been carried out and nothing runs."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.engine.idle_s == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def no_more_messages(self) -> bool:
        """Whether nothing came that was not asked for; call it when idle."""
        return self.messages.empty()

    def _take(self, message: Message) -> None:
        match message:
            case TokenChunk(request_id=request_id, token_ids=token_ids, logprobs=logprobs):
                answer = self._answers.setdefault(request_id, Answer())
                answer.token_ids += token_ids
                answer.logprobs += logprobs
            case PrefillProgress(request_id=request_id, num_prefilled=num_prefilled):
                self._answers.setdefault(request_id, Answer()).prefilled.append(num_prefilled)
            case RequestFinished() | RequestFailed():
                answer = self._answers.setdefault(message.request_id, Answer())
                assert answer.end is None, "a request ends once"
                answer.end = message
            case _:
                raise AssertionError(message)

    def close(self) -> None:
        """Ends all threads."""
        self.gate.set()
        self.engine.stop()
        self.conversations.close()
        for worker in itertools.chain.from_iterable(self._workers.values()):
            worker.stop()
        if self.placement is not None:
            self.placement.close()
        self.device.close()
        self._team.close()
        self._pool_files.close()


@contextmanager
def running_engine(path: Path, **settings: Any) -> Iterator[RunningEngine]:
    """An engine with its workers attached, ended afterwards. `settings` are those of `RunningEngine`."""
    running = RunningEngine(path, **settings)
    running.engine.start()
    try:
        running.attach_all()
        yield running
    finally:
        running.close()


class _Worker:
    """The other end of a ring, served by a thread."""

    def __init__(
        self,
        purpose: str,
        incarnation: str,
        shape: RingShape,
        work: Callable[[Arrays], None],
        native: NativeWork | None,
        *,
        starts: bool = True,
    ) -> None:
        self.client = RingClient(shape, purpose, incarnation, spin_s=0)
        self.server = RingServer(shape, self.client.descriptor, spin_s=0)
        self._thread = threading.Thread(
            target=self.server.serve, args=(work, native), name=purpose, daemon=True
        )
        self.on_stop: Callable[[], None] = lambda: None
        if starts:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(TIMEOUT_S)
        self.server.close()
        self.on_stop()
