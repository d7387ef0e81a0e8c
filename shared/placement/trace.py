"""A routing trace: which experts each token chose, step by step, in a file that `strata simulate` replays.

::

    file:    magic | header record | step record | step record | ...
    record:  payload bytes u32 | CRC-32 of the payload u32 | payload
    header:  msgpack: model, num_layers, num_experts, fingerprint, num_used
    step:    num_tokens u32 | num_prefill_tokens u32 | zlib of expert ids u16 [layers, tokens, num_used]

Numbers are little-endian; 65535 stands for no expert. A record is one write, so a process that is killed
leaves whole records.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from shared.errors import TraceFileError
from shared.placement.profile import ModelIdentity

_MAGIC = b"STRATA-ROUTING-1"
_RECORD = struct.Struct("<II")
_STEP = struct.Struct("<II")
_NOBODY = 0xFFFF
# Of a header, and of a step: larger is garbage, and shall not be allocated.
_MOST_HEADER_BYTES, _MOST_IDS_BYTES = 1 << 16, 1 << 30
_COMPRESSION = 1  # A step of decoding is written in 0.1 ms.


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Whose routes they are."""

    model: str
    num_layers: int
    num_experts: int
    fingerprint: str
    num_used: int

    @classmethod
    def of(cls, identity: ModelIdentity, num_used: int) -> "TraceHeader":
        """`num_used`: experts that a token uses in a layer."""
        return cls(**asdict(identity), num_used=num_used)

    @property
    def identity(self) -> ModelIdentity:
        """The model, as profiles name it."""
        return ModelIdentity(self.model, self.num_layers, self.num_experts, self.fingerprint)


@dataclass(frozen=True, slots=True)
class TraceStep:
    """The routes of one step: int32 [layers, tokens, num_used], best first, negative for none; and how many
    of its tokens are of prompts."""

    expert_ids: NDArray[np.int32]
    num_prefill_tokens: int

    @property
    def num_tokens(self) -> int:
        """All of the step."""
        return int(self.expert_ids.shape[1])


class TraceWriter:
    """Writes a trace, over what was there."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Raises OSError where the file cannot be written, ValueError for more experts than can be told."""
        if header.num_experts > _NOBODY:
            raise ValueError(f"{header.num_experts} experts; a trace can tell {_NOBODY} apart")
        self.path = path
        self._header = header
        self._file = path.open("wb", buffering=0)
        try:
            self._write_whole(_MAGIC)
            self._write(msgpack.packb(asdict(header)))
        except BaseException:
            self._file.close()
            raise

    def append(self, expert_ids: NDArray[np.int32], num_prefill_tokens: int) -> None:
        """One step: int32 [layers, tokens, num_used]. Raises OSError, such as for a disk that is full, and
        ValueError for another shape."""
        header = self._header
        num_tokens = expert_ids.shape[1]
        if expert_ids.shape != (header.num_layers, num_tokens, header.num_used):
            raise ValueError(
                f"routes of {expert_ids.shape}; they are of {header.num_layers} layers and {header.num_used} "
                "experts a token"
            )
        ids = np.where(expert_ids < 0, _NOBODY, expert_ids).astype("<u2")
        packed = zlib.compress(ids.tobytes(), _COMPRESSION)
        self._write(_STEP.pack(num_tokens, num_prefill_tokens) + packed)

    @property
    def num_layers(self) -> int:
        """Whose routes a step has."""
        return self._header.num_layers

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be appended any more."""
        return self._file.closed

    def close(self) -> None:
        """Nothing is left to be written; may be called twice."""
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, payload: bytes) -> None:
        self._write_whole(_RECORD.pack(len(payload), zlib.crc32(payload)) + payload)

    def _write_whole(self, content: bytes) -> None:
        start = self._file.tell()
        if self._file.write(content) != len(content):
            # A disk that is nearly full takes a part of it without a word.
            self._file.truncate(start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TraceReader:
    """Reads a trace. Every error names the file, and the place in it."""

    def __init__(self, path: Path) -> None:
        """Raises TraceFileError for what cannot be read, or is no trace."""
        self.path = path
        try:
            self._file = path.open("rb")
            self.num_bytes = path.stat().st_size
        except OSError as error:
            raise TraceFileError(f"the trace {path} cannot be read: {error.strerror}") from None
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        if self._read(len(_MAGIC)) != _MAGIC:
            raise TraceFileError(f"{self.path} is no routing trace that this version reads")
        self.header = self._read_header()
        self._first_step = self.position

    @property
    def position(self) -> int:
        """How many bytes have been read, of `num_bytes`."""
        return self._file.tell()

    def __iter__(self) -> Iterator[TraceStep]:
        """The steps, from the first one. Raises TraceFileError for the first one that is cut or corrupt."""
        self._file.seek(self._first_step)
        number = 0
        while (start := self.position) < self.num_bytes:
            try:
                yield self._read_step()
            except _Damage as damage:
                raise TraceFileError(
                    f"{self.path}: the step at offset {start} is damaged: {damage}; the {number} steps "
                    f"before it can be had by cutting the file to {start} bytes"
                ) from None
            number += 1

    def close(self) -> None:
        """May be called twice."""
        self._file.close()

    def __enter__(self) -> "TraceReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, num_bytes: int) -> bytes:
        try:
            return self._file.read(num_bytes)
        except OSError as error:
            raise TraceFileError(f"the trace {self.path} cannot be read: {error.strerror}") from None

    def _read_record(self, most_bytes: int) -> bytes:
        prefix = self._read(_RECORD.size)
        if len(prefix) < _RECORD.size:
            raise _Damage("the file ends within it")
        num_bytes, checksum = _RECORD.unpack(prefix)
        if num_bytes > most_bytes:
            raise _Damage(f"it is said to be of {num_bytes} bytes")
        if num_bytes > self.num_bytes - self.position:
            raise _Damage(f"the file ends within it, {num_bytes} bytes should follow")
        payload = self._read(num_bytes)
        if len(payload) < num_bytes or zlib.crc32(payload) != checksum:
            raise _Damage("its checksum is wrong")
        return payload

    def _read_header(self) -> TraceHeader:
        try:
            content: Any = msgpack.unpackb(self._read_record(_MOST_HEADER_BYTES))
            header = TraceHeader(**content)
        except (_Damage, TypeError, ValueError, msgpack.UnpackException) as error:
            raise TraceFileError(
                f"{self.path}: the header at offset {len(_MAGIC)} is damaged: {error}"
            ) from None
        numbers = (header.num_layers, header.num_experts, header.num_used)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise TraceFileError(f"{self.path}: the header is of {numbers} layers, experts and used experts")
        return header

    def _read_step(self) -> TraceStep:
        header = self.header
        payload = self._read_record(_MOST_IDS_BYTES)
        if len(payload) < _STEP.size:
            raise _Damage("it is too short")
        num_tokens, num_prefill_tokens = _STEP.unpack_from(payload)
        shape = (header.num_layers, num_tokens, header.num_used)
        num_bytes = 2 * header.num_layers * num_tokens * header.num_used
        if not 0 < num_bytes <= _MOST_IDS_BYTES or num_prefill_tokens > num_tokens:
            raise _Damage(f"it is said to be of {num_tokens} tokens, {num_prefill_tokens} of prompts")
        unpacker = zlib.decompressobj()
        try:
            unpacked = unpacker.decompress(payload[_STEP.size :], num_bytes + 1)
        except zlib.error as error:
            raise _Damage(f"its routes cannot be unpacked: {error}") from None
        if len(unpacked) != num_bytes:
            raise _Damage(f"it has not the routes of {num_tokens} tokens")
        ids = np.frombuffer(unpacked, "<u2").reshape(shape).astype(np.int32)
        ids[ids == _NOBODY] = -1
        if ids.max(initial=-1) >= header.num_experts:
            raise _Damage(f"it has expert {ids.max()}, there are {header.num_experts}")
        return TraceStep(ids, num_prefill_tokens)


class _Damage(Exception):
    """What is wrong with a record."""
