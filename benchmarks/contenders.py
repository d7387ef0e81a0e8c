"""Strata and llama.cpp, each to be started, asked, weighed and ended in the same way.

Each is a process of its own with children of its own. None outlives this one: the two of llama.cpp end with
their input, and Strata's command, which has none, is told by the kernel when this process is gone.
"""

import ctypes
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.llama_process import KEEP
from benchmarks.processes import children_on, cpu_seconds, end, family, own_memory_bytes
from benchmarks.streaming import AnswerError, Generation, all_logits, complete, get_json

_START_TIMEOUT_S = 900.0
_PR_SET_PDEATHSIG = 1


class Contender(Protocol):
    """One program that generates tokens from a model."""

    name: str

    def start(self) -> None:
        """Returns once it can be asked. Raises AnswerError."""

    def stop(self) -> None:
        """Ends it, all of it; harmless where it does not run."""

    @property
    def is_running(self) -> bool:
        """Whether it has been started."""

    def generate(self, prompt_token_ids: Sequence[int], num_new: int) -> Generation:
        """Greedy tokens after a prompt. Raises AnswerError."""

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far."""

    def memory_bytes(self) -> int:
        """See `own_memory_bytes`."""

    def pids(self) -> list[int]:
        """Its processes; none where it does not run."""


class _Process:
    """The process of a contender, and what it says."""

    def __init__(
        self, name: str, command: Sequence[str], cpus: set[int], last_signal: signal.Signals
    ) -> None:
        self.name = name
        self._command = list(command)
        self._cpus = cpus
        self._last_signal = last_signal
        self.groups: Sequence[Path] = ()
        """Files `cgroup.procs` of the groups that it is started in."""
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def launch(self) -> None:
        """Starts it; does not wait."""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        with children_on(self._cpus):
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                # Ctrl-C is for this process, which ends the others in order.
                start_new_session=True,
                preexec_fn=partial(_begin, [str(path) for path in self.groups]),
            )

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            end(process, self._last_signal)
            assert process.stdout is not None
            process.stdout.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def say(self, line: str) -> None:
        """Gives it a line to read. Raises AnswerError."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self.failed("does not read what it is told") from error

    def line(self) -> str:
        """The next line that it says. Raises AnswerError."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while not poll.poll(1000):
            if time.monotonic() > deadline:
                raise self.failed(f"says nothing for {_START_TIMEOUT_S:g} s")
        text = self._process.stdout.readline()
        if not text:
            raise self.failed("has ended")
        return text

    def failed(self, how: str) -> AnswerError:
        """The error to raise, with the end of what the process wrote."""
        assert self._log is not None
        self._log.seek(0)
        last_lines = self._log.read().splitlines()[-8:]
        return AnswerError("\n    ".join([f"{self.name} {how}; its last words:", *last_lines]))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pids())

    def memory_bytes(self) -> int:
        return own_memory_bytes(self.pids())

    def pids(self) -> list[int]:
        """Its processes; none where it does not run."""
        return family(self._process.pid) if self._process is not None else []


def _begin(groups: Sequence[str]) -> None:
    """In the child, before it is what it shall be: a signal when this process is gone, however it goes, and
    its groups."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for path in groups:
        with open(path, "w") as file:
            # Whoever writes.
            file.write("0")


_libc = ctypes.CDLL(None)


class Server(_Process):
    """One that is asked over HTTP."""

    url = ""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Of every request."""

    def start(self) -> None:
        """Returns once it serves. Raises AnswerError."""
        raise NotImplementedError

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        num_new: int,
        fields: Mapping[str, Any] | None = None,
        *,
        may_end: bool = False,
        stop: threading.Event | None = None,
    ) -> Generation:
        """See `complete`. Raises AnswerError."""
        all_fields = {**self.fields, **(fields or {})}
        try:
            return complete(self.url, prompt_token_ids, num_new, all_fields, may_end=may_end, stop=stop)
        except AnswerError as error:
            raise self.failed(f"fails: {error}") from error


class Strata(Server):
    """The whole stack, as `strata serve` starts it."""

    def __init__(self, model: Path, cpus: set[int], context: int, flags: Sequence[str]) -> None:
        command = [*strata_command("serve"), str(model), "--port", "0", "--max-context", str(context)]
        command += ["--logits-endpoint", *flags]
        super().__init__("strata", command, cpus, signal.SIGTERM)

    def start(self) -> None:
        self.launch()
        # The greeting comes once requests are served.
        greeting = self.line()
        found = re.search(r"served at (\S+)", greeting)
        if found is None:
            raise self.failed(f"greets with {greeting!r}")
        self.url = found[1]

    def process_id(self, role: str) -> int:
        """That of one of its processes, such as `stager`. Raises AnswerError."""
        return int(get_json(self.url, "/health")["processes"][role]["pid"])

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Of every position [tokens, vocabulary]. Raises AnswerError."""
        return all_logits(self.url, token_ids)


class LlamaServer(Server):
    """llama.cpp's server."""

    def __init__(self, model: Path, cpus: set[int], context: int, flags: Sequence[str] = ()) -> None:
        """`flags` are of `benchmarks.llama_server`; `context` is that of all its slots together."""
        command = [*_own_module("benchmarks.llama_server", model, cpus, context), *flags]
        super().__init__("llama.cpp server", command, cpus, signal.SIGTERM)
        self.fields = {"cache_prompt": KEEP in flags}

    def start(self) -> None:
        self.launch()
        self.url = json.loads(self.line())["url"]


class LlamaInProcess(_Process):
    """llama.cpp's library, without a server."""

    def __init__(self, model: Path, cpus: set[int], context: int, flags: Sequence[str] = ()) -> None:
        """`flags` are of `benchmarks.llama_cpp`."""
        command = [*_own_module("benchmarks.llama_cpp", model, cpus, context), *flags]
        super().__init__("llama.cpp in process", command, cpus, signal.SIGTERM)

    def start(self) -> None:
        self.launch()
        self.line()

    def generate(self, prompt_token_ids: Sequence[int], num_new: int) -> Generation:
        answer = self._ask(do="generate", prompt=list(prompt_token_ids), num_new=num_new)
        return Generation(
            len(prompt_token_ids), num_new, tuple(answer["seconds"]), token_ids=tuple(answer["token_ids"])
        )

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Of every position [tokens, vocabulary]. Raises AnswerError."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "logits.npy"
            self._ask(do="logits", prompt=list(token_ids), out=str(out))
            logits: NDArray[np.float32] = np.load(out)
            return logits

    def _ask(self, **request: Any) -> dict[str, Any]:
        self.say(json.dumps(request))
        answer: dict[str, Any] = json.loads(self.line())
        return answer


def strata_command(command: str) -> list[str]:
    """How to run one of the commands of `strata` with this Python."""
    return [sys.executable, "-c", "from shared.cli.main import main; main()", command]


def _own_module(name: str, model: Path, cpus: set[int], context: int) -> list[str]:
    return [sys.executable, "-m", name, str(model), "--threads", str(len(cpus)), "--context", str(context)]
