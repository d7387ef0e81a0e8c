"""Starts the four processes of a stack, restarts what dies, and ends them in order.

Restarts are cheap to reason about because no process needs another's restart: links find the new incarnation
by themselves. The supervisor watches exits, and asks the gateway once a second how everybody is; a process
that lives but says nothing is killed, and then restarted like any other.

Ending follows the data: gateway first, so that running requests can finish; then the gpu_worker; then the
others. A process that exits with code 2 found something that a restart does not mend: the stack ends.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shared.arena import sweep_segments
from shared.config import PROCESS_CONFIGS, CommonConfig
from shared.errors import StartError
from shared.process import SUPERVISED_VARIABLE
from shared.run_directory import Role, RoleLock, RunDirectory, new_incarnation, sweep_deserted
from shared.settings import CONFIG_FILE_VARIABLE, settings_of, to_environment

_log = logging.getLogger(__name__)

_ORDER_OF_END = ((Role.GATEWAY,), (Role.GPU_WORKER,), (Role.CPU_WORKER, Role.STAGER))
_HEALTH_INTERVAL_S = 1.0
_HEALTH_TIMEOUT_S = 3.0
_START_LOOK_INTERVAL_S = 0.1
# More restarts of one process than this within the window mean that it will not stay up.
_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 60.0
_FIRST_BACKOFF_S = 0.1
# What a process gets, beyond the drain time, to notice the signal and clean up.
_END_MARGIN_S = 5.0
# A process that no one has heard of for so long, though it runs, is stuck; it has had time to say Hello.
_STUCK_AFTER_S = 5.0
_DUMP_TIME_S = 0.3

Report = Callable[[str, float], None]


class StackFailed(StartError):
    """A process cannot start or will not stay up; its own message has been printed."""


@dataclass(slots=True)
class _Child:
    role: Role
    process: asyncio.subprocess.Process
    watch: "asyncio.Task[None]"
    restarts: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_RESTARTS))
    unheard_since: float | None = None


class Supervisor:
    """One stack. Use as an async context manager: entering starts it, leaving ends it completely."""

    def __init__(self, configs: Mapping[Role, CommonConfig], report: Report) -> None:
        """`configs` has the settings of each process; `report` is told how far start-up is."""
        self._configs = configs
        self._report = report
        common = configs[Role.GATEWAY]
        self._drain_timeout_s = common.drain_timeout_s
        self._heartbeat_timeout_s = common.heartbeat_timeout_s
        sweep_deserted()
        sweep_segments()
        self.directory = RunDirectory(common.run_dir) if common.run_dir is not None else RunDirectory.fresh()
        self._lock = RoleLock(self.directory, Role.SUPERVISOR, new_incarnation())
        self._children: dict[Role, _Child] = {}
        self._is_ending = False
        self._is_hurried = False
        self._failure: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "Supervisor":
        self._failure = asyncio.get_running_loop().create_future()
        for role in self._configs:
            self._children[role] = await self._start(role)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._end()
        finally:
            sweep_segments()
            self._lock.release()
            self.directory.remove_if_deserted()

    @property
    def url(self) -> str | None:
        """Where the gateway listens, once it does."""
        try:
            return (self.directory.path / "gateway.url").read_text(encoding="ascii")
        except OSError:
            return None

    async def wait_ready(self) -> dict[str, Any]:
        """Waits until requests are served, reporting progress; returns what /health says then.

        Raises StackFailed where a process cannot start.
        """
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_HEALTH_TIMEOUT_S)) as session:
            while True:
                self._raise_failure()
                health = await self._health(session)
                if health is not None:
                    if health["loaded"]:
                        return health
                    self._report(health["progress"]["activity"], health["progress"]["fraction"])
                await asyncio.sleep(_START_LOOK_INTERVAL_S)

    async def watch(self) -> None:
        """Keeps the stack up until cancelled. Raises StackFailed where it does not stay up."""
        unanswered_since: float | None = None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_HEALTH_TIMEOUT_S)) as session:
            while True:
                await asyncio.sleep(_HEALTH_INTERVAL_S)
                self._raise_failure()
                health = await self._health(session)
                now = time.monotonic()
                if health is not None:
                    unanswered_since = None
                    await self._kill_silent(health, now)
                elif unanswered_since is None:
                    unanswered_since = now
                elif now - unanswered_since > self._heartbeat_timeout_s:
                    unanswered_since = None
                    await self._kill_stuck(Role.GATEWAY, f"no answer for {self._heartbeat_timeout_s:g} s")

    def hurry(self) -> None:
        """Ends the stack without waiting for running requests."""
        self._is_hurried = True
        for child in self._children.values():
            _signal(child, signal.SIGKILL)

    async def _start(self, role: Role) -> _Child:
        environment = child_environment(os.environ, self._configs[role])
        environment["STRATA_RUN_DIR"] = str(self.directory.path)
        environment[SUPERVISED_VARIABLE] = "1"
        # -P: a directory named like one of our packages, where the user happens to be, is not it.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", role, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
        watch = asyncio.create_task(self._watch_child(role, process), name=f"watch of {role}")
        return _Child(role, process, watch)

    async def _watch_child(self, role: Role, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._is_ending:
            return
        if code == StartError.exit_code:
            self._fail(f"the {role} cannot start; its message is above")
            return
        child = self._children[role]
        now = time.monotonic()
        recent = [at for at in child.restarts if now - at < _RESTART_WINDOW_S]
        if len(recent) == _MAX_RESTARTS:
            self._fail(f"the {role} ended {_MAX_RESTARTS + 1} times within {_RESTART_WINDOW_S:g} s")
            return
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        print(f"the {role} ended {how}; restarting it", file=sys.stderr, flush=True)
        sweep_segments()
        if recent:
            await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** len(recent))
        successor = await self._start(role)
        successor.restarts = child.restarts
        successor.restarts.append(now)
        self._children[role] = successor

    def _fail(self, reason: str) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(StackFailed(reason))

    def _raise_failure(self) -> None:
        if self._failure is not None and self._failure.done():
            self._failure.result()

    async def _health(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        url = self.url
        if url is None:
            return None
        try:
            async with session.get(f"{url}/health") as response:
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _kill_silent(self, health: dict[str, Any], now: float) -> None:
        """Kills a worker that runs, but that the gateway has not heard of for too long."""
        for role, child in self._children.items():
            if role is Role.GATEWAY or health["processes"][role]["state"] != "absent":
                child.unheard_since = None
            elif child.unheard_since is None:
                child.unheard_since = now
            elif now - child.unheard_since > _STUCK_AFTER_S:
                child.unheard_since = None
                await self._kill_stuck(role, "it says nothing")

    async def _kill_stuck(self, role: Role, reason: str) -> None:
        print(f"the {role} is stuck ({reason}); it will be killed", file=sys.stderr, flush=True)
        child = self._children[role]
        # Where it is stuck goes to its standard error, if it can still say so.
        _signal(child, signal.SIGUSR1)
        await asyncio.sleep(_DUMP_TIME_S)
        _signal(child, signal.SIGKILL)

    async def _end(self) -> None:
        self._is_ending = True
        for roles in _ORDER_OF_END:
            ending = [self._children[role] for role in roles if role in self._children]
            for child in ending:
                _signal(child, signal.SIGKILL if self._is_hurried else signal.SIGTERM)
            await asyncio.gather(*(self._end_of(child) for child in ending))

    async def _end_of(self, child: _Child) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s + _END_MARGIN_S):
                await child.process.wait()
        except TimeoutError:
            _log.warning("the %s did not end in time and is killed", child.role)
            _signal(child, signal.SIGKILL)
            await child.process.wait()
        child.watch.cancel()


def child_environment(environment: Mapping[str, str], config: CommonConfig) -> dict[str, str]:
    """The environment of a child process: the settings as resolved, nothing left to resolve again."""
    resolved = {item.variable for item in settings_of(*PROCESS_CONFIGS.values()).values()}
    kept = {
        name: value
        for name, value in environment.items()
        if name not in resolved and name != CONFIG_FILE_VARIABLE
    }
    return kept | to_environment(config)


def _signal(child: _Child, number: signal.Signals) -> None:
    if child.process.returncode is None:
        try:
            child.process.send_signal(number)
        except ProcessLookupError:
            return
