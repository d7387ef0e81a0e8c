"""What a benchmark claims, and where it was measured.

Claims go to standard output as they are known, one `name: value` per line and nothing else, so that a script
can read them; tables and remarks go to standard error. `Report.write` keeps everything as JSON.
"""

import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared.errors import StrataError

_PACKAGES = ("strata-inference", "xllamacpp", "gguf", "llvmlite", "numba", "numpy", "torch")
# Of what /proc/cpuinfo lists, what matters to kernels of quantised products.
# fmt: off
_INSTRUCTION_SETS = (
    "ssse3", "avx", "f16c", "fma", "avx2", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512vl",
    "avx512vbmi", "avx512_vnni", "avx512_bf16", "amx_int8",
)
# fmt: on


@dataclass(slots=True)
class Report:
    """The results of one run."""

    benchmark: str
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Whatever the claims were computed from."""
    notes: list[str] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def claim(self, name: str, value: float) -> None:
        """Prints one result and keeps it."""
        if name in self.claims:
            raise ValueError(f"{name} has been claimed already")
        self.claims[name] = value
        print(f"{name}: {value:.4g}", flush=True)

    def claim_all(self, values: Mapping[str, float]) -> None:
        """Several, each under its name."""
        for name, value in values.items():
            self.claim(name, value)

    def note(self, text: str) -> None:
        """Prints a remark that a reader of the numbers needs, and keeps it."""
        self.notes.append(text)
        say(text)

    def write(self, path: Path) -> None:
        """Writes everything as JSON."""
        content = {
            "benchmark": self.benchmark,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_at)),
            "duration_s": round(time.time() - self.started_at, 1),
            "claims": self.claims,
            "machine": machine(),
            "versions": versions(),
            "model": self.model,
            "settings": self.settings,
            "notes": self.notes,
            "details": self.details,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class BenchmarkError(Exception):
    """A benchmark cannot go on; the text says why."""


def measured(report: Report, file: Path | None, measure: Callable[[], int]) -> int:
    """Runs a benchmark; returns the exit code. Its report goes to `file`, where there is one, unless it was
    broken off; what goes wrong with files, models, contenders is told in a line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = measure()
    except (BenchmarkError, StrataError, OSError) as error:
        print(f"{report.benchmark}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if file is not None:
        report.write(file)
    return code


def say(text: str) -> None:
    """Prints for whoever watches."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, the first one aligned to the left."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def median(values: Iterable[float]) -> float:
    """The median. Raises statistics.StatisticsError where there are no values."""
    return float(statistics.median(values))


def machine() -> dict[str, Any]:
    """The machine as far as it decides how fast things are."""
    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.processor()),
        "usable_cpus": sorted(os.sched_getaffinity(0)),
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes("MemTotal"),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "system": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()),
    }


def describe_machine() -> str:
    """The same in one line."""
    found = machine()
    return (
        f"{found['cpu']}, {len(found['usable_cpus'])} of {found['cpus']} CPUs, "
        f"{found['memory_bytes'] / 2**30:.0f} GiB, {' '.join(found['instruction_sets'])}"
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that take part."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def memory_bytes(name: str) -> int:
    """An entry of /proc/meminfo, such as MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    raise KeyError(f"/proc/meminfo has no {name}")


def _cpu_info() -> dict[str, str]:
    """The entry of the first CPU in /proc/cpuinfo."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
