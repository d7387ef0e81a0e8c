"""The gpu_worker at work: loads the model, and connects the engine to the gateway and the other workers."""

import asyncio
import logging
from collections.abc import Sequence

from gpu_worker.device.choose import choose_torch_device, formats_of, open_device
from gpu_worker.device.interface import Device
from gpu_worker.engine import AbortAll, Engine
from gpu_worker.experts.counts import ExpertFiles
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.peers import PeerListener
from gpu_worker.scheduler import Scheduler
from shared import quants
from shared.arena import sweep_segments
from shared.config import DEFAULT_PREFILL, GpuWorkerConfig, prefill_setting
from shared.gguf.model import GGUFModel
from shared.link import LinkClient, LinkServer
from shared.locked_memory import lock_refusal, may_lock, not_permitted
from shared.memory_budget import read_memory
from shared.messages import AbortRequest, FromBinding, GenerateRequest, Heartbeat, Init, Message
from shared.model_config import read_model_config
from shared.process import ProcessContext, ProcessState, load_in_thread
from shared.run_directory import Role
from shared.tensor_catalog import NGRAM_TABLE, TensorClass, check_tensors, expected_tensors
from shared.topology import meeting_cpu

_log = logging.getLogger(__name__)

# A draining gpu_worker leaves when it has had nothing to do for so long, even if the gateway stays.
_STILL_S = 1.0
_DRAIN_LOOK_INTERVAL_S = 0.05
# These are computed or read by other processes.
_NOT_OURS = (TensorClass.EXPERTS_GATE_UP, TensorClass.EXPERTS_DOWN, TensorClass.NGRAM_TABLE)


class GpuWorker:
    """The process. It is also what listens on its link to the gateway."""

    def __init__(self, context: ProcessContext[GpuWorkerConfig]) -> None:
        self._context = context
        self._config = read_model_config(context.model)
        check_tensors(context.model, self._config)
        self._torch_device = choose_torch_device(context.config.device)
        self._loop = asyncio.get_running_loop()
        self._loaded = asyncio.Event()
        self._gateway = LinkClient(context.identity, context.directory, Role.GATEWAY, self, context.config)
        self._device: Device | None = None
        self._kernels = ""
        self._engine: Engine | None = None
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
        await self._loaded.wait()
        capabilities: dict[str, int | float | str] = {
            "max_context": self.max_context,
            "parallel": self._context.config.parallel,
            "device": str(self._torch_device),
        }
        if self._torch_device.type == "cpu":
            capabilities["kernels"] = self._kernels
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
        """The longest sequence: what was asked for, but not more than the model was trained for."""
        trained = self._config.context_length
        return min(self._context.config.max_context or trained, trained)

    async def _start_engine(self) -> tuple[Engine, PeerListener]:
        config = self._context.config
        model = await load_in_thread(self._load)
        prefill_tokens = prefill_setting(config.prefill).tokens or DEFAULT_PREFILL
        scheduler = Scheduler(max_running=config.parallel, prefill_tokens=prefill_tokens)
        engine = Engine(
            model,
            self._torch_device,
            scheduler,
            self._post,
            config.watchdog_s,
            ExpertFiles.of(self._context.model, self._config.num_layers),
            ngram_file=_home_of_table(self._context.model),
            cpu=meeting_cpu() if self._torch_device.type == "cpu" else None,
        )
        # The largest step has a chunk of a prompt and one token of every other sequence.
        peers = PeerListener(
            self._config,
            prefill_tokens + config.parallel,
            self._context.identity.incarnation,
            engine,
            self._tell_state,
        )
        self._engine, self._peers = engine, peers
        self._context.measure = engine.gauges
        engine.start()
        self._loaded.set()
        self._tell_state()
        return engine, peers

    def _load(self) -> Qwen4Exp:
        """Runs in a thread, and may take long."""
        context = self._context
        self._kernels = quants.choose_kernels(context.config.cpu_kernels, context.config.cpu_activations)
        tensors = [
            expected
            for expected in expected_tensors(self._config, context.model)
            if expected.tensor_class not in _NOT_OURS and expected.name in context.model
        ]
        multiplied, decoded, gathered = formats_of(self._torch_device, context.model, tensors)
        quants.warm(
            multiplied,
            decoded,
            gathered,
            lambda done, total, name: context.report(f"compiling {name}", 0.5 * done / total),
        )
        if self._torch_device.type == "cpu":
            self._keep_dense_weights([expected.name for expected in tensors])
        self._device = open_device(self._torch_device, context.model, context.config.threads)
        return Qwen4Exp(
            self._device,
            self._config,
            has_own_head="output.weight" in context.model,
            report=lambda activity, progress: context.report(activity, 0.5 + 0.5 * progress),
        )

    def _keep_dense_weights(self, names: Sequence[str]) -> None:
        """Locks what every token needs in RAM, where that is allowed, so that nothing that is read beside it
        makes the page cache give it up. The embedding is read by rows, unless it is the output matrix too."""
        model = self._context.model
        kept = [name for name in names if name != "token_embd.weight" or "output.weight" not in model]
        num_bytes, memory = sum(model.info(name).num_bytes for name in kept), read_memory()
        if num_bytes > memory.available - memory.floor:
            _log.warning(
                "dense weights are %.2f GiB, which do not fit into the memory that is available, %.2f GiB; "
                "they are left to the page cache",
                num_bytes / 2**30,
                memory.available / 2**30,
            )
            return
        done = 0
        try:
            if not may_lock(num_bytes):
                raise not_permitted()
            for name in kept:
                info, home = model.info(name), model.home(name)
                self._context.report("reading dense weights", 0.5 + 0.2 * done / num_bytes)
                home.will_need(*home.pages(info))
                home.lock(*home.pages(info))
                done += info.num_bytes
        except OSError as error:
            _log.info("dense weights are left to the page cache: %s", lock_refusal(num_bytes, error))
        else:
            _log.info("%.2f GiB of dense weights are locked in RAM", num_bytes / 2**30)

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
        if self._device is not None:
            self._device.close()


def _home_of_table(model: GGUFModel) -> str:
    return model.home(NGRAM_TABLE).path.name if NGRAM_TABLE in model else ""


async def _ended(engine: Engine) -> None:
    """Returns when the engine has ended; raises what ended it before it was asked to."""
    await asyncio.wrap_future(engine.ended)
