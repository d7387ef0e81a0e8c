"""Little memory and a slow disk, for the processes started in it: a control group of version 1 or 2.

Version 1 has a directory for each controller, version 2 one for all. The page cache that processes fill
counts against their group: pages that somebody else has brought into memory do not, so they have to be
dropped first.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from benchmarks.report import BenchmarkError

CGROUP_ROOT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT_S = 10.0


class CgroupError(BenchmarkError):
    """There can be no such group here; the text says why."""


class MemoryGroup:
    """A group that is there within the `with` block. Leaving kills what is left in it and removes it."""

    def __init__(
        self,
        name: str,
        limit_bytes: int,
        read_iops: int | None = None,
        device: str | None = None,
        root: Path = CGROUP_ROOT,
    ) -> None:
        """`read_iops`: reads a second that are let through to `device`, `major:minor` of a disk. Raises
        CgroupError where the system has no group for memory."""
        self._limit_bytes = limit_bytes
        self._iops = (device, read_iops) if read_iops is not None else None
        if read_iops is not None and device is None:
            raise CgroupError("the file lies on no disk whose reads could be limited")
        self.version = cgroup_version(root)
        self._root = root
        if self.version == 2:
            self._memory = self._blocks = root / name
        else:
            self._memory, self._blocks = root / "memory" / name, root / "blkio" / name

    @property
    def procs(self) -> list[Path]:
        """Files that a process writes itself into to be in the group."""
        return [directory / "cgroup.procs" for directory in self._directories()]

    def __enter__(self) -> "MemoryGroup":
        try:
            self._make()
        except OSError as error:
            self._remove()
            raise CgroupError(
                f"no control group can be made: {error}; that takes root, and in a container a writable "
                f"{self._root} (docker run --privileged --cgroupns=host)"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def oom_kills(self) -> int:
        """How many processes were killed since there was no memory left for them."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        lines = (self._memory / name).read_text().splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts.get("oom_kill", 0))

    def peak_bytes(self) -> int | None:
        """The most memory that was in use, page cache included; None where the kernel does not say."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        with contextlib.suppress(OSError):
            return int((self._memory / name).read_text())
        return None

    def _directories(self) -> list[Path]:
        return [self._memory, self._blocks] if self.version == 1 and self._iops else [self._memory]

    def _make(self) -> None:
        if self.version == 2:
            wanted = "+memory +io" if self._iops else "+memory"
            (self._root / "cgroup.subtree_control").write_text(wanted)
        for directory in self._directories():
            directory.mkdir()
        if self.version == 2:
            (self._memory / "memory.max").write_text(str(self._limit_bytes))
            # What is swapped out would be no less needed.
            with contextlib.suppress(OSError):
                (self._memory / "memory.swap.max").write_text("0")
            if self._iops:
                (self._memory / "io.max").write_text("{} riops={}".format(*self._iops))
            return
        (self._memory / "memory.limit_in_bytes").write_text(str(self._limit_bytes))
        with contextlib.suppress(OSError):
            (self._memory / "memory.swappiness").write_text("0")
        if self._iops:
            (self._blocks / "blkio.throttle.read_iops_device").write_text("{} {}".format(*self._iops))

    def _remove(self) -> None:
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        for directory in dict.fromkeys((self._memory, self._blocks)):
            while directory.is_dir():
                try:
                    directory.rmdir()
                except OSError:
                    # Whoever is in it was started by its user here.
                    for pid in _members(directory):
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGKILL)
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.05)


class SlowDisk:
    """Within the `with` block this process, and what it starts, reads no more than so many times a second
    from a disk. Of version 1 or 2, as above."""

    def __init__(self, name: str, read_iops: int, device: str | None, root: Path = CGROUP_ROOT) -> None:
        """`device` is `major:minor` of the disk. Raises CgroupError where that is None."""
        if device is None:
            raise CgroupError("the file lies on no disk whose reads could be limited")
        self._limit = f"{device} {read_iops}", f"{device} riops={read_iops}"
        self._root = root
        is_unified = (root / "cgroup.controllers").exists()
        self._parent = root if is_unified else root / "blkio"
        self._is_unified = is_unified
        self._home = self._parent / name

    def __enter__(self) -> "SlowDisk":
        try:
            if self._is_unified:
                (self._root / "cgroup.subtree_control").write_text("+io")
            self._home.mkdir()
            name = "io.max" if self._is_unified else "blkio.throttle.read_iops_device"
            (self._home / name).write_text(self._limit[self._is_unified])
            (self._home / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            self._leave()
            raise CgroupError(f"no control group for a slow disk can be made: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._home.is_dir():
            return
        with contextlib.suppress(OSError):
            for pid in _members(self._home):
                (self._parent / "cgroup.procs").write_text(str(pid))
            self._home.rmdir()


def cgroup_version(root: Path) -> int:
    """The version that controls memory here. Raises CgroupError where none does."""
    with contextlib.suppress(OSError):
        if "memory" in (root / "cgroup.controllers").read_text().split():
            return 2
    if (root / "memory" / "memory.limit_in_bytes").exists():
        return 1
    raise CgroupError(f"{root} has no control groups for memory, neither of version 1 nor of version 2")


def _members(directory: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    return []
