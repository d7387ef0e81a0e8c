"""Keeping memory in RAM, and what to say where that is not allowed."""

import ctypes
import errno
import os
import resource
from pathlib import Path

from shared.errors import ResourceError

_CAP_IPC_LOCK = 14

_libc = ctypes.CDLL(None, use_errno=True)


def lock_memory(address: int, num_bytes: int) -> None:
    """Brings pages into RAM and keeps them there as long as they are mapped. Whole pages: of the first and
    last one what lies beside the range too. Raises OSError where that is not allowed, or they cannot be
    read."""
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def unlock_memory(address: int, num_bytes: int) -> None:
    """Undoes `lock_memory`, as far as it was done."""
    _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


def may_lock(num_bytes: int, status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process may lock so much: by its limit, or because it is privileged (CAP_IPC_LOCK)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or num_bytes <= limit:
        return True
    capabilities = next(
        (line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")), "0"
    )
    return bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)


def not_permitted() -> OSError:
    """What locking would fail with, where `may_lock` says no."""
    return PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def resident_refusal(num_bytes: int, error: OSError) -> ResourceError:
    """Why the experts that were to be resident cannot be locked."""
    return ResourceError(f"--experts resident: {lock_refusal(num_bytes, error)}, or take --experts auto")


def lock_refusal(num_bytes: int, error: OSError) -> str:
    """Why that many bytes could not be locked, and what to do about it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
    return (
        f"{num_bytes / 2**30:.2f} GiB cannot be locked in RAM ({error.strerror}); the limit of locked memory "
        f"(RLIMIT_MEMLOCK) is {allowed}: raise it (ulimit -l unlimited; docker: ulimits: memlock: -1)"
    )
