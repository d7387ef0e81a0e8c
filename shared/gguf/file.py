"""Reads one GGUF file: its metadata and where its tensors lie. Maps it; copies and decodes no weight.

The reader walks the header in the mapping itself, so opening a file costs its header (a few MB for a
vocabulary of 248,320 tokens), whatever its size. Everything read is checked against the file's length, so a
truncated file is refused here, by name and offset, and not by a bus error later.
"""

import errno
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFileError, UnsupportedModelError
from shared.gguf.types import TensorType, tensor_type
from shared.locked_memory import lock_memory, unlock_memory

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = [1 << bits for bits in range(32)]
_MAX_RANK = 4
_MADV_POPULATE_READ = 22  # not named by Python's mmap before 3.14
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


_LENGTH = struct.Struct("<Q")


class StringArray:
    """An array of strings in the metadata, decoded when it is read: a vocabulary has hundreds of thousands,
    and of the four processes only the gateway wants them."""

    def __init__(self, path: Path, key: str, mapping: mmap.mmap, start: int, count: int) -> None:
        self._path = path
        self._key = key
        self._map = mapping
        self._start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """The strings in order. Raises ModelFileError for one that is not UTF-8."""
        at = self._start
        for _ in range(self._count):
            start = at + 8
            at = start + _LENGTH.unpack_from(self._map, at)[0]
            yield _text(self._map[start:at], self._path, f"an element of {self._key}")


MetadataValue = int | float | bool | str | StringArray | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one file.

    `shape` is in numpy order, rows first; `offset` is absolute in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """How many weights the tensor has."""
        return prod(self.shape)


class GGUFFile:
    """One open GGUF file. Close it, or use it as a context manager; views keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        """Maps `path` and parses its header.

        Raises ModelFileError where the file is missing, unreadable, truncated or malformed, and
        UnsupportedModelError where a tensor has a type unknown to Strata.
        """
        self.path = path
        self._map = _open_mapping(path)
        self._size = len(self._map)
        cursor = _Cursor(path, self._map)
        self.version = _read_version(cursor)
        num_tensors = cursor.count("number of tensors", smallest=24)
        num_metadata = cursor.count("number of metadata entries", smallest=13)
        self.metadata: dict[str, MetadataValue] = {}
        for _ in range(num_metadata):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise ModelFileError(f"{path}: the metadata key {key} is listed twice")
            self.metadata[key] = cursor.value(key)
        self._alignment = self._read_alignment()
        entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
        self.header_bytes = cursor.at
        self._data_start = -(-cursor.at // self._alignment) * self._alignment
        self.tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            info = self._place(*entry)
            if info.name in self.tensors:
                raise ModelFileError(f"{path}: tensor {info.name} is listed twice")
            self.tensors[info.name] = info
        self._check_overlap()

    @property
    def num_bytes(self) -> int:
        """Length of the file in bytes."""
        return self._size

    def header(self) -> bytes:
        """The file up to its tensor data: metadata and the list of tensors."""
        return self._map[: self.header_bytes]

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's encoded bytes as a read-only uint8 view [num_bytes] of the mapping."""
        return np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)

    def pages(self, info: TensorInfo) -> tuple[int, int]:
        """The range of a tensor from the begin of its first page on: where that begins, and its length."""
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        return start, info.offset + info.num_bytes - start

    def will_need(self, start: int, num_bytes: int) -> None:
        """Asks the kernel to read a page-aligned range soon; it does not wait for it."""
        self._map.madvise(mmap.MADV_WILLNEED, start, min(num_bytes, self._size - start))

    def populate(self, start: int, num_bytes: int) -> None:
        """Returns when a page-aligned range is in RAM. Raises OSError where it cannot be read; a kernel that
        does not know how (before 5.14) reads it later."""
        try:
            self._map.madvise(_MADV_POPULATE_READ, start, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def lock(self, start: int, num_bytes: int) -> None:
        """Keeps a page-aligned range in RAM until the file is closed. Raises OSError where that is not
        allowed."""
        lock_memory(np.frombuffer(self._map, np.uint8).ctypes.data + start, num_bytes)

    def unlock(self, start: int, num_bytes: int) -> None:
        """Lets a range be given up again that was locked; nothing happens where it was not."""
        unlock_memory(np.frombuffer(self._map, np.uint8).ctypes.data + start, num_bytes)

    def close(self) -> None:
        """Unmaps the file; views taken from it must be gone (BufferError otherwise)."""
        self._map.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_integer = isinstance(alignment, int) and not isinstance(alignment, bool)
        if is_integer and alignment in _ALIGNMENTS:
            return int(alignment)
        raise ModelFileError(
            f"{self.path}: general.alignment is {alignment!r}, expected a power of two below 2^32"
        )

    def _check_overlap(self) -> None:
        end, before = 0, ""
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise ModelFileError(
                    f"{self.path}: tensors {before} and {info.name} overlap at byte {info.offset}; "
                    "download or copy it again"
                )
            end, before = info.offset + info.num_bytes, info.name

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, relative: int) -> TensorInfo:
        kind = tensor_type(type_id)
        if kind is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has type {type_id}, which this version of Strata does not know"
            )
        if shape[-1] % kind.block_size:
            raise ModelFileError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} weights, "
                f"not a multiple of the {kind.block_size} weights in a block of {kind.name}"
            )
        if relative % self._alignment:
            raise ModelFileError(
                f"{self.path}: tensor {name} begins at byte {relative} of the data, "
                f"not a multiple of the alignment, {self._alignment}"
            )
        num_bytes = kind.row_bytes(shape[-1]) * prod(shape[:-1])
        offset = self._data_start + relative
        if offset + num_bytes > self._size:
            raise ModelFileError(
                f"{self.path}: truncated: tensor {name} needs bytes {offset} to {offset + num_bytes}, "
                f"but the file ends at {self._size}; download or copy it again"
            )
        return TensorInfo(name, shape, kind, offset, num_bytes)


def _open_mapping(path: Path) -> mmap.mmap:
    try:
        # Without O_NONBLOCK, opening a named pipe waits for someone to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such model file") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: not a file; name the .gguf file itself")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; download or copy it again")
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _read_version(cursor: "_Cursor") -> int:
    magic = cursor.take(4, "the magic number")
    if magic != _MAGIC:
        raise ModelFileError(f"{cursor.path}: not a GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
    version = cursor.integer("<I", "the version")
    if version not in _SUPPORTED_VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        if swapped in _SUPPORTED_VERSIONS:
            raise ModelFileError(f"{cursor.path}: the file is big-endian; get or make a little-endian one")
        raise ModelFileError(
            f"{cursor.path}: GGUF version {version} is not supported; convert the model to version "
            f"{_SUPPORTED_VERSIONS[-1]}, little-endian"
        )
    return version


def _read_tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    rank = cursor.integer("<I", f"the rank of {name}")
    if not 1 <= rank <= _MAX_RANK:
        raise ModelFileError(f"{cursor.path}: tensor {name} has rank {rank}, expected 1 to {_MAX_RANK}")
    dimensions = [cursor.integer("<Q", f"the shape of {name}") for _ in range(rank)]
    if min(dimensions) < 1:
        raise ModelFileError(f"{cursor.path}: tensor {name} has an empty dimension: {dimensions}")
    type_id = cursor.integer("<I", f"the type of {name}")
    return name, tuple(reversed(dimensions)), type_id, cursor.integer("<Q", f"the offset of {name}")


def _text(encoded: bytes, path: Path, what: str) -> str:
    try:
        return encoded.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(f"{path}: {what} is not valid UTF-8: {encoded[:40]!r}") from None


class _Cursor:
    """Reads little-endian values from the mapping in order, and refuses to pass its end."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.at = 0
        self._map = mapping
        self._size = len(mapping)

    def take(self, count: int, what: str) -> bytes:
        self._require(count, what)
        start, self.at = self.at, self.at + count
        return self._map[start : self.at]

    def integer(self, layout: str, what: str) -> int:
        width = struct.calcsize(layout)
        self._require(width, what)
        (value,) = struct.unpack_from(layout, self._map, self.at)
        self.at += width
        return int(value)

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of things of at least `smallest` bytes each, so that nonsense is refused early."""
        value = self.integer("<Q", what)
        if value * smallest > self._size:
            raise ModelFileError(
                f"{self.path}: the {what} is {value}, more than the file can hold; "
                "it is truncated or damaged, get it again"
            )
        return value

    def string(self, what: str) -> str:
        length = self.integer("<Q", f"the length of {what}")
        return _text(self.take(length, what), self.path, what)

    def value(self, key: str) -> MetadataValue:
        value_type = self.integer("<I", f"the type of {key}")
        if value_type == _STRING:
            return self.string(key)
        if value_type == _ARRAY:
            return self._array(key)
        item = self._numbers(value_type, 1, key)[0].item()
        assert isinstance(item, int | float)
        return item

    def _array(self, key: str) -> MetadataValue:
        element_type = self.integer("<I", f"the element type of {key}")
        count = self.count(f"length of {key}", smallest=1)
        return (
            self._strings(count, key) if element_type == _STRING else self._numbers(element_type, count, key)
        )

    def _strings(self, count: int, key: str) -> "StringArray":
        # The loop runs half a million times for a large vocabulary: local names, no helper calls.
        mapping, size, at = self._map, self._size, self.at
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > size:
                raise self._truncated(f"an element of {key}", at)
            at += 8 + unpack(mapping, at)[0]
            if at > size:
                raise self._truncated(f"an element of {key}", self.at)
        start, self.at = self.at, at
        return StringArray(self.path, key, mapping, start, count)

    def _numbers(self, value_type: int, count: int, key: str) -> NDArray[np.generic]:
        kind = _SCALARS.get(value_type)
        if kind is None:
            raise ModelFileError(
                f"{self.path}: {key} has the value type {value_type}, which is not supported"
            )
        return np.frombuffer(self.take(count * kind.itemsize, key), kind)

    def _require(self, count: int, what: str) -> None:
        if self.at + count > self._size:
            raise self._truncated(what, self.at)

    def _truncated(self, what: str, at: int) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: truncated: the file ends at byte {self._size}, inside {what} "
            f"(from byte {at}); download or copy it again"
        )
