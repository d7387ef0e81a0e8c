"""What share of missed experts is transferred to the device, and how it follows what is measured.

A transfer and the CPU should take about the same time, then neither is waited for. The start is a guess from
what the link can do; it is corrected, a few times and then no more, by what both have done. Rules and
constants are the original engine's.
"""

from dataclasses import dataclass

FIRST_UPDATE_WINDOWS = 48
UPDATE_WINDOWS = 96
"""Between two updates, at least."""
MOST_UPDATES = 3
ENOUGH_SAMPLES = 32
"""Of each kind, for an update: times of one layer each vary by tens of per cent, which the mean of so many
does not; the share is rounded to steps of 0.05."""
_MOST_AT_START, _SMALLEST, _LARGEST = 0.55, 0.10, 0.60
_FULL_LINK_GB_S = 20.0
_CPU_WEIGHT = 1.85
_STEPS_OF_ONE = 20
_GIGA = 1e9


def initial_share(link_gb_s: float) -> float:
    """Before anything is measured but the link."""
    return min(_MOST_AT_START, _MOST_AT_START * link_gb_s / _FULL_LINK_GB_S)


def updated_share(link_gb_s: float, cpu_gb_s: float) -> float:
    """From what the link has transferred and the CPU has computed a second, 0.10 to 0.60 in steps of 0.05."""
    share = link_gb_s / (link_gb_s + _CPU_WEIGHT * cpu_gb_s)
    return min(max(round(share * _STEPS_OF_ONE) / _STEPS_OF_ONE, _SMALLEST), _LARGEST)


@dataclass(slots=True)
class _Rate:
    num_samples: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self.num_samples += 1
            self.num_bytes += num_bytes
            self.seconds += seconds

    @property
    def is_known(self) -> bool:
        return self.num_samples >= ENOUGH_SAMPLES

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / _GIGA


class LinkShare:
    """The share at any time (`PlanRules.transfer_share`)."""

    def __init__(self, setting: float | None, probe_gb_s: float) -> None:
        """`setting` is never changed; without one, what the link did when it was probed decides at first, in
        1e9 bytes a second."""
        self._is_fixed = setting is not None
        self._share = initial_share(probe_gb_s) if setting is None else setting
        self._num_updates = 0
        self._num_windows = 0
        self._link, self._cpu = _Rate(), _Rate()

    @property
    def share(self) -> float:
        """Of missed groups, 0 to 1."""
        return self._share

    @property
    def num_updates(self) -> int:
        """So far."""
        return self._num_updates

    def note_transfers(self, num_bytes: int, seconds: float) -> None:
        """Experts of one layer were transferred in that time."""
        self._link.add(num_bytes, seconds)

    def note_cpu(self, num_bytes: int, seconds: float) -> None:
        """The CPU has computed experts of one layer, of that many bytes, in that time."""
        self._cpu.add(num_bytes, seconds)

    def after_window(self) -> bool:
        """A window has ended. Updates the share where it is time and enough was measured; whether it has
        changed."""
        self._num_windows += 1
        wait = UPDATE_WINDOWS if self._num_updates else FIRST_UPDATE_WINDOWS
        if self._is_fixed or self._num_updates == MOST_UPDATES or self._num_windows < wait:
            return False
        if not (self._link.is_known and self._cpu.is_known):
            return False
        before, self._share = self._share, updated_share(self._link.gb_per_s, self._cpu.gb_per_s)
        self._num_updates += 1
        self._num_windows = 0
        self._link, self._cpu = _Rate(), _Rate()
        return self._share != before
