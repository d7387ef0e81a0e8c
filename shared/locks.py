"""Locks that the kernel releases when their holder dies, however it dies.

They answer the question "does that process still live?" exactly and at once, also between containers that
share a directory, where pids mean nothing. Open-file-description locks are used because they can be *tested*
without being taken (F_OFD_GETLK), so that looking at a lock never disturbs its owner.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

# struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


def _whole_file(lock_type: int) -> bytes:
    return _FLOCK.pack(lock_type, os.SEEK_SET, 0, 0, 0)


def try_lock(descriptor: int) -> bool:
    """Takes the exclusive lock of an open file, which lasts until the last copy of `descriptor` is closed.

    Returns False where someone else holds it.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(descriptor: int) -> bool:
    """Whether another open file description holds the lock. Takes nothing."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def is_path_locked(path: Path) -> bool:
    """Whether the file exists and somebody holds its lock. Raises OSError where it cannot be looked at."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def directory_held(path: Path) -> Iterator[None]:
    """Keeps everyone else who asks for it out of a directory, for as long as it takes to create or remove
    files there; waits for its turn. Raises FileNotFoundError where the directory is gone by then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Whoever held it before may have removed it, and another one may stand in its place.
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)
