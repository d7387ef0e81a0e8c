"""The gpu_worker at work: loads the model, and connects the engine to the gateway and the other workers."""

import asyncio
import logging
from functools import partial

from gpu_worker.conversation_files import ConversationFiles
from gpu_worker.conversations import ConversationCache
from gpu_worker.device.choose import choose_torch_device
from gpu_worker.engine import AbortAll, Engine
from gpu_worker.experts.counts import ExpertFiles
from gpu_worker.loading import Loaded, load
from gpu_worker.peers import PeerListener
from gpu_worker.prefill_share import PrefillShare
from gpu_worker.scheduler import Scheduler
from gpu_worker.speculation.drafter import Drafter
from gpu_worker.ways import AttachedWorkers, ModelFiles
from shared.arena import sweep_segments
from shared.config import GpuWorkerConfig
from shared.expert_blobs import BlobLayout
from shared.link import LinkClient, LinkServer
from shared.memory_budget import conversation_cache_bytes, read_memory
from shared.messages import AbortRequest, FromBinding, GenerateRequest, Heartbeat, Init, Message
from shared.model_config import read_model_config
from shared.placement.profile import model_identity
from shared.process import ProcessContext, ProcessState, load_in_thread
from shared.rope_scaling import ScalingType
from shared.run_directory import Role
from shared.tensor_catalog import NGRAM_TABLE, check_tensors
from shared.topology import meeting_cpu
from shared.window import window_tokens
from shared.work_slots import STAGING_PLACES, ring_tokens

_log = logging.getLogger(__name__)

# A draining gpu_worker leaves when it has had nothing to do for so long, even if the gateway stays.
_STILL_S = 1.0
_DRAIN_LOOK_INTERVAL_S = 0.05
_PROFILE_INTERVAL_S = 600.0


class GpuWorker:
    """The process. It is also what listens on its link to the gateway."""

    def __init__(self, context: ProcessContext[GpuWorkerConfig]) -> None:
        self._context = context
        config = context.config
        self._config = read_model_config(context.model, config, with_prediction=config.uses_prediction)
        check_tensors(context.model, self._config)
        if shortfall := self._config.rope_scaling.shortfall(context.config.max_context):
            _log.warning("%s", shortfall)
        self._torch_device = choose_torch_device(context.config.device)
        self._loop = asyncio.get_running_loop()
        self._is_loaded = asyncio.Event()
        self._gateway = LinkClient(context.identity, context.directory, Role.GATEWAY, self, context.config)
        self._loaded: Loaded | None = None
        self._engine: Engine | None = None
        self._conversations: ConversationCache | None = None
        self._peers: PeerListener | None = None

    async def run(self) -> None:
        """Runs until drained."""
        sweep_segments()
        context = self._context
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._gateway.run(), name="gateway link")]
            try:
                engine, peers = await self._start_engine()
                roles = (Role.CPU_WORKER, Role.STAGER)
                server = LinkServer(context.identity, context.directory, roles, peers, context.config)
                tasks.append(group.create_task(server.run(), name="worker link"))
                tasks.append(group.create_task(_ended(engine), name="engine"))
                tasks.append(group.create_task(self._keep_profile(), name="expert profile"))
                await context.drain.wait()
                self._tell_state()
                # The state of another process, and of a thread, have no event to wait for.
                while context.directory.look_at(Role.GATEWAY).is_alive and engine.idle_s < _STILL_S:  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_LOOK_INTERVAL_S)
            finally:
                try:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                finally:
                    self._close()

    # The link to the gateway.

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        """The gateway is there: tell it what this worker can do, once it is loaded."""
        await self._is_loaded.wait()
        capabilities: dict[str, int | float | str] = {
            "max_context": self.max_context,
            "parallel": self._context.config.parallel,
            "device": str(self._torch_device),
            "kv_type": self._context.config.kv_type,
            "spec": self._context.config.spec,
            "prediction_block": int(self._config.num_prediction_layers),
        }
        if self._config.rope_scaling.type is not ScalingType.NONE:
            capabilities["rope_scaling"] = self._config.rope_scaling.description
        if self._torch_device.type == "cpu" and self._loaded is not None:
            capabilities["kernels"] = self._loaded.kernels
        return capabilities

    async def detach(self, reason: str) -> None:
        """The gateway is gone, and everyone who waited for answers with it."""
        if self._engine is not None:
            self._engine.submit(AbortAll())

    def heartbeat(self) -> Heartbeat:
        """How the process is doing."""
        return self._context.heartbeat()

    def message(self, message: FromBinding) -> None:
        """Requests go to the engine."""
        match message:
            case GenerateRequest() | AbortRequest() if self._engine is not None:
                self._engine.submit(message)
            case _:
                _log.error("the gateway sent a %s, which is not expected now", type(message).__name__)

    @property
    def max_context(self) -> int:
        """The longest sequence: what was asked for, but not more than the model is good for."""
        return self._config.longest_sequence(self._context.config.max_context)

    async def _start_engine(self) -> tuple[Engine, PeerListener]:
        config = self._context.config
        loaded = await load_in_thread(partial(load, self._context, self._config, self._torch_device))
        self._loaded = loaded
        scheduler = Scheduler(
            max_running=config.parallel,
            prefill_tokens=loaded.prefill_tokens,
            share=PrefillShare(config.prefill_share, 1e-3 * config.prefill_gap_ms),
        )
        layout = BlobLayout(self._context.model, self._config.num_layers)
        # The largest step has a chunk of a prompt and one token of every other sequence.
        tokens = ring_tokens(
            loaded.prefill_tokens,
            config.parallel,
            window_tokens=window_tokens(config.spec),
            has_slots=loaded.placement is not None,
            stream_min=config.prefill_stream_min,
        )
        workers = await load_in_thread(partial(self._workers, loaded, layout, tokens.ngrams))
        conversations = ConversationCache(
            loaded.model.pages,
            conversation_cache_bytes(read_memory(), config.conversation_cache_mib),
            await load_in_thread(partial(self._conversation_files, loaded)),
            loaded.model.new_state,
        )
        self._conversations = conversations
        engine = Engine(
            loaded.model,
            self._torch_device,
            scheduler,
            self._post,
            workers,
            conversations,
            Drafter(
                loaded.model,
                self._torch_device,
                most=config.spec,
                min_probability=config.spec_min_p,
                uses_suffixes=config.suffix_draft,
                max_tokens=tokens.experts,
            ),
            cpu=meeting_cpu() if self._torch_device.type == "cpu" else None,
        )
        peers = PeerListener(
            self._config,
            tokens,
            self._context.identity.incarnation,
            engine,
            self._tell_state,
            staging_places=STAGING_PLACES if loaded.placement is not None else 0,
            staging_place_bytes=layout.largest_place_bytes,
        )
        self._engine, self._peers = engine, peers
        self._context.measure = engine.gauges
        engine.start()
        self._is_loaded.set()
        self._tell_state()
        return engine, peers

    def _conversation_files(self, loaded: Loaded) -> ConversationFiles | None:
        """Where conversations go that leave memory, if anywhere. Raises ConfigError."""
        config = self._context.config
        if config.conversation_cache_dir is None:
            return None
        # All that changes what is kept, beside the tokens.
        identity = repr(
            (model_identity(self._context.model, self._config), self._config, loaded.kernels, config.kv_type)
        )
        return ConversationFiles(config.conversation_cache_dir, identity, config.conversation_disk_mib << 20)

    def _workers(self, loaded: Loaded, layout: BlobLayout, max_tokens: int) -> AttachedWorkers:
        model = self._context.model
        home_of_table = model.home(NGRAM_TABLE).path.name if NGRAM_TABLE in model else ""
        return AttachedWorkers(
            self._config,
            self._torch_device,
            ModelFiles(ExpertFiles.of(model, self._config.num_expert_layers), layout, home_of_table),
            max_tokens,
            self._context.config.watchdog_s,
            placement=loaded.placement,
            recorder=loaded.recorder,
        )

    async def _keep_profile(self) -> None:
        """Saves what was learned of experts now and then, since a process may be killed."""
        loaded = self._loaded
        while loaded is not None:
            await asyncio.sleep(_PROFILE_INTERVAL_S)
            await asyncio.to_thread(loaded.save_profile)

    def _tell_state(self) -> None:
        """Says at once how the process is doing, when that changes."""
        context = self._context
        missing = self._peers.missing if self._peers is not None else []
        if context.drain.is_set():
            context.state = ProcessState.DRAINING
        elif missing:
            context.state = ProcessState.WAITING
            context.report(f"waiting for {' and '.join(missing)}", 1.0)
        else:
            context.state = ProcessState.READY
            context.report("serving", 1.0)
        self._gateway.beat()

    def _post(self, message: Message) -> None:
        """Called by the engine's thread."""
        self._loop.call_soon_threadsafe(self._gateway.post, message)

    def _close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._engine is not None:
            self._engine.stop()
        if self._conversations is not None:
            self._conversations.close()
        if self._loaded is not None:
            self._loaded.close()


async def _ended(engine: Engine) -> None:
    """Returns when the engine has ended; raises what ended it before it was asked to."""
    await asyncio.wrap_future(engine.ended)
