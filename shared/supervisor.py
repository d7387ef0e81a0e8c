"""Starts the four processes of a stack, restarts what dies, and ends them in order.

Restarts are cheap to reason about because no process needs another's restart: links find the new incarnation
by themselves. The supervisor watches exits, and asks the gateway once a second how everybody is; a process
that lives but says nothing is killed, and then restarted like any other. A restarted gateway listens where it
did before, also where the port was picked by the system: clients know no other.

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
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from shared.arena import sweep_segments
from shared.config import PROCESS_CONFIGS, CommonConfig, GatewayConfig
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
# What a worker that the gateway has given up for dead, though it runs, gets to say Hello again.
_STUCK_AFTER_S = 3.0
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
    was_heard: bool = False
    silent_since: float | None = None


class Supervisor:
    """One stack. Use as an async context manager: entering starts it, leaving ends it completely."""

    def __init__(self, configs: Mapping[Role, CommonConfig], report: Report) -> None:
        """`configs` has the settings of each process; `report` is told how far start-up is."""
        self._configs = dict(configs)
        self._report = report
        common = configs[Role.GATEWAY]
        self._drain_timeout_s = common.drain_timeout_s
        self._heartbeat_timeout_s = common.heartbeat_timeout_s
        self._handshake_timeout_s = common.handshake_timeout_s
        self._run_dir = common.run_dir
        # Both are there from entering on.
        self._directory: RunDirectory
        self._lock: RoleLock
        self._children: dict[Role, _Child] = {}
        self._is_ending = False
        self._is_hurried = False
        self._failure: StackFailed | None = None

    async def __aenter__(self) -> "Supervisor":
        sweep_deserted()
        sweep_segments()
        self._directory = RunDirectory(self._run_dir) if self._run_dir is not None else RunDirectory.fresh()
        self._lock = RoleLock(self._directory, Role.SUPERVISOR, new_incarnation())
        # What a stack that was killed left behind is not where this one listens.
        self._directory.url_path.unlink(missing_ok=True)
        try:
            for role in self._configs:
                self._children[role] = await self._start(role)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._end()
        finally:
            sweep_segments()
            self._lock.release()
            self._directory.remove_if_deserted()

    @property
    def is_ending(self) -> bool:
        """Whether the stack is being ended."""
        return self._is_ending

    @property
    def url(self) -> str | None:
        """Where the gateway listens, once it does."""
        try:
            return self._directory.url_path.read_text(encoding="ascii")
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
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_HEALTH_TIMEOUT_S)) as session:
            while True:
                await asyncio.sleep(_HEALTH_INTERVAL_S)
                self._raise_failure()
                asked_at = time.monotonic()
                health = await self._health(session)
                for role in self._configs if health is not None else (Role.GATEWAY,):
                    child = self._children[role]
                    await self._judge(child, _is_heard(child, health), asked_at)

    def hurry(self) -> None:
        """Ends the stack without waiting for running requests."""
        self._is_hurried = True
        for child in self._children.values():
            _signal(child, signal.SIGKILL)

    async def _start(self, role: Role) -> _Child:
        environment = child_environment(os.environ, self._configs[role])
        environment["STRATA_RUN_DIR"] = str(self._directory.path)
        environment[SUPERVISED_VARIABLE] = "1"
        # -P: a directory named like one of our packages, where the user happens to be, is not it.
        # A process group of its own: Ctrl-C in a terminal is for the supervisor, which decides what it means.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", role),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,
        )
        watch = asyncio.create_task(self._watch_child(role, process), name=f"watch of {role}")
        return _Child(role, process, watch)

    async def _watch_child(self, role: Role, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        try:
            if not self._is_ending:
                await self._restart(role, code)
        except Exception as error:
            self._fail(f"the {role} cannot be started again: {error!r}")

    async def _restart(self, role: Role, code: int) -> None:
        """Starts a successor of a process that ended with this code, unless that is pointless."""
        if code == StartError.exit_code:
            self._fail(f"the {role} cannot start; its message is above")
            return
        child = self._children[role]
        now = time.monotonic()
        recent = [at for at in child.restarts if now - at < _RESTART_WINDOW_S]
        if len(recent) == _MAX_RESTARTS:
            self._fail(f"the {role} ended {_MAX_RESTARTS + 1} times within {_RESTART_WINDOW_S:g} s")
            return
        how = f"by signal {_signal_name(-code)}" if code < 0 else f"with code {code}"
        print(f"the {role} ended {how}; restarting it", file=sys.stderr, flush=True)
        sweep_segments()
        if recent:
            await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** len(recent))
            if self._is_ending:
                return
        successor = await self._start(role)
        successor.restarts = child.restarts
        successor.restarts.append(now)
        self._children[role] = successor
        if role is Role.GATEWAY:
            # It has heard nobody yet, however well they are.
            for other in self._children.values():
                other.was_heard, other.silent_since = False, None

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or StackFailed(reason)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _health(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        url = self.url
        if url is None:
            return None
        try:
            async with session.get(f"{url}/health") as response:
                answer: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        if response.status != 200 or "processes" not in answer:
            # It is in trouble. That is judged by how long it lasts, as silence is.
            return None
        self._keep_port(urlsplit(url).port)
        return answer

    def _keep_port(self, port: int | None) -> None:
        config = self._configs[Role.GATEWAY]
        if isinstance(config, GatewayConfig) and port is not None and not config.port:
            self._configs[Role.GATEWAY] = replace(config, port=port)

    async def _judge(self, child: _Child, is_heard: bool, asked_at: float) -> None:
        """Kills a process that runs, but has been silent for too long."""
        if is_heard:
            child.was_heard = True
        if is_heard or child.process.returncode is not None:
            child.silent_since = None
            return
        child.silent_since = child.silent_since or asked_at
        if time.monotonic() - child.silent_since > self._patience_s(child):
            child.silent_since = None
            await self._kill_stuck(child, f"nothing was heard of it for {self._patience_s(child):g} s")

    def _patience_s(self, child: _Child) -> float:
        """How long a process may be silent."""
        if not child.was_heard:
            # It has just been started, and may have to read its own program from a slow disk.
            return self._handshake_timeout_s
        # The gateway has waited for a worker before it said that it is absent.
        return self._heartbeat_timeout_s if child.role is Role.GATEWAY else _STUCK_AFTER_S

    async def _kill_stuck(self, child: _Child, reason: str) -> None:
        print(f"the {child.role} is stuck ({reason}); it will be killed", file=sys.stderr, flush=True)
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # One of the real-time signals.
        return str(number)


def _is_heard(child: _Child, health: dict[str, Any] | None) -> bool:
    """Whether this very process, not its predecessor, is among those that /health tells of."""
    return health is not None and health["processes"][child.role].get("pid") == child.process.pid


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
