"""The skeleton of a worker process: start, signals, roles, states and exit, the same for all four.

States: STARTING -> READY -> DRAINING, with WAITING in between while a peer it needs is away.

SIGTERM drains: the process finishes what others rely on and leaves by itself, at the latest after
`drain_timeout_s`. A process that still loads has nothing to finish and leaves at once; so does one that gets
a second SIGTERM. A process that `serve` started also leaves when its supervisor is gone, so that killing the
supervisor leaves no orphans.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import uvloop

from shared.config import PROCESS_CONFIGS, CommonConfig, check_heartbeats
from shared.draft_model import open_model
from shared.errors import ConfigError, StartError
from shared.gguf.model import GGUFModel
from shared.link import Identity, close_links
from shared.logs import set_up_logging
from shared.messages import Heartbeat
from shared.run_directory import Role, RoleLock, RunDirectory, new_incarnation
from shared.settings import add_flags, describe, resolve, settings_of, unknown_variables

_log = logging.getLogger(__name__)

SUPERVISED_VARIABLE = "STRATA_SUPERVISED"
# Variables that are read elsewhere than in a config class.
OTHER_VARIABLES = (SUPERVISED_VARIABLE, "STRATA_CACHE_DIR")

_ORPHAN_CHECK_INTERVAL_S = 0.25
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

AnyConfig = TypeVar("AnyConfig", bound=CommonConfig)
Result = TypeVar("Result")


class ProcessState(StrEnum):
    """What a process says of itself in its heartbeats."""

    STARTING = "starting"
    WAITING = "waiting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class ProcessContext(Generic[AnyConfig]):
    """What every process has: its settings, who it is, where its stack lives, and how it is doing."""

    config: AnyConfig
    identity: Identity
    directory: RunDirectory
    model: GGUFModel
    state: ProcessState = ProcessState.STARTING
    activity: str = "starting"
    progress: float = 0.0
    # Set by SIGTERM: finish and leave.
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    measure: Callable[[], dict[str, float]] = dict
    """What the process measures of its own work, for the heartbeat. Called from the event loop."""

    def report(self, activity: str, progress: float) -> None:
        """Says what start-up work is being done and how far it is, from 0 to 1. Called from any thread."""
        self.activity, self.progress = activity, progress

    def heartbeat(self) -> Heartbeat:
        """The sign of life to send now."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        gauges = {
            **_resident_memory(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "major_faults": float(usage.ru_majflt),
            **_disk_reads(),
            **self.measure(),
        }
        return Heartbeat(state=self.state, activity=self.activity, progress=self.progress, gauges=gauges)


def major_faults() -> int:
    """Of this process since its start: pages that it had to wait for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _disk_reads() -> dict[str, float]:
    """Bytes that the kernel has read from disks for this process since its start."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return {}
    return {"disk_read_bytes": float(text.split("\nread_bytes: ", 1)[1].split("\n", 1)[0])}


def _resident_memory() -> dict[str, float]:
    """This process's resident memory: its own, and the part of the model file it has touched.

    Pages of the file are shared by all processes and given back when memory is short, so they are told apart.
    """
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        # Nothing can be opened, for want of file descriptors perhaps. A sign of life is worth more than this.
        return {}
    status = dict(line.split(":", 1) for line in text.splitlines())
    kib = {name: float(status[name].split()[0]) for name in ("VmRSS", "RssFile", "VmLck")}
    return {
        "resident_memory_bytes": 1024 * kib["VmRSS"],
        "resident_file_bytes": 1024 * kib["RssFile"],
        "locked_memory_bytes": 1024 * kib["VmLck"],
    }


def run_process(
    role: Role,
    config_class: type[AnyConfig],
    description: str,
    main: Callable[[ProcessContext[AnyConfig]], Awaitable[None]],
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Parses settings, takes the role, runs `main` in an event loop, and exits with its code.

    `main` returns when the process has drained; cancelling it must release everything it holds.
    """
    code = _exit_code(role, config_class, description, main, arguments)
    # Everything is released. What is left is taking down an interpreter with torch or LLVM in it, which takes
    # a second, and which a thread that still loads (see `load_in_thread`) would not survive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(
    role: Role,
    config_class: type[AnyConfig],
    description: str,
    main: Callable[[ProcessContext[AnyConfig]], Awaitable[None]],
    arguments: Sequence[str] | None,
) -> int:
    incarnation = new_incarnation()
    # On request, says on standard error where every thread is: for a process that seems stuck.
    faulthandler.register(signal.SIGUSR1)
    try:
        config = _parse(config_class, f"python -m {role}", description, arguments)
        set_up_logging(config.log_level, role, incarnation)
        if SUPERVISED_VARIABLE not in os.environ:
            warn_of_unknown_variables()
        check_platform()
        check_heartbeats(config)
        model = open_model(config.model, config.draft_model)
        # From here on there is something to clean up: a signal waits until the loop has its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        directory = RunDirectory(config.run_dir)
        lock = RoleLock(directory, role, incarnation)
    except StartError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return error.exit_code
    _log.info("settings: %s", ", ".join(f"{k}={v}" for k, v in describe(config).items()))
    identity = Identity(role, incarnation, model.fingerprint(), os.getpid())
    try:
        uvloop.run(_supervise_main(config, identity, directory, model, main))
    except Exception as error:
        return _report_failure(error)
    finally:
        close_links()
        directory.remove_sockets(role)
        lock.release()
        if SUPERVISED_VARIABLE not in os.environ or not directory.look_at(Role.SUPERVISOR).is_alive:
            directory.remove_if_deserted()
    return 0


def _report_failure(error: Exception) -> int:
    """Logs why the process ends and returns its exit code. Task groups wrap what their tasks raise."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, StartError):
        _log.error("%s", error)
        return error.exit_code
    _log.error("the process fails", exc_info=error)
    return 1


async def _supervise_main(
    config: AnyConfig,
    identity: Identity,
    directory: RunDirectory,
    model: GGUFModel,
    main: Callable[[ProcessContext[AnyConfig]], Awaitable[None]],
) -> None:
    context = ProcessContext(config, identity, directory, model)
    work = asyncio.ensure_future(main(context))
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if context.drain.is_set():
            _log.warning("asked to stop a second time: stopping at once")
            work.cancel()
        elif context.state is ProcessState.STARTING:
            _log.info("asked to stop before it was ready: stopping at once")
            context.drain.set()
            work.cancel()
        else:
            _log.info("asked to stop: draining for at most %g s", config.drain_timeout_s)
            context.drain.set()
            loop.call_later(config.drain_timeout_s, work.cancel)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    orphan_watch = asyncio.ensure_future(_leave_with_supervisor(directory, work))
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        orphan_watch.cancel()


async def _leave_with_supervisor(directory: RunDirectory, work: asyncio.Future[None]) -> None:
    if SUPERVISED_VARIABLE not in os.environ:
        return
    # A lock in the file system has no event to wait for.
    while directory.look_at(Role.SUPERVISOR).is_alive:  # noqa: ASYNC110
        await asyncio.sleep(_ORPHAN_CHECK_INTERVAL_S)
    _log.warning("the supervisor is gone: stopping")
    work.cancel()


def _parse(
    config_class: type[AnyConfig], program: str, description: str, arguments: Sequence[str] | None
) -> AnyConfig:
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    add_flags(parser, settings_of(config_class).values())
    flags = vars(parser.parse_args(arguments))
    known = settings_of(*PROCESS_CONFIGS.values())
    return resolve(config_class, flags=flags, environment=os.environ, known=known)


def warn_of_unknown_variables() -> None:
    """Logs each variable that looks like a setting and is none."""
    known = [item.variable for item in settings_of(*PROCESS_CONFIGS.values()).values()]
    for name in unknown_variables(os.environ, [*known, *OTHER_VARIABLES]):
        _log.warning("the variable %s is set, but nothing reads it; is it misspelt?", name)


def check_platform() -> None:
    """Refuses platforms whose memory model or system calls the shared-memory ring does not know."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError(f"Strata runs on Linux on x86-64; this is {sys.platform} on {platform.machine()}")


async def load_in_thread(load: Callable[[], Result]) -> Result:
    """Runs long start-up work in a thread of its own.

    Not in the loop's executor, whose threads are waited for at the end: loading a model takes minutes, and a
    process that is asked to stop meanwhile shall leave at once. `run_process` ends the thread with it.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not loaded.done():
            set_outcome()

    def run() -> None:
        try:
            result = load()
        except BaseException as error:  # handed to whoever awaits
            outcome = partial(loaded.set_exception, error)
        else:
            outcome = partial(loaded.set_result, result)
        with contextlib.suppress(RuntimeError):  # The loop may be closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await loaded
