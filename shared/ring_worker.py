"""The life of a process that serves rings of the gpu_worker: the cpu_worker and the stager are both that.

Its link to the gateway stands from the start, so that loading shows; its link to the gpu_worker comes once it
has loaded. Whenever a gpu_worker appears it sends a fresh ring, or two to a stager, each of which a thread
then serves; when it goes, the threads end and the rings are let go.

The stager serves a ring of the cpu_worker too, in the same way and a thread of its own. That link comes
first: the gpu_worker sees a stager only while that has a cpu_worker, so that no step begins whose experts
nobody reads. The cpu_worker is the binding side there, and waits for nobody.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from shared.arena import SegmentDescriptor
from shared.link import LinkClient, LinkServer, ServerListener
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
    """What a loaded process does with a ring."""

    shape: Callable[[Init], RingShape]
    """The ring's shape, by what its maker says of it."""
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
    prepare: Callable[[Init], None] | None = None
    """What has to be done before the process is ready for who sent Init; may take long, and runs in a
    thread."""
    release: Callable[[], None] | None = None
    """Undoes that when who sent it is lost; in a thread too."""
    opened: Callable[[RingServer, Init], None] | None = None
    """Is told of each ring before its first slot."""
    closed: Callable[[], None] | None = None
    """Is told that it is let go, after its last slot."""
    segment: Callable[[Init], SegmentDescriptor | None] = lambda init: init.segment
    """Which segment of Init the ring lies in; None for none, and there is nothing to serve then."""
    listener: ServerListener | None = None
    """Where this process is a binding side itself: what it does about the stager that connects to it."""


Post = Callable[[Message], None]
"""Sends the gateway a message; called from any thread."""
Load = Callable[[Post], Sequence[RingWork]]
"""Gets ready to serve the rings that a process of one role may send; none where there is nothing to do."""


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


class _Attachments:
    """Whom the process is attached to, of those it needs, and how it says so."""

    def __init__(
        self, context: ProcessContext[AnyConfig], servers: Sequence[Role], beat: Callable[[], None]
    ) -> None:
        """`beat` sends a sign of life to the gateway."""
        self._context = context
        self._missing = set(servers)
        self._beat = beat

    def attached(self, server: Role) -> None:
        """The process serves what that one has sent."""
        self._missing.discard(server)
        self.tell()

    def lost(self, server: Role) -> None:
        """It serves it no longer, or never did."""
        self._missing.add(server)
        self.tell()

    def tell(self) -> None:
        """Says how the process is doing."""
        if not self._context.drain.is_set():
            self._context.state = ProcessState.WAITING if self._missing else ProcessState.READY
        waits_for = " and ".join(sorted(self._missing))
        self._context.report(f"waiting for the {waits_for}" if waits_for else "serving", 1.0)
        self._beat()


@dataclass(slots=True)
class _Served:
    """A ring, the work that is done with it, and the thread that does it."""

    work: RingWork
    server: RingServer
    thread: threading.Thread


class RingListener:
    """Attaches to the rings of each process of a role in turn and serves each of them in a thread. `works` is
    empty where the model has nothing for this process to do; it is then ready all the same."""

    def __init__(
        self,
        context: ProcessContext[AnyConfig],
        server_role: Role,
        works: Sequence[RingWork],
        attachments: _Attachments,
    ) -> None:
        self._context = context
        self._server_role = server_role
        self._works = works
        self._attachments = attachments
        self._served: list[_Served] = []
        self._detaching: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        # Set while attached, and while not: tasks wait for both.
        self.is_attached = asyncio.Event()
        self.is_detached = asyncio.Event()
        # Never done, but for the failure of a ring's thread outside of its work.
        self.broken: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_in_use(self) -> bool:
        """Whether the other side computes something that needs this process."""
        return any(served.server.is_in_use for served in self._served)

    async def attach(self, init: Init) -> dict[str, int | float | str]:
        if self._detaching is not None:
            await self._detaching
        for work in self._works:
            if work.prepare is not None:
                await load_in_thread(partial(work.prepare, init))
        for work in self._works:
            segment = work.segment(init)
            if segment is not None:
                self._serve(work, RingServer(work.shape(init), segment, spin_s=spin_time_s()), init)
        self._attachments.attached(self._server_role)
        self.is_detached.clear()
        self.is_attached.set()
        return {name: value for work in self._works for name, value in work.capabilities.items()}

    async def detach(self, reason: str) -> None:
        # The link may be cancelled meanwhile; what has been begun here is finished all the same, before the
        # next one attaches.
        self._detaching = asyncio.ensure_future(self._detach())
        await asyncio.shield(self._detaching)

    async def _detach(self) -> None:
        self.is_attached.clear()
        self.is_detached.set()
        for served in self._served:
            served.server.stop()
        for served in self._served:
            await asyncio.to_thread(served.thread.join)
            served.server.close()
            if served.work.closed is not None:
                served.work.closed()
        self._served.clear()
        for work in self._works:
            if work.release is not None:
                await load_in_thread(work.release)
        self._attachments.lost(self._server_role)

    def heartbeat(self) -> Heartbeat:
        return self._context.heartbeat()

    def message(self, message: FromBinding) -> None:
        what = type(message).__name__
        _log.error("the %s sent a %s, which is not for this process", self._server_role, what)

    def _serve(self, work: RingWork, server: RingServer, init: Init) -> None:
        """Begins to serve a ring."""
        if work.opened is not None:
            work.opened(server, init)
        name = f"{self._server_role} ring {len(self._served) + 1}"
        thread = threading.Thread(target=self._run, args=(work, server), name=name, daemon=True)
        self._served.append(_Served(work, server, thread))
        thread.start()

    def _run(self, work: RingWork, server: RingServer) -> None:
        """A ring's thread. Without it the process would look well and do nothing."""
        try:
            if work.cpu is not None:
                os.sched_setaffinity(0, {work.cpu})
            server.serve(work.serve, work.native)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._break, error)

    def _break(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


async def run_ring_worker(
    context: ProcessContext[AnyConfig],
    load: Load,
    on_gateway_message: Callable[[FromBinding], None] | None = None,
    load_first: Load | None = None,
) -> None:
    """Runs the process until it has drained. `load` runs in a thread and may take long. `load_first` does
    likewise for the rings of the cpu_worker, to which the process attaches before it attaches to the
    gpu_worker."""
    gateway_listener = GatewayListener(context, on_gateway_message)
    links = _Links(context)
    gateway_link = links.to(Role.GATEWAY, gateway_listener)
    loop = asyncio.get_running_loop()

    def post(message: Message) -> None:
        loop.call_soon_threadsafe(gateway_link.post, message)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gateway_link.run(), name="gateway link")]
        works = await load_in_thread(partial(_load_all, load, post))
        first_works: Sequence[RingWork] = ()
        try:
            if load_first is not None:
                first_works = await load_in_thread(partial(_load_all, load_first, post))
            gateway_listener.loaded(dict(chain.from_iterable(work.capabilities.items() for work in works)))
            roles = [Role.GPU_WORKER] if load_first is None else [Role.CPU_WORKER, Role.GPU_WORKER]
            attachments = _Attachments(context, roles, gateway_link.beat)
            attachments.tell()
            ring_listener = RingListener(context, Role.GPU_WORKER, works, attachments)
            ring_link = links.to(Role.GPU_WORKER, ring_listener)
            listeners = [ring_listener]
            if load_first is None:
                running = ring_link.run()
            else:
                first_listener = RingListener(context, Role.CPU_WORKER, first_works, attachments)
                listeners.append(first_listener)
                first_link = links.to(Role.CPU_WORKER, first_listener)
                tasks.append(group.create_task(first_link.run(), name="cpu_worker link"))
                running = _run_while_attached(first_listener, ring_link)
            tasks.append(group.create_task(running, name="gpu_worker link"))
            for listener in filter(None, (work.listener for work in works)):
                server = LinkServer(
                    context.identity, context.directory, [Role.STAGER], listener, context.config
                )
                tasks.append(group.create_task(server.run(), name="stager link"))
            tasks += [
                group.create_task(_raised_by(attached.broken), name="ring thread") for attached in listeners
            ]
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
                for loaded in (*works, *first_works):
                    loaded.close()


async def _run_while_attached(first: RingListener, link: LinkClient) -> None:
    """Keeps a link up for as long as the first ring is served, again and again."""
    while True:
        await first.is_attached.wait()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(link.run())
            await first.is_detached.wait()
            running.cancel()


def _load_all(load: Load, post: Post) -> Sequence[RingWork]:
    works = load(post)
    if any(work.native is not None for work in works):
        # Compiled while there is progress to look at, not when the first ring comes.
        serve_kernel()
    return works


async def _raised_by(broken: asyncio.Future[None]) -> None:
    await broken


class _Links:
    def __init__(self, context: ProcessContext[AnyConfig]) -> None:
        self._context = context

    def to(self, server: Role, listener: GatewayListener | RingListener) -> LinkClient:
        context = self._context
        return LinkClient(context.identity, context.directory, server, listener, context.config)
