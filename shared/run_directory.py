"""The run directory of one stack: its sockets, and one lock per role that says who is alive.

::

    RUN_DIR/                 mode 0700, one per stack, so that two stacks on one machine never meet
        gateway.lock         held by the living gateway; holds its incarnation as text
        gateway.sock         its ZeroMQ endpoint
        gateway.url          where it listens for clients
        gpu_worker.lock ...  likewise for every role, the supervisor among them

Whoever wants to know whether a peer lives tests its lock: a killed process has lost it before the signal
returns. `serve` makes a fresh directory and removes it; processes started alone share the user's default one,
or the one that compose mounts.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.errors import ResourceError
from shared.locks import directory_held, is_path_locked, try_lock

# A Unix socket's path may have 107 bytes.
_MAX_DIRECTORY_BYTES = 80
_MAX_ATTEMPTS = 100

LOOK_INTERVAL_S = 0.1
"""How often whoever depends on a role looks whether it lives, in seconds."""


class Role(StrEnum):
    """The parts a process can play in a stack."""

    SUPERVISOR = "supervisor"
    GATEWAY = "gateway"
    GPU_WORKER = "gpu_worker"
    CPU_WORKER = "cpu_worker"
    STAGER = "stager"


_URL_NAME = "gateway.url"
# Locks, sockets, the gateway's address, and logits that are on their way: by their whole names, because the
# directory may be one that a user keeps other things in.
_OUR_NAMES = re.compile(rf"({'|'.join(Role)})\.(lock|sock)|{re.escape(_URL_NAME)}|strata-\w+\.logits")

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
        self._seen: dict[Role, Sighting] = {}
        if self.path.parent == base_directory():
            # Its name can be guessed: someone else may have been there first.
            _make_private(self.path.parent)
        _make_private(self.path)

    @classmethod
    def fresh(cls) -> "RunDirectory":
        """A new directory of a name nobody else has."""
        return cls(base_directory() / f"{os.getpid()}-{secrets.token_hex(2)}")

    def address(self, role: Role) -> str:
        """The ZeroMQ endpoint that a role binds."""
        return f"ipc://{self.path / f'{role}.sock'}"

    @property
    def url_path(self) -> Path:
        """Where the gateway writes the address it listens on, for whoever started it with port 0."""
        return self.path / _URL_NAME

    def lock_path(self, role: Role) -> Path:
        """The file that a role holds locked while it lives."""
        return self.path / f"{role}.lock"

    def look_at(self, role: Role) -> Sighting:
        """Whether a role lives now. Cheap enough to ask ten times a second.

        Where that cannot be found out, for want of file descriptors perhaps, the answer is the last one:
        nobody is given up for dead because this process cannot look.
        """
        path = self.lock_path(role)
        try:
            is_alive = is_path_locked(path)
            incarnation = path.read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            seen = Sighting(is_alive=False, incarnation="")
        except OSError:
            seen = self._seen.get(role, Sighting(is_alive=False, incarnation=""))
        else:
            seen = Sighting(is_alive and incarnation != "", incarnation)
        self._seen[role] = seen
        return seen

    def remove_sockets(self, role: Role) -> None:
        """Removes a role's socket file; its lock file stays, since others may be looking at it."""
        (self.path / f"{role}.sock").unlink(missing_ok=True)

    def remove_if_deserted(self) -> bool:
        """Removes the directory where no role holds its lock any more. True if it is gone."""
        return _remove_if_deserted(self.path)


class RoleLock:
    """The lock a process holds for its role as long as it lives."""

    def __init__(self, directory: RunDirectory, role: Role, incarnation: str) -> None:
        """Raises ResourceError where a living process already has the role in this directory."""
        path = directory.lock_path(role)
        self._descriptor: int | None = None
        while self._descriptor is None:
            try:
                with directory_held(directory.path):
                    self._descriptor = _open_locked(path, incarnation)
            except FileNotFoundError:
                # Whoever left last has just removed the directory.
                _make_private(directory.path)
            except BlockingIOError:
                raise ResourceError(
                    f"{directory.path}: a {role} is already running there; "
                    "stop it, or give this stack its own --run-dir"
                ) from None
            except OSError as error:
                raise ResourceError(
                    f"{path}: the lock cannot be made: {error.strerror}; choose another --run-dir"
                ) from None

    def release(self) -> None:
        """Gives the role up; the next process may take it at once. Does nothing the second time."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sweep_deserted(base: Path | None = None) -> None:
    """Removes run directories whose every process is gone: what kill -9 of a whole stack leaves behind."""
    base = base if base is not None else base_directory()
    with contextlib.suppress(FileNotFoundError):
        if base.stat().st_uid != os.getuid():
            return
        for path in base.iterdir():
            with contextlib.suppress(FileNotFoundError):
                entry = path.lstat()
                if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid():
                    _remove_if_deserted(path)


def _make_private(path: Path) -> None:
    """Makes a directory that is this user's alone, unless it is there."""
    reason = ""
    for _ in range(_MAX_ATTEMPTS):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = path.stat().st_uid
        except OSError as error:
            # It may have been swept away between two of these calls.
            reason = f"cannot be made: {error.strerror}"
        else:
            if owner == os.getuid():
                return
            reason = "belongs to another user"
    raise ResourceError(f"{path}: the run directory {reason}; choose another --run-dir")


def _open_locked(path: Path, incarnation: str) -> int:
    """The descriptor of a lock file that is now ours and says so. Raises BlockingIOError where another
    process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(descriptor):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, incarnation.encode("ascii"), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_ours(path: Path) -> None:
    """Removes what a stack makes in its directory, and the directory if that was all there is in it: a user
    may have named one that holds other things. Raises OSError where those remain."""
    for entry in path.iterdir():
        if _OUR_NAMES.fullmatch(entry.name) and not entry.is_dir():
            entry.unlink(missing_ok=True)
    path.rmdir()


def _remove_if_deserted(path: Path) -> bool:
    try:
        with directory_held(path):
            if any(is_path_locked(path / f"{role}.lock") for role in Role):
                return False
            _remove_ours(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
