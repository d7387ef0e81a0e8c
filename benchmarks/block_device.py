"""What the system says of the disk under a file."""

import os
from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/sys/dev/block")
_READS, _MS_READING, _MS_BUSY = 0, 3, 9
"""Places in a device's `stat`, as Documentation/block/stat.rst of the kernel counts them."""


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """What a disk has done so far, for everybody."""

    num_reads: int
    reading_ms: int
    """Of all reads together."""
    busy_ms: int

    def reads_in_flight_since(self, before: "DiskCounts") -> float:
        """On average over the time in which the disk had anything to do; 0 where it had not."""
        busy_ms = self.busy_ms - before.busy_ms
        return (self.reading_ms - before.reading_ms) / busy_ms if busy_ms > 0 else 0.0


def device_number(path: Path, devices: Path = _DEVICES) -> str | None:
    """`major:minor` of the whole disk that a file lies on; None where there is none, as with tmpfs."""
    device = path.stat().st_dev
    home = devices / f"{os.major(device)}:{os.minor(device)}"
    if not home.exists():
        return None
    if (home / "partition").exists():
        home = home.resolve().parent
    return (home / "dev").read_text().strip()


def read_ahead_kib(number: str, devices: Path = _DEVICES) -> int:
    """What is read around a page that a mapping lacks, at most."""
    return int((devices / number / "queue" / "read_ahead_kb").read_text())


def disk_counts(number: str, devices: Path = _DEVICES) -> DiskCounts:
    """Of the disk of that number."""
    fields = [int(field) for field in (devices / number / "stat").read_text().split()]
    return DiskCounts(fields[_READS], fields[_MS_READING], fields[_MS_BUSY])
