"""Which CPUs each process uses, and how many threads that makes.

On the 16-CPU machine this is designed for, the cpu_worker has CPUs 0-7 and the stager 8-15; elsewhere the
usable CPUs are halved in the same way. With fewer than four there is nothing to divide: everybody shares, and
nobody spins, since the core a spinner burns is the one its peer needs.
"""

import os

from threadpoolctl import ThreadpoolController

from shared.errors import ConfigError

_MIN_CPUS_TO_DIVIDE = 4
# Long enough to meet an answer that is about to come, short enough to be cheap when it is not.
_SPIN_S = 100e-6


def usable_cpus() -> list[int]:
    """The CPUs this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def spin_time_s() -> float:
    """How long a process may spin for an answer from another before it sleeps."""
    return _SPIN_S if len(usable_cpus()) >= _MIN_CPUS_TO_DIVIDE else 0.0


def cpu_set(setting: str, *, flag: str, second_half: bool) -> list[int]:
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
    return [cpu for cpu in usable if cpu in named] or usable


def use_one_blas_thread() -> None:
    """Keeps numpy's matrix products on the thread that asks for them: our own threads divide the work."""
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)


def _parse(text: str, flag: str) -> set[int]:
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise ConfigError(f"{flag} is {text!r}; expected CPUs as 0-7 or 0,2,4")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
