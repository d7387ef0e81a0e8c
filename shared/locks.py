"""Locks that the kernel releases when their holder dies, however it dies.

They answer the question "does that process still live?" exactly and at once, also between containers that
share a directory, where pids mean nothing. Open-file-description locks are used because they can be *tested*
without being taken (F_OFD_GETLK), so that looking at a lock never disturbs its owner.
"""

import fcntl
import os
import struct
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
    """Whether the file exists and somebody holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)
