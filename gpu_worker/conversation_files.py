"""Conversations on the disk: checkpoints that had to leave memory, or were there when the process ended.

A file has a header (msgpack: the token ids, and what the arrays behind it are) and the arrays as they lie in
memory, each with a checksum. Files of a model lie in a folder that is named by the model and by all that
changes what is computed, so that none is ever read by another. Writing and reading are done by a thread of
their own; the engine's thread looks for what has come.
"""

import contextlib
import logging
import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shared.errors import ConfigError

_log = logging.getLogger(__name__)

TokenIds = NDArray[np.int32]
Arrays = dict[str, NDArray[np.generic]]

_MAGIC = b"strata conversation 1\n"
_SUFFIX, _PARTIAL = ".conversation", ".partial"
# Checkpoints that wait to be written, at most: they are in memory meanwhile. More are dropped.
_MAX_WAITING = 4
_MAX_HEADER = 64 << 20


class _Array(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class _Header(msgspec.Struct, frozen=True):
    salt: str
    token_ids: bytes
    num_pending: int
    arrays: list[_Array]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as it is on the disk: of a sequence that begins with these tokens, with `num_pending` of
    them pending."""

    salt: str
    token_ids: TokenIds
    num_pending: int
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Leaving:
    """A checkpoint that is to be written: `arrays` gives what it consists of, called by the thread that
    writes."""

    salt: str
    token_ids: TokenIds
    num_pending: int
    arrays: Callable[[], Arrays]


@dataclass(frozen=True, slots=True)
class _File:
    """One that is there."""

    path: Path
    salt: str
    token_ids: TokenIds
    num_bytes: int


class ConversationFiles:
    """The files of one model in a folder. All but the thread's own methods are for one thread."""

    def __init__(self, folder: Path, identity: str, max_bytes: int) -> None:
        """`identity` names the model and what changes its computation; files take `max_bytes` at most. Raises
        ConfigError where the folder cannot be used."""
        self._folder = folder / blake2b(identity.encode(), digest_size=12).hexdigest()
        self._max_bytes = max_bytes
        try:
            # They are what people have said.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._folder / f".{os.getpid()}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--conversation-cache-dir: {folder} cannot be used: {error.strerror}; name another folder"
            ) from None
        self._files: list[_File] = list(self._present())
        self._lock = threading.Lock()
        self._make_room(0)
        # Being read, and in memory meanwhile.
        self._coming: set[Path] = set()
        self._in_memory: set[Path] = set()
        self._work: queue.Queue[Leaving | _File | None] = queue.Queue()
        self._num_waiting = 0
        self._loaded: deque[Saved] = deque()
        # What the thread is done with: pages have to be given up by the thread that uses them.
        self._written: deque[Leaving] = deque()
        self._thread = threading.Thread(target=self._serve, name="conversation files", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        with self._lock:
            return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return sum(file.num_bytes for file in self._files)

    def save(self, leaving: Leaving, *, is_last: bool = False) -> None:
        """Has a checkpoint written that leaves memory, unless too many wait for that already and it is not
        one of the last."""
        with self._lock:
            self._in_memory.discard(self._path(leaving.salt, leaving.token_ids))
            if self._num_waiting >= _MAX_WAITING and not is_last:
                return
            self._num_waiting += 1
        self._work.put(leaving)

    def is_coming(self, prompt: TokenIds, salt: str, longer_than: int, max_bytes: int = 1 << 62) -> bool:
        """Whether the longest beginning of a prompt that is on the disk, in no more than so many bytes, is
        being read, if it is longer than so many tokens; begins that."""
        with self._lock:
            files = [
                file
                for file in self._files
                if file.salt == salt
                and file.path not in self._in_memory
                and file.num_bytes <= max_bytes
                and longer_than < len(file.token_ids) < len(prompt)
                and np.array_equal(prompt[: len(file.token_ids)], file.token_ids)
            ]
            if not files:
                return False
            longest = max(files, key=lambda file: len(file.token_ids))
            if longest.path not in self._coming:
                self._coming.add(longest.path)
                self._work.put(longest)
        return True

    def take_loaded(self) -> Iterator[Saved]:
        """What has been read since the last time. For `is_coming` it is not there any more, until it is saved
        again. To be called now and then: memory of what has been written is given up here."""
        self._written.clear()
        while self._loaded:
            yield self._loaded.popleft()

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        self._work.put(None)
        self._thread.join()
        self._written.clear()

    # The thread.

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if isinstance(work, Leaving):
                    self._write(work)
                else:
                    self._read(work)
            except Exception as error:
                _log.error("a conversation could not be kept on the disk: %s", error)
            finally:
                if isinstance(work, Leaving):
                    self._written.append(work)
                    with self._lock:
                        self._num_waiting -= 1
            del work

    def _path(self, salt: str, token_ids: TokenIds) -> Path:
        name = blake2b(salt.encode() + b"\0" + token_ids.tobytes(), digest_size=16).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"

    def _write(self, saved: Leaving) -> None:
        path = self._path(saved.salt, saved.token_ids)
        arrays = {name: np.ascontiguousarray(array) for name, array in saved.arrays().items()}
        header = msgspec.msgpack.encode(
            _Header(
                saved.salt,
                saved.token_ids.tobytes(),
                saved.num_pending,
                [
                    _Array(name, array.dtype.str, array.shape, zlib.crc32(array.data))
                    for name, array in arrays.items()
                ],
            )
        )
        num_bytes = len(header) + sum(array.nbytes for array in arrays.values())
        if num_bytes > self._max_bytes:
            return
        self._make_room(num_bytes)
        partial = path.with_suffix(f".{os.getpid()}{_PARTIAL}")
        try:
            with open(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(_MAGIC + len(header).to_bytes(8, "little"))
                file.write(header + zlib.crc32(header).to_bytes(4, "little"))
                for array in arrays.values():
                    file.write(array.data)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files = [file for file in self._files if file.path != path]
            self._files.append(_File(path, saved.salt, saved.token_ids, num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        """Removes the files that were not used for the longest time."""
        with self._lock:
            while self._files and sum(f.num_bytes for f in self._files) + num_bytes > self._max_bytes:
                self._files.pop(0).path.unlink(missing_ok=True)

    def _read(self, file: _File) -> None:
        try:
            self._loaded.append(_read_file(file.path))
            # As the one that was used last.
            os.utime(file.path)
            kept = [file]
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("%s is of no use, and is removed: %s", file.path, error)
            file.path.unlink(missing_ok=True)
            kept = []
        with self._lock:
            self._files = [other for other in self._files if other.path != file.path] + kept
            self._in_memory.update(other.path for other in kept)
            self._coming.discard(file.path)

    def _present(self) -> Iterator[_File]:
        """The files that are there, the oldest first; what is none of ours is left alone."""
        found: list[tuple[float, Path]] = []
        for path in self._folder.iterdir():
            # What another process on this folder removes meanwhile is not there.
            with contextlib.suppress(OSError):
                if path.suffix == _PARTIAL and path.is_file() and not _is_being_written(path):
                    path.unlink()
                elif path.suffix == _SUFFIX and path.is_file():
                    found.append((path.stat().st_mtime, path))
        for _, path in sorted(found):
            try:
                with path.open("rb") as file:
                    header = _read_header(file)
                token_ids = np.frombuffer(header.token_ids, np.int32)
                yield _File(path, header.salt, token_ids, path.stat().st_size)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("%s is of no use, and is removed: %s", path, error)
                path.unlink(missing_ok=True)


def _is_being_written(partial: Path) -> bool:
    """Whether the process lives whose number is in its name."""
    pid = partial.stem.rpartition(".")[2]
    return pid.isdigit() and int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()


def _read_header(file: BinaryIO) -> _Header:
    """Of a file at its begin; what follows are the arrays. Raises ValueError and MsgspecError."""
    begin = file.read(len(_MAGIC) + 8)
    if not begin.startswith(_MAGIC) or len(begin) != len(_MAGIC) + 8:
        raise ValueError("it does not begin as a conversation does")
    length = int.from_bytes(begin[len(_MAGIC) :], "little")
    if length > _MAX_HEADER:
        raise ValueError(f"its header has {length} bytes")
    header, checksum = file.read(length), file.read(4)
    if zlib.crc32(header).to_bytes(4, "little") != checksum:
        raise ValueError("its header is damaged")
    return msgspec.msgpack.decode(header, type=_Header)


def _read_file(path: Path) -> Saved:
    """Raises ValueError where it is damaged."""
    with path.open("rb") as file:
        header = _read_header(file)
        arrays: Arrays = {}
        for array in header.arrays:
            raw = file.read(array.num_bytes)
            if len(raw) != array.num_bytes or zlib.crc32(raw) != array.checksum:
                raise ValueError(f"{array.name} is damaged")
            arrays[array.name] = np.frombuffer(raw, array.dtype).reshape(array.shape)
    return Saved(header.salt, np.frombuffer(header.token_ids, np.int32), header.num_pending, arrays)
