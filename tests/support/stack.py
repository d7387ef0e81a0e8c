"""A stack of real processes for tests: started as a user starts it, waited for by what it says, ended, and
searched for what it left behind.

Nothing here waits for a time to pass; every wait is for a condition, and fails with the stack's log.
"""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import yaml

ROLES = ("gateway", "gpu_worker", "cpu_worker", "stager")
WORKERS = ROLES[1:]
# No token has this id: where it is the only one that ends an answer, answers last until max_tokens.
NEVER = ("--eos-ids", "2147483647")
DONE = "[DONE]"

# Two slow cores that others use too.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
RECOVERY_TIMEOUT_S = 40.0

_LOOK_INTERVAL_S = 0.02
_LOG_TAIL_LINES = 120
# A Unix socket's path must be short, so pytest's own directories will not do.
_ROOT_PREFIX = "st-"

Found = TypeVar("Found")
# The stacks of the running test session, for the report of a test that fails.
started: list["Stack"] = []
# What tests measured on the way, for the summary at the end: name and seconds.
measurements: list[tuple[str, float]] = []


def compose_service(role: str) -> dict[str, Any]:
    """A service of docker-compose.yml, its variables replaced by their defaults; the compile cache, a volume
    there, is this machine's own."""
    text = (Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8")
    service: dict[str, Any] = yaml.safe_load(text)["services"][role]
    environment = {
        name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value))
        for name, value in service["environment"].items()
        if name != "STRATA_CACHE_DIR"
    }
    return service | {"environment": environment}


def strata_command() -> str:
    """The installed command, of the same environment as the tests."""
    command = shutil.which("strata", path=str(Path(sys.executable).parent))
    assert command is not None, "the project is not installed here; pip install -e ."
    return command


def wait_for(condition: Callable[[], Found | None], timeout_s: float, what: str) -> Found:
    """The condition's value once it is true. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(_LOOK_INTERVAL_S)
    return found


def is_running(pid: int) -> bool:
    """Whether there is a process of this number, one that waits to be buried included."""
    return Path(f"/proc/{pid}").exists()


def measured(name: str, seconds: float) -> None:
    """Notes a time for the summary."""
    measurements.append((name, seconds))


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of a refusal."""
        error: dict[str, Any] = self.json["error"]
        return error


class Stack:
    """One stack and its run directory; `processes` may be started by a supervisor or one by one."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=_ROOT_PREFIX))
        self.run_dir = self.root / "run"
        self.log_path = self.root / "log"
        self.log_path.touch()
        self.url = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        started.append(self)

    # Starting.

    def launch(
        self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process of this stack; it writes into the stack's log."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("STRATA_") or name == "STRATA_CACHE_DIR"
        }
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean | dict(environment or {}),
                cwd=cwd,
                # As in a terminal of its own: a signal for the group reaches this stack only.
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def serve(self, *flags: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """`strata serve` on a port that the system picks; does not wait."""
        defaults = ("--port", "0", "--run-dir", str(self.run_dir), "--log-level", "info")
        return self.launch(strata_command(), "serve", *defaults, *flags, environment=environment)

    def start_alone(self, role: str, *flags: str) -> subprocess.Popen[bytes]:
        """One process without a supervisor: the command and the environment of its compose service, but for
        the places that only a container has."""
        service = compose_service(role)
        command = [sys.executable, *service["command"][1:]]
        here = {"STRATA_RUN_DIR": str(self.run_dir), "STRATA_LOG_LEVEL": "info"}
        if role == "gateway":
            here["STRATA_HOST"] = "127.0.0.1"
        return self.launch(*command, *flags, environment=service["environment"] | here)

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        """What `serve` started."""
        return self.processes[0]

    def wait_served(self) -> None:
        """Waits for the greeting of `strata serve`."""

        def greeting() -> re.Match[str] | None:
            assert self.supervisor.poll() is None, f"serve ended with code {self.supervisor.returncode}"
            return re.search(r"is served at (http://\S+)", self.log)

        self.url = wait_for(greeting, START_TIMEOUT_S, "the greeting")[1]

    def wait_ready(self, timeout_s: float = RECOVERY_TIMEOUT_S) -> dict[str, Any]:
        """Waits until requests are served and every process says that it is ready; returns /health."""

        def ready() -> dict[str, Any] | None:
            health = self.health_if_any()
            if health is None or not health["loaded"]:
                return None
            states = {process["state"] for process in health["processes"].values()}
            return health if states == {"ready"} else None

        return wait_for(ready, timeout_s, "a ready stack")

    def wait_listening(self) -> None:
        """Waits until the gateway of processes that were started alone has said where it listens."""

        def url() -> str:
            path = self.run_dir / "gateway.url"
            return path.read_text() if path.exists() else ""

        self.url = wait_for(url, START_TIMEOUT_S, "the gateway's address")

    # Looking.

    @property
    def log(self) -> str:
        """Everything its processes have written."""
        return self.log_path.read_text(errors="replace")

    @property
    def log_tail(self) -> str:
        """The end of it."""
        return "\n".join(self.log.splitlines()[-_LOG_TAIL_LINES:])

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Answer:
        """One HTTP request. A body that is not bytes is sent as JSON."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> Answer:
        """One POST with a JSON body."""
        return self.request("POST", path, body)

    def health(self) -> dict[str, Any]:
        """What /health says."""
        health: dict[str, Any] = self.request("GET", "/health", timeout_s=5).json
        return health

    def health_if_any(self) -> dict[str, Any] | None:
        """What /health says, or None where nobody answers."""
        try:
            return self.health()
        except (OSError, http.client.HTTPException):
            return None

    def pid(self, role: str) -> int:
        """The process that plays the role now."""
        pid: int = self.health()["processes"][role]["pid"]
        return pid

    def kernel_read_bytes(self, role: str) -> int:
        """What the kernel has read from disks for a process."""
        text = Path(f"/proc/{self.pid(role)}/io").read_text()
        return int(text.split("\nread_bytes: ", 1)[1].split("\n", 1)[0])

    def told_read_bytes(self) -> float:
        """What all requests have read, as /metrics says."""
        metrics = self.request("GET", "/metrics").body.decode()
        told = re.findall(r"^strata_disk_read_bytes_total\{.*\} (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, told))

    def counters(self) -> tuple[int, int]:
        """Running and waiting requests."""
        health = self.health()
        return health["running"], health["waiting"]

    def wait_counters(self, running: int, waiting: int, timeout_s: float = 10.0) -> None:
        """Waits until so many requests run and wait."""
        what = f"{running} running and {waiting} waiting requests"
        wait_for(lambda: self.counters() == (running, waiting), timeout_s, what)

    def living_pids(self) -> list[int]:
        """Processes of this stack that exist, however they came to be: known by their run directory."""
        mark = f"STRATA_RUN_DIR={self.run_dir}".encode()
        found = [process.pid for process in self.processes if process.poll() is None]
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in found:
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # It is gone, or not ours.
                continue
        return found

    def started_pid(self, role: str) -> int | None:
        """The process that was started for a role, whether or not anyone has heard of it yet."""
        for pid in self.living_pids():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if role.encode() in command:
                return pid
        return None

    def segments(self) -> list[str]:
        """Its shared-memory segments: they are named after the gpu_worker or the cpu_worker that made
        them."""
        makers = set(re.findall(r"[cg]pu_worker\.([0-9a-f]{8}) ", self.log))
        return [path.name for path in Path("/dev/shm").glob("strata-*") if path.name[-8:] in makers]

    # Ending.

    def send(self, role: str, number: signal.Signals) -> int:
        """Sends a signal to the process that plays a role; returns its pid."""
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ends a stack that `serve` started, and returns its exit code."""
        if self.supervisor.poll() is None:
            self.supervisor.send_signal(number)
        return self.supervisor.wait(timeout_s)

    def assert_nothing_left(self, timeout_s: float = 3.0) -> None:
        """No process, no shared memory, no run directory. What is still on its way out gets a moment."""
        wait_for(lambda: not self.living_pids(), timeout_s, f"{self.living_pids()} to be gone")
        assert self.segments() == []
        assert not self.run_dir.exists(), sorted(self.run_dir.iterdir())

    def assert_only_living_remain(self) -> None:
        """After a recovery: four processes and a supervisor, and the segments of those that make some."""
        health = self.health()
        pids = {process["pid"] for process in health["processes"].values()}
        assert set(self.living_pids()) == pids | {self.supervisor.pid}
        makers = {health["processes"][role]["incarnation"] for role in ("gpu_worker", "cpu_worker")}
        assert {name[-8:] for name in self.segments()} <= makers

    def dispose(self) -> None:
        """Kills what still lives, whatever went wrong before, and removes the files."""
        for pid in self.living_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.root, ignore_errors=True)
        started.remove(self)


@contextmanager
def stack_files() -> Iterator[Stack]:
    """A stack that has not been started; killed at the end if need be."""
    stack = Stack()
    try:
        yield stack
    except BaseException:
        # The report of a failing test is made once its fixtures still stand; this is for the others.
        sys.stderr.write(f"--- log of the stack\n{stack.log_tail}\n")
        raise
    finally:
        stack.dispose()


@contextmanager
def serving(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """A stack that serves. At the end it is stopped, and nothing may be left of it."""
    with stack_files() as stack:
        began = time.monotonic()
        stack.serve(*flags, environment=environment)
        stack.wait_served()
        measured("start of a stack", time.monotonic() - began)
        yield stack
        began = time.monotonic()
        assert stack.stop() == 0
        measured("SIGTERM to an idle stack to its end", time.monotonic() - began)
        stack.assert_nothing_left()
        assert "Traceback" not in stack.log


# Streams.


def streaming_body(max_tokens: int = 2000, **fields: Any) -> dict[str, Any]:
    """A body for /v1/completions that gives text all the time where `NEVER` is set. With `ignore_eos` it goes
    on also where the model falls into saying one token over and over."""
    sampling = {"temperature": 2, "top_k": 0, "top_p": 1, "seed": 1, "ignore_eos": True}
    return {"prompt": "Once upon", "stream": True, "max_tokens": max_tokens} | sampling | fields


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The events of a stream: decoded JSON, and `DONE` as its text. Comments are passed over."""
    async for line in response.content:
        if line.startswith(b"data: "):
            payload = line.removeprefix(b"data: ").decode("utf-8").rstrip("\n")
            yield payload if payload == DONE else json.loads(payload)


async def first_text(stream: AsyncIterator[Any]) -> str:
    """Reads a stream of a text completion up to its first text, and returns that."""
    async for event in stream:
        if text := event["choices"][0]["text"]:
            return str(text)
    raise AssertionError("the stream ended without text")
