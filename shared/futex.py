"""Waiting on a word of shared memory, between processes: Linux's futex.

It costs one system call to wake and one to sleep (10-30 us from the call to the woken side, on the machines
this was measured on), where a message over a socket through an event loop takes 250 us.
"""

import ctypes
import errno
import os
import platform

_NUMBER_OF_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYONE = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
# To wake others takes no time, so the GIL is kept: whoever lets it go may wait long to have it back.
_syscall_with_gil = ctypes.PyDLL(None).syscall
_syscall_with_gil.restype = ctypes.c_long


def _futex_number() -> int:
    try:
        return _NUMBER_OF_FUTEX[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no futex number is known for {platform.machine()}") from None


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleeps while the 32-bit word at `address` equals `expected`, at most `timeout_s`.

    Returns without telling why (woken, changed before, timed out, signal): the caller looks at the word.
    """
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    result = _syscall(
        _futex_number(),
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint32(expected),
        ctypes.byref(timeout),
        None,
        0,
    )
    if result < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def wake(address: int) -> None:
    """Wakes everyone who waits on the word at `address`."""
    _syscall_with_gil(_futex_number(), ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYONE, None, None, 0)
