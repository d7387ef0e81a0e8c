"""Shared-memory segments for tensors: who makes them, how others find them, how nothing is left behind.

A segment is a file in /dev/shm that holds named arrays at fixed places::

    | header, one page: magic, layout digest, length | array | array | ...      each array on 64 bytes

One process makes a segment and unlinks it; others attach by the descriptor they are sent. The maker holds a
lock on the file as long as it lives, and the file gets its name only once it is locked and filled with zeros.
So a segment whose lock is free belongs to nobody any more, and `sweep_segments` may remove it: that is what
becomes of the memory of a process that was killed.
"""

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shared.errors import ProtocolError, ResourceError
from shared.locks import is_path_locked, try_lock

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "strata-"

_MAGIC = b"STRATA01"
_HEADER = struct.Struct("<8s16sQ")
_HEADER_BYTES = mmap.PAGESIZE
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SegmentDescriptor:
    """What a peer needs to attach: the name in /dev/shm and the length to expect."""

    name: str
    num_bytes: int


class SegmentLayout:
    """Named arrays and their places. Both sides build it from the same numbers and compare digests."""

    def __init__(self, arrays: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]) -> None:
        self._places: dict[str, tuple[np.dtype[np.generic], tuple[int, ...], int]] = {}
        at = _HEADER_BYTES
        digest = hashlib.blake2b(digest_size=16)
        for name, (dtype, shape) in arrays.items():
            kind = np.dtype(dtype)
            self._places[name] = (kind, shape, at)
            digest.update(f"{name}|{kind.str}|{shape}|{at};".encode())
            at += -(-kind.itemsize * prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        self.digest = digest.digest()

    def offset(self, name: str) -> int:
        """Where an array starts in the segment, in bytes."""
        return self._places[name][2]

    def views(self, buffer: mmap.mmap) -> dict[str, NDArray[np.generic]]:
        """The arrays as writable views of a mapped segment."""
        return {
            name: np.frombuffer(buffer, dtype, prod(shape), at).reshape(shape)
            for name, (dtype, shape, at) in self._places.items()
        }


class Segment:
    """A mapped segment and its arrays. Made by `create` in its owner, by `attach` elsewhere."""

    def __init__(self, name: str, layout: SegmentLayout, mapping: mmap.mmap, descriptor: int | None) -> None:
        self.name = name
        self.layout = layout
        self.arrays = layout.views(mapping)
        self._mapping = mapping
        self._owner_descriptor = descriptor

    @classmethod
    def create(cls, purpose: str, owner_incarnation: str, layout: SegmentLayout) -> "Segment":
        """Makes a segment filled with zeros. Raises ResourceError where shared memory does not suffice.

        The pages are reserved here: a segment larger than what /dev/shm has left would otherwise be made
        without complaint and kill its first writer with a bus error.
        """
        name = f"{SEGMENT_PREFIX}{purpose}-{owner_incarnation}"
        try:
            descriptor = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Nobody else can have this file open; a refusal is a limit of the file system.
                if not try_lock(descriptor):
                    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
                os.posix_fallocate(descriptor, 0, layout.num_bytes)
                os.pwrite(descriptor, _HEADER.pack(_MAGIC, layout.digest, layout.num_bytes), 0)
                mapping = mmap.mmap(descriptor, layout.num_bytes)
                _give_name(descriptor, name)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise _not_made(name, layout.num_bytes, error) from None
        return cls(name, layout, mapping, descriptor)

    @classmethod
    def attach(cls, described: SegmentDescriptor, layout: SegmentLayout) -> "Segment":
        """Maps a peer's segment. Raises ProtocolError where it is gone or laid out in another way."""
        path = SHARED_MEMORY / described.name
        if not described.name.startswith(SEGMENT_PREFIX) or "/" in described.name:
            raise ProtocolError(f"{described.name!r} is not the name of a segment")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if described.num_bytes != layout.num_bytes or not _has_header(descriptor, layout):
                    raise ProtocolError(
                        f"{path}: the segment has another layout; are both sides the same version?"
                    )
                mapping = mmap.mmap(descriptor, layout.num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ProtocolError(f"{path}: the segment cannot be opened: {error.strerror}") from None
        return cls(described.name, layout, mapping, None)

    @property
    def descriptor(self) -> SegmentDescriptor:
        """What to send to a peer so that it can attach."""
        return SegmentDescriptor(self.name, self.layout.num_bytes)

    def address(self, array: str, byte: int = 0) -> int:
        """The memory address of a byte of an array, for system calls that wait on it."""
        anchor = ctypes.c_char.from_buffer(self._mapping, self.layout.offset(array) + byte)
        return ctypes.addressof(anchor)

    def close(self) -> None:
        """Lets go of the segment; the owner also removes its name.

        Views may still be held by a thread that is on its way out. Their pages then live as long as they do;
        the name, which is what would be left behind, goes now.
        """
        if self._owner_descriptor is not None:
            (SHARED_MEMORY / self.name).unlink(missing_ok=True)
            os.close(self._owner_descriptor)
            self._owner_descriptor = None
        self.arrays = {}


def _give_name(descriptor: int, name: str) -> None:
    """Links an unnamed file into /dev/shm. Only the form with a directory's descriptor makes os.link follow
    the link in /proc to the file itself."""
    directory = os.open(SHARED_MEMORY, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _has_header(descriptor: int, layout: SegmentLayout) -> bool:
    expected = _HEADER.pack(_MAGIC, layout.digest, layout.num_bytes)
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _HEADER.size, 0) == expected and size >= layout.num_bytes


def _not_made(name: str, num_bytes: int, error: OSError) -> ResourceError:
    if error.errno != errno.ENOSPC:
        return ResourceError(f"{SHARED_MEMORY / name}: shared memory cannot be made: {error.strerror}")
    return ResourceError(
        f"{SHARED_MEMORY}: no room for {num_bytes / 2**20:.0f} MiB of shared memory, "
        f"{free_shared_memory() / 2**20:.0f} MiB are free; enlarge it (docker: shm_size), or lower --prefill"
    )


def free_shared_memory() -> int:
    """Bytes that new segments can take."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def sweep_segments() -> list[str]:
    """Removes segments of this user whose owner is gone, and returns their names."""
    removed = []
    for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*"):
        # What cannot be looked at is left alone, and so is what only has a name like ours.
        with contextlib.suppress(OSError):
            if _is_our_segment(path) and not is_path_locked(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _is_our_segment(path: Path) -> bool:
    entry = path.lstat()
    if not stat.S_ISREG(entry.st_mode) or entry.st_uid != os.getuid():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
