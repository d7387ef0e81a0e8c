"""The run directory of one stack: its sockets, and one lock per role that says who is alive.

::

    RUN_DIR/                 mode 0700, one per stack, so that two stacks on one machine never meet
        gateway.lock         held by the living gateway; holds its incarnation as text
        gateway.sock         its ZeroMQ endpoint
        gpu_worker.lock ...  likewise for every role, the supervisor among them

Whoever wants to know whether a peer lives tests its lock: a killed process has lost it before the signal
returns. `serve` makes a fresh directory and removes it; processes started alone share the user's default one,
or the one that compose mounts.
"""

import os
import secrets
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.errors import ResourceError
from shared.locks import is_path_locked, try_lock

# A Unix socket's path may have 107 bytes.
_MAX_DIRECTORY_BYTES = 80
_SWEEP_AGE_S = 10.0


class Role(StrEnum):
    """The parts a process can play in a stack."""

    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"
    GPU_WORKER = "gpu_worker"
    CPU_WORKER = "cpu_worker"
    STAGER = "stager"


WORKER_ROLES = (Role.GPU_WORKER, Role.CPU_WORKER, Role.STAGER)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a role's lock says: whether its holder lives, and which incarnation holds or held it."""

    is_alive: bool
    incarnation: str


def new_incarnation() -> str:
    """An id for one start of one process: tells a peer's words from those of its dead predecessor."""
    return secrets.token_hex(4)


def base_directory() -> Path:
    """Where this user's run directories lie."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and len(os.fsencode(runtime)) < _MAX_DIRECTORY_BYTES // 2:
        return Path(runtime) / "strata"
    return Path(tempfile.gettempdir()) / f"strata-{os.getuid()}"


class RunDirectory:
    """Paths, locks and clean-up of one run directory."""

    def __init__(self, path: Path | None) -> None:
        """Makes the directory if it is not there. None is the default one for processes started alone.

        Raises ResourceError where it cannot be made, belongs to someone else, or has too long a path.
        """
        self.path = (path if path is not None else base_directory() / "default").absolute()
        if len(os.fsencode(self.path)) > _MAX_DIRECTORY_BYTES:
            raise ResourceError(
                f"{self.path}: the run directory's path has {len(os.fsencode(self.path))} bytes, "
                f"the limit for sockets is {_MAX_DIRECTORY_BYTES}; choose a shorter --run-dir"
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            owner = self.path.stat()
        except OSError as error:
            raise ResourceError(f"{self.path}: the run directory cannot be made: {error.strerror}") from None
        if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
            raise ResourceError(
                f"{self.path}: the run directory belongs to another user; choose another --run-dir"
            )

    @classmethod
    def fresh(cls) -> "RunDirectory":
        """A new directory of a name nobody else has."""
        return cls(base_directory() / f"{os.getpid()}-{secrets.token_hex(2)}")

    def address(self, role: Role) -> str:
        """The ZeroMQ endpoint that a role binds."""
        return f"ipc://{self.path / f'{role}.sock'}"

    def lock_path(self, role: Role) -> Path:
        """The file that a role holds locked while it lives."""
        return self.path / f"{role}.lock"

    def look_at(self, role: Role) -> Sighting:
        """Whether a role lives now. Cheap enough to ask ten times a second."""
        path = self.lock_path(role)
        is_alive = is_path_locked(path)
        try:
            incarnation = path.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            incarnation = ""
        return Sighting(is_alive and incarnation != "", incarnation)

    def remove_sockets(self, role: Role) -> None:
        """Removes a role's socket file; its lock file stays, since others may be looking at it."""
        (self.path / f"{role}.sock").unlink(missing_ok=True)

    def remove_if_deserted(self) -> bool:
        """Removes the directory where no role holds its lock any more. True if it is gone."""
        if any(is_path_locked(self.lock_path(role)) for role in Role):
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return True


class RoleLock:
    """The lock a process holds for its role as long as it lives."""

    def __init__(self, directory: RunDirectory, role: Role, incarnation: str) -> None:
        """Raises ResourceError where a living process already has the role in this directory."""
        path = directory.lock_path(role)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(self._descriptor):
            os.close(self._descriptor)
            raise ResourceError(
                f"{directory.path}: a {role} is already running there; "
                "stop it, or give this stack its own --run-dir"
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, incarnation.encode("ascii"), 0)

    def release(self) -> None:
        """Gives the role up; the next process may take it at once."""
        os.close(self._descriptor)


def sweep_deserted(base: Path | None = None) -> None:
    """Removes run directories whose every process is gone: what kill -9 of a whole stack leaves behind."""
    base = base if base is not None else base_directory()
    if not base.is_dir():
        return
    for path in base.iterdir():
        # A directory just made may be one whose owner has not taken its lock yet.
        is_settled = time.time() - path.stat().st_mtime > _SWEEP_AGE_S
        if is_settled and path.is_dir() and path.stat().st_uid == os.getuid():
            RunDirectory(path).remove_if_deserted()
