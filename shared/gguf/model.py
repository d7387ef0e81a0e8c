"""A model as its user names it: one GGUF file, or any one part of a split set, opened as a whole.

Split sets are named NAME-00001-of-0000N.gguf; each part is a full GGUF file with its own header and tensor
list, and part 1 carries the metadata.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFileError
from shared.gguf.file import GGUFFile, MetadataValue, TensorInfo

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUFModel:
    """All parts of one model, read-only. Tensors are found by name, wherever they lie. `path` is what the
    user has named."""

    def __init__(self, path: Path) -> None:
        """Opens every part. Raises ModelFileError naming the part that is missing or does not belong."""
        self.path = path
        self.parts = [GGUFFile(part) for part in part_paths(path)]
        self.metadata: dict[str, MetadataValue] = self.parts[0].metadata
        self._home: dict[str, GGUFFile] = {}
        self._check_split()
        for part in self.parts:
            for name in part.tensors:
                if name in self._home:
                    raise ModelFileError(f"{part.path}: tensor {name} is also in {self._home[name].path}")
                self._home[name] = part
        self._check_count()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies and what it is. Raises KeyError where there is none of that name."""
        return self._home[name].tensors[name]

    def home(self, name: str) -> GGUFFile:
        """The part that holds the tensor."""
        return self._home[name]

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The tensor's encoded bytes, uint8 [..., row_bytes], a read-only view of the mapping."""
        part = self._home[name]
        info = part.tensors[name]
        return part.raw(info).reshape(*info.shape[:-1], info.type.row_bytes(info.shape[-1]))

    def join(self, other: "GGUFModel", names: Iterable[str], metadata: Mapping[str, MetadataValue]) -> None:
        """Takes over another model: tensors of those names are this one's from now on, and so are its files.
        The metadata are changed to these. Raises ModelFileError for a tensor that is here already."""
        for name in names:
            part = other.home(name)
            if name in self._home:
                raise ModelFileError(f"{part.path}: tensor {name} is also in {self._home[name].path}")
            self._home[name] = part
        self.parts = [*self.parts, *other.parts]
        self.metadata = {**self.metadata, **metadata}

    @property
    def num_bytes(self) -> int:
        """Length of all parts in bytes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def name(self) -> str:
        """The file's name without what tells parts and format."""
        name = self.path.name
        match = _PART_NAME.fullmatch(name)
        return match["stem"] if match else name.removesuffix(".gguf")

    def fingerprint(self) -> str:
        """A short digest of the headers, that is of all metadata and of every tensor's name, type, shape and
        place: files of different models differ there."""
        digest = hashlib.blake2b(digest_size=8)
        for part in self.parts:
            digest.update(part.num_bytes.to_bytes(8, "little"))
            digest.update(part.header())
        return digest.hexdigest()

    def close(self) -> None:
        """Unmaps every part; views taken from them must be gone."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> "GGUFModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_split(self) -> None:
        for number, part in enumerate(self.parts):
            count = _number(part, "split.count")
            if count in (None, 0, 1) and len(self.parts) == 1:
                continue
            if count != len(self.parts):
                raise ModelFileError(
                    f"{part.path}: split.count is {count}, but its name says {len(self.parts)} part(s); "
                    "parts are named NAME-00001-of-0000N.gguf"
                )
            stored_number = _number(part, "split.no")
            if stored_number != number:
                raise ModelFileError(
                    f"{part.path}: split.no is {stored_number}, but its name says {number} (counted from 0)"
                )

    def _check_count(self) -> None:
        expected = _number(self.parts[0], "split.tensors.count")
        if len(self.parts) > 1 and expected is not None and expected != len(self._home):
            raise ModelFileError(
                f"{self.path}: the parts hold {len(self._home)} tensors, split.tensors.count says {expected}"
            )


def _number(part: GGUFFile, key: str) -> int | None:
    value = part.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ModelFileError(f"{part.path}: {key} is {value!r}, expected a number")
    return value


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of the set that `path` belongs to, in order; just `path` for a single file."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(f"{path}: the name says that it is part {number} of {count}")
    parts = []
    for part_number in range(1, count + 1):
        part = path.with_name(f"{match['stem']}-{part_number:05d}-of-{count:05d}.gguf")
        if not os.path.exists(part):  # Path.exists raises where the directory cannot be searched.
            raise ModelFileError(
                f"{part}: this part of the split model is missing ({count} parts are needed)"
            )
        parts.append(part)
    return parts
