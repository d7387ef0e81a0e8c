"""Serves a model over HTTP: starts gateway, gpu_worker, cpu_worker and stager, and keeps them up.

Settings come from flags, from variables (named in brackets) and from a TOML file, in this order. Ctrl-C lets
running requests finish; a second one does not.
"""

import argparse
import asyncio
import signal
import sys
import time
from typing import Any

from shared.cli.progress import ProgressLine
from shared.cli.stack_arguments import add_stack_arguments, stack_configs
from shared.config import CommonConfig
from shared.logs import set_up_logging
from shared.preflight import check_stack
from shared.process import check_platform, warn_of_unknown_variables
from shared.run_directory import Role
from shared.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata serve`."""
    add_stack_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    check_platform()
    configs = stack_configs(parsed)
    set_up_logging(configs[Role.GATEWAY].log_level, Role.SUPERVISOR, "serve")
    warn_of_unknown_variables()
    check_stack(configs)
    return asyncio.run(_serve(configs))


async def _serve(configs: dict[Role, CommonConfig]) -> int:
    started = time.monotonic()
    progress = ProgressLine()
    supervisor = Supervisor(configs, progress.update)
    work = asyncio.ensure_future(_until_ready_and_on(supervisor, progress, started))
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping or supervisor.is_ending:
            supervisor.hurry()
            return
        is_stopping = True
        progress.done()
        print("stopping; again to stop at once", file=sys.stderr, flush=True)
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    # The task has not begun yet: whoever reads this may interrupt.
    print(f"loading {configs[Role.GATEWAY].model}", file=sys.stderr, flush=True)
    try:
        await work
    except asyncio.CancelledError:
        if not is_stopping:
            raise
    return 0


async def _until_ready_and_on(supervisor: Supervisor, progress: ProgressLine, started: float) -> None:
    async with supervisor:
        try:
            health = await supervisor.wait_ready()
        finally:
            progress.done()
        print(_greeting(health, supervisor.url or "", time.monotonic() - started), flush=True)
        await supervisor.watch()


def _greeting(health: dict[str, Any], url: str, seconds: float) -> str:
    resident = ", ".join(
        f"{name} {_memory(process)}"
        for name, process in health["processes"].items()
        # The gpu_worker may know a worker that the gateway has not heard of yet.
        if "resident_memory_bytes" in process
    )
    question = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return "\n".join(
        [
            f"{health['model']} is served at {url} ({health['max_context']} tokens of context, "
            f"ready after {seconds:.1f} s)",
            f"resident memory, own + of files: {resident}",
            f"talk to it with `strata chat --url {url}`, or:",
            f"  curl {url}/v1/chat/completions -d '{question}'",
        ]
    )


def _memory(process: dict[str, Any]) -> str:
    resident, of_files = process["resident_memory_bytes"], process["resident_file_bytes"]
    return f"{(resident - of_files) / 2**20:.0f} + {of_files / 2**20:.0f} MiB"
