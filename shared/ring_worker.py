"""The life of a process that serves one ring of the gpu_worker: the cpu_worker and the stager are both that.

Its link to the gateway stands from the start, so that loading shows; its link to the gpu_worker comes once it
has loaded. Whenever a gpu_worker appears it sends a fresh ring, which a thread then serves; when it goes, the
thread ends and the ring is let go.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from shared.link import LinkClient
from shared.messages import FromBinding, Heartbeat, Init, Message
from shared.native.ring import serve_kernel
from shared.process import AnyConfig, ProcessContext, ProcessState, load_in_thread
from shared.ring import Arrays, NativeWork, RingServer, RingShape
from shared.run_directory import Role
from shared.topology import spin_time_s

_log = logging.getLogger(__name__)

_DRAIN_LOOK_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class RingWork:
    """What a loaded process does with its ring."""

    shape: Callable[[int], RingShape]
    """The ring's shape for steps of so many tokens."""
    serve: Callable[[Arrays], None]
    """Does the work of one slot; runs in the ring's thread."""
    close: Callable[[], None]
    """Ends what loading started."""
    native: NativeWork | None = None
    """The same as machine code, where there is any; see `RingServer.serve`."""
    cpu: int | None = None
    """What the ring's thread is pinned to; None for wherever the process may run."""
    capabilities: Mapping[str, int | float | str] = field(default_factory=dict)
    """What the gateway is told of the process, once it has loaded."""


class GatewayListener:
    """Tells the gateway how the process is doing, and hands the gateway's messages to `on_message`."""

    def __init__(
        self, context: ProcessContext[AnyConfig], on_message: Callable[[FromBinding], None] | None = None
    ) -> None:
        self._context = context
        self._on_message = on_message
        self._loaded = asyncio.Event()
        self._capabilities: Mapping[str, int | float | str] = {}

    def loaded(self, capabilities: Mapping[str, int | float | str]) -> None:
        """The process can serve now."""
        self._capabilities = capabilities
        self._loaded.set()

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        await self._loaded.wait()
        return dict(self._capabilities)

    async def detach(self, reason: str) -> None:
        pass

    def heartbeat(self) -> Heartbeat:
        return self._context.heartbeat()

    def message(self, message: FromBinding) -> None:
        if self._on_message is None:
            _log.error("the gateway sent a %s, which is not for this process", type(message).__name__)
        else:
            self._on_message(message)


class RingListener:
    """Attaches to each gpu_worker's ring in turn and serves it in a thread. `work` is None where the model
    has nothing for this process to do; it is then ready all the same."""

    def __init__(self, context: ProcessContext[AnyConfig], work: RingWork | None) -> None:
        self._context = context
        self._work = work
        self._server: RingServer | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        # Never done, but for the failure of a ring's thread outside of its work.
        self.broken: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_in_use(self) -> bool:
        """Whether the gpu_worker computes something that needs this process."""
        return self._server is not None and self._server.is_in_use

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        if self._work is not None and init.segment is not None:
            shape = self._work.shape(init.ring_tokens)
            self._server = RingServer(shape, init.segment, spin_s=spin_time_s())
            serve = partial(self._server.serve, self._work.serve, self._work.native)
            self._thread = threading.Thread(target=self._run, args=(serve,), name="ring", daemon=True)
            self._thread.start()
        self._tell(ProcessState.READY, "serving")
        return {}

    async def detach(self, reason: str) -> None:
        if self._server is not None and self._thread is not None:
            self._server.stop()
            await asyncio.to_thread(self._thread.join)
            self._server.close()
            self._server = self._thread = None
        self._tell(ProcessState.WAITING, "waiting for the gpu_worker")

    def heartbeat(self) -> Heartbeat:
        return self._context.heartbeat()

    def message(self, message: FromBinding) -> None:
        _log.error("the gpu_worker sent a %s, which is not for this process", type(message).__name__)

    def _tell(self, state: ProcessState, activity: str) -> None:
        if not self._context.drain.is_set():
            self._context.state = state
        self._context.report(activity, 1.0)

    def _run(self, serve: Callable[[], None]) -> None:
        """The ring's thread. Without it the process would look well and do nothing."""
        try:
            if self._work is not None and self._work.cpu is not None:
                os.sched_setaffinity(0, {self._work.cpu})
            serve()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._break, error)

    def _break(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


async def run_ring_worker(
    context: ProcessContext[AnyConfig],
    load: Callable[[Callable[[Message], None]], RingWork | None],
    on_gateway_message: Callable[[FromBinding], None] | None = None,
) -> None:
    """Runs the process until it has drained. `load` runs in a thread and may take long; what it is given
    sends the gateway a message, from any thread."""
    gateway_listener = GatewayListener(context, on_gateway_message)
    links = _Links(context)
    gateway_link = links.to(Role.GATEWAY, gateway_listener)
    loop = asyncio.get_running_loop()

    def post(message: Message) -> None:
        loop.call_soon_threadsafe(gateway_link.post, message)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gateway_link.run(), name="gateway link")]
        work = await load_in_thread(partial(_load_all, load, post))
        try:
            gateway_listener.loaded(work.capabilities if work is not None else {})
            context.state = ProcessState.WAITING
            context.report("waiting for the gpu_worker", 1.0)
            ring_listener = RingListener(context, work)
            ring_link = links.to(Role.GPU_WORKER, ring_listener)
            tasks.append(group.create_task(ring_link.run(), name="gpu_worker link"))
            tasks.append(group.create_task(_raised_by(ring_listener.broken), name="ring thread"))
            await context.drain.wait()
            context.state = ProcessState.DRAINING
            # The state of another process has no event to wait for.
            while context.directory.look_at(Role.GPU_WORKER).is_alive and ring_listener.is_in_use:  # noqa: ASYNC110
                await asyncio.sleep(_DRAIN_LOOK_INTERVAL_S)
        finally:
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                if work is not None:
                    work.close()


def _load_all(
    load: Callable[[Callable[[Message], None]], RingWork | None], post: Callable[[Message], None]
) -> RingWork | None:
    work = load(post)
    if work is not None and work.native is not None:
        # Compiled while there is progress to look at, not when the first ring comes.
        serve_kernel()
    return work


async def _raised_by(broken: asyncio.Future[None]) -> None:
    await broken


class _Links:
    def __init__(self, context: ProcessContext[AnyConfig]) -> None:
        self._context = context

    def to(self, server: Role, listener: GatewayListener | RingListener) -> LinkClient:
        context = self._context
        return LinkClient(context.identity, context.directory, server, listener, context.config)
