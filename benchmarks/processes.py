"""What the system says of a process and its children: CPU time and memory; how to end them; and how much
else is going on."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_END_TIMEOUT_S = 40.0
_WATCH_INTERVAL_S = 0.1
_QUIET_WINDOW_S = 0.5


@contextmanager
def children_on(cpus: set[int]) -> Iterator[None]:
    """Within it, what is started runs on these CPUs only, and takes them for all there are."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def family(pid: int) -> list[int]:
    """The process and everything it started that still runs."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children[_stat(int(path.name)).parent].append(int(path.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found


def cpu_seconds(pids: list[int]) -> float:
    """What they have used so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _stat(pid).cpu_ticks
    return total / _TICKS_PER_S


def disk_read_bytes(pids: list[int]) -> int:
    """What they have had read from disks so far, page faults and read-ahead included."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            total += int(dict(line.split(": ", 1) for line in lines)["read_bytes"])
    return total


class ReadWatch:
    """Notes how much has been read so far, again and again, from a thread of its own.

    What a request reads after its first token cannot be told from the outside in another way.
    """

    def __init__(self, read_bytes: Callable[[], int]) -> None:
        self._read_bytes = read_bytes
        self._times: list[float] = []
        self._bytes: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reads", daemon=True)

    def __enter__(self) -> "ReadWatch":
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._note()

    def bytes_between(self, first_s: float, last_s: float) -> float:
        """Read between two moments, given in seconds from the beginning."""
        since = [moment - self._times[0] for moment in self._times]
        first, last = np.interp((first_s, last_s), since, self._bytes)
        return float(last - first)

    def _run(self) -> None:
        while not self._ended.wait(_WATCH_INTERVAL_S):
            self._note()

    def _note(self) -> None:
        self._times.append(time.monotonic())
        self._bytes.append(self._read_bytes())


def own_memory_bytes(pids: list[int]) -> int:
    """The most memory that the processes have had, without the pages of mapped files: the sum of VmHWM minus
    RssFile. Those pages are shared, and given back when memory is short. Shared memory counts once for each
    process that has touched it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            text = Path(f"/proc/{pid}/status").read_text()
            status = dict(line.split(":", 1) for line in text.splitlines())
            peak, of_files = (int(status[name].split()[0]) for name in ("VmHWM", "RssFile"))
            total += 1024 * max(0, peak - of_files)
    return total


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Asks a process to end, kills it where it does not, and then what is left of those it had started."""
    others: dict[int, int] = {}
    for pid in family(process.pid)[1:]:
        with contextlib.suppress(OSError):
            others[pid] = _stat(pid).started
    try:
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.send_signal(number)
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        for pid, started in others.items():
            # Not a later process of the same number.
            with contextlib.suppress(OSError):
                if _stat(pid).started == started:
                    os.kill(pid, signal.SIGKILL)


class CpuWatch:
    """How much of some CPUs goes to anyone but those who are measured, from making it on.

    It decides whether a measurement counts. llama.cpp's threads spin at barriers for each other: one busy
    thread of somebody else's on two CPUs was seen to make it 10 to 40 times slower (32 tokens/s alone, 0.7 to
    2 beside it), and Strata much less, so that a busy machine flatters us beyond all measure.
    """

    def __init__(self, cpus: set[int], measured: Callable[[], float]) -> None:
        """`measured` is the CPU time so far of those who are measured, in seconds."""
        self._cpus = cpus
        self._measured = measured
        self._began = time.monotonic()
        self._busy = self._foreign_s()

    def foreign_cpus(self) -> float:
        """How many CPUs were busy with something else on average, what the hypervisor took included."""
        elapsed = time.monotonic() - self._began
        return max(0.0, self._foreign_s() - self._busy) / max(elapsed, 1e-3)

    def _foreign_s(self) -> float:
        return busy_seconds(self._cpus) - self._measured() - time.process_time()


def wait_for_quiet(cpus: set[int], most: float, patience_s: float) -> float:
    """Returns once no more than `most` of these CPUs is busy, or after so long: how much it was."""
    deadline = time.monotonic() + patience_s
    while True:
        watch = CpuWatch(cpus, lambda: 0.0)
        time.sleep(_QUIET_WINDOW_S)
        if (foreign_cpus := watch.foreign_cpus()) <= most or time.monotonic() > deadline:
            return foreign_cpus


def busy_seconds(cpus: set[int]) -> float:
    """How long these CPUs have not been idle since the machine was started."""
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name.removeprefix("cpu").isdigit() and int(name.removeprefix("cpu")) in cpus:
            # Without idle and waiting for disks; guests are within user time.
            user, nice, system, _, _, interrupt, soft_interrupt, stolen = map(int, fields[:8])
            ticks += user + nice + system + interrupt + soft_interrupt + stolen
    return ticks / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    cpu_ticks: int
    started: int


def _stat(pid: int) -> _Stat:
    """Raises OSError where there is no such process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # Behind the name, which is in parentheses and may hold anything: the state, then numbers from the 4th
    # field on, as proc(5) counts them.
    numbers = [int(number) for number in text.rpartition(")")[2].split()[1:]]
    return _Stat(parent=numbers[0], cpu_ticks=numbers[10] + numbers[11], started=numbers[18])
