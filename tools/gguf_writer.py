"""Writes GGUF v3 files, whole or split: what the demo model, the tests and the benchmarks are made with.

The writer of the `gguf` package would do but for two things: it cannot name tensor type 42 (Q2_0), and
it wants every tensor in memory, while a benchmark slice streams tens of gigabytes.

Layout of one file (all little-endian)::

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:  key string | value type u32 | value
    tensors:   name string | rank u32 | dimensions u64[rank], fastest first | type u32 | offset u64
    padding to the alignment, then each tensor's bytes, each padded to the alignment
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from shared.gguf.types import tensor_type_named

Write = Callable[[bytes], int]
TensorData = bytes | Callable[[Write], None]

ALIGNMENT = 32


class ValueType(IntEnum):
    """Type tags of metadata values, as the GGUF specification numbers them."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALAR_FORMATS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value_type: ValueType, value: object) -> bytes:
    if value_type is ValueType.STRING:
        return _string(str(value))
    return struct.pack(_SCALAR_FORMATS[value_type], value)


class GGUFWriter:
    """Collects metadata and tensors, then writes them with `write` or `write_split`."""

    def __init__(self) -> None:
        self._metadata: list[tuple[str, bytes]] = []
        self._tensors: list[tuple[str, int, tuple[int, ...], int, TensorData]] = []

    def add(self, key: str, value_type: ValueType, value: object) -> None:
        """One scalar or string."""
        self._metadata.append((key, struct.pack("<I", value_type) + _value(value_type, value)))

    def add_array(self, key: str, element_type: ValueType, values: Sequence[object]) -> None:
        """One array of scalars or strings."""
        head = struct.pack("<IIQ", ValueType.ARRAY, element_type, len(values))
        self._metadata.append((key, head + b"".join(_value(element_type, v) for v in values)))

    def add_tensor(self, name: str, type_name: str, shape: Sequence[int], data: TensorData) -> None:
        """`shape` in numpy order (rows first); `data` is the encoded bytes, or a function that streams
        them through the `write` it is given.

        Raises ValueError where the row width is not a whole number of blocks or the bytes do not fit.
        """
        tensor_type = tensor_type_named(type_name)
        num_weights = 1
        for extent in shape:
            num_weights *= extent
        if shape[-1] % tensor_type.block_size:
            raise ValueError(f"{name}: rows of {shape[-1]} weights do not divide into {type_name} blocks")
        num_bytes = num_weights // tensor_type.block_size * tensor_type.block_bytes
        if isinstance(data, bytes) and len(data) != num_bytes:
            raise ValueError(f"{name}: {len(data)} bytes given, {num_bytes} expected")
        self._tensors.append((name, tensor_type.type_id, tuple(shape), num_bytes, data))

    def write(self, path: Path) -> list[Path]:
        """Writes everything into one file."""
        self._write_file(path, self._metadata, self._tensors)
        return [path]

    def write_split(self, path: Path, in_second_part: Callable[[str], bool]) -> list[Path]:
        """Writes two parts named NAME-0000i-of-00002.gguf; tensors whose name `in_second_part` go there."""
        first = [t for t in self._tensors if not in_second_part(t[0])]
        second = [t for t in self._tensors if in_second_part(t[0])]
        parts = []
        for number, tensors in enumerate((first, second)):
            part_path = path.with_name(f"{path.stem}-{number + 1:05d}-of-00002.gguf")
            split = [
                ("split.no", struct.pack("<IH", ValueType.UINT16, number)),
                ("split.count", struct.pack("<IH", ValueType.UINT16, 2)),
                ("split.tensors.count", struct.pack("<Ii", ValueType.INT32, len(self._tensors))),
            ]
            self._write_file(part_path, [*(self._metadata if number == 0 else []), *split], tensors)
            parts.append(part_path)
        return parts

    @staticmethod
    def _write_file(
        path: Path,
        metadata: list[tuple[str, bytes]],
        tensors: list[tuple[str, int, tuple[int, ...], int, TensorData]],
    ) -> None:
        with path.open("wb") as file:
            file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
            for key, encoded in metadata:
                file.write(_string(key) + encoded)
            offset = 0
            for name, type_id, shape, num_bytes, _ in tensors:
                file.write(_string(name) + struct.pack("<I", len(shape)))
                file.write(struct.pack(f"<{len(shape)}Q", *reversed(shape)))
                file.write(struct.pack("<IQ", type_id, offset))
                offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            _pad(file)
            for name, _, _, num_bytes, data in tensors:
                start = file.tell()
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    data(file.write)
                if file.tell() - start != num_bytes:
                    raise ValueError(f"{name}: streamed {file.tell() - start} bytes, {num_bytes} expected")
                _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
