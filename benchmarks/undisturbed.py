"""Measurements that wait for a quiet machine, and say what they were made beside.

A busy thread of somebody else's makes llama.cpp many times slower and Strata less (`benchmarks.processes`),
so what was disturbed counts only where nothing else is there, and is then marked.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.contenders import Server
from benchmarks.processes import CpuWatch, wait_for_quiet
from benchmarks.report import Report, say

MAX_FOREIGN_CPUS = 0.1
"""Beside more than this on average a measurement is disturbed."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Measured(Generic[Value]):
    """What came out, and how many CPUs were busy with something else meanwhile."""

    value: Value
    foreign_cpus: float

    @property
    def is_quiet(self) -> bool:
        """Whether hardly anybody else used the CPUs."""
        return self.foreign_cpus <= MAX_FOREIGN_CPUS


class Bench:
    """Where it is measured: some CPUs, and a report of what goes wrong."""

    def __init__(self, cpus: set[int], patience_s: float, report: Report) -> None:
        """`patience_s`: how long a measurement waits for the CPUs to be quiet."""
        self.cpus = cpus
        self.report = report
        self._patience_s = patience_s

    def measure(self, servers: Sequence[Server], act: Callable[[], Value]) -> Measured[Value]:
        """Waits for quiet, and acts; what `servers` use meanwhile disturbs nobody."""

        def used_s() -> float:
            return sum(server.cpu_seconds() for server in servers)

        wait_for_quiet(self.cpus, MAX_FOREIGN_CPUS, self._patience_s)
        watch = CpuWatch(self.cpus, used_s)
        value = act()
        return Measured(value, watch.foreign_cpus())

    def counted(self, name: str, measured: Sequence[Measured[Value]]) -> list[Value]:
        """What counts of several measurements: the undisturbed ones, or all where there are none, which is
        noted with their name."""
        quiet = [each.value for each in measured if each.is_quiet]
        if not quiet and measured:
            least = min(each.foreign_cpus for each in measured)
            self.report.note(f"DISTURBED: {name}, every time, at least by {least:.2f} busy CPUs")
        return quiet or [each.value for each in measured]


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Within it, they serve. Raises AnswerError."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
            say(f"  {server.name} serves")
        yield
