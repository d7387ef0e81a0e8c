"""Which CPUs each process uses, and how many threads that makes.

On the 16-CPU machine this is designed for, the cpu_worker has CPUs 0-7 and the stager 8-15; elsewhere the
usable CPUs are halved in the same way. With fewer than four there is nothing to divide: everybody shares, and
nobody spins, since the core a spinner burns is the one its peer needs.
"""

import functools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from threadpoolctl import ThreadpoolController

from shared.errors import ConfigError

_MIN_CPUS_TO_DIVIDE = 4
_CPUS = re.compile(r"(?P<first>[0-9]{1,6})(-(?P<last>[0-9]{1,6}))?")
# Long enough to meet an answer that is about to come, short enough to be cheap when it is not.
_SPIN_S = 100e-6


@functools.cache
def usable_cpus() -> tuple[int, ...]:
    """The CPUs this process may run on, in order, as it was when this was first asked.

    Later answers would count only the CPUs that the process has meanwhile pinned itself to.
    """
    return tuple(sorted(os.sched_getaffinity(0)))


def num_threads_on(cpus: Sequence[int]) -> int:
    """How many threads keep these CPUs busy: one each, but not more than the CPU time that a container's
    limit grants, since threads beyond that only wait for each other."""
    granted = cpu_quota()
    return len(cpus) if granted is None else max(1, min(len(cpus), math.ceil(granted)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU seconds per second that the control group grants this process (`docker run --cpus`), None where
    it sets no limit. What the file system of another version says is looked for too."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def spin_time_s() -> float:
    """How long a process may spin for an answer from another before it sleeps."""
    return _SPIN_S if num_threads_on(usable_cpus()) >= _MIN_CPUS_TO_DIVIDE else 0.0


def meeting_cpu() -> int | None:
    """The CPU for threads of different processes that hand work over and wait for each other, where CPUs are
    too few to divide; None elsewhere.

    A thread is woken on the CPU that its waker leaves within a few microseconds, on another after 30 to 50
    (measured on two CPUs: the demo model decodes 1.4 to 1.6 times as fast). Their helpers keep the others.
    """
    usable = usable_cpus()
    return usable[0] if 2 <= len(usable) < _MIN_CPUS_TO_DIVIDE else None


def cpu_set(setting: str, *, flag: str, second_half: bool) -> tuple[int, ...]:
    """The CPUs for a process: those named by its setting, or its half of the usable ones for "auto".

    Named CPUs that this machine does not have are left out, so that one configuration (0-7 and 8-15 in the
    compose file) serves large and small machines; where none is left, all usable ones are taken. Raises
    ConfigError where the setting cannot be read.
    """
    usable = usable_cpus()
    if setting == "auto":
        if len(usable) < _MIN_CPUS_TO_DIVIDE:
            return usable
        half = len(usable) // 2
        return usable[half:] if second_half else usable[:half]
    named = _parse(setting, flag)
    return tuple(cpu for cpu in usable if any(cpu in cpus for cpus in named)) or usable


def use_one_blas_thread() -> None:
    """Keeps numpy's matrix products on the thread that asks for them: our own threads divide the work."""
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)


def _parse(text: str, flag: str) -> list[range]:
    ranges = []
    for part in text.split(","):
        match = _CPUS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"{flag} is {text!r}; expected CPUs as 0-7 or 0,2,4, or auto")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first:
            raise ConfigError(f"{flag} is {text!r}; the CPUs {part.strip()} run backwards")
        ranges.append(range(first, last + 1))
    return ranges
