"""Where the blob of an expert lies in the model files, and where in the pool.

A *blob* is what one expert is: the encoded rows of its gate, up and down matrices, three ranges of the files.
The pool has the same number of places for every layer, each large enough for any expert of its layer::

    pool:    | layer 0: place 0 | place 1 | ... | layer 1: place 0 | ...
    place:   | gate | up | down |          each on whole pages
    gate:    | rest of the page before | encoded rows | rest of the page behind |

Rows keep the offset within a page that they have in the file, so that whole pages can be read straight into
place. Staging places have the same inside, and are all as large as those of the largest layer.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from shared.gguf.file import GGUFFile
from shared.gguf.model import GGUFModel
from shared.tensor_catalog import block_prefix
from shared.work_slots import PARTS


class ExpertMode(StrEnum):
    """How the experts of a model are kept."""

    MAPPED = "mapped"
    """In the mapped files; the page cache decides what is in RAM."""
    RESIDENT = "resident"
    """In the mapped files, all of them read, and locked where that is allowed."""
    POOL = "pool"
    """Those in use in places of shared memory, read when they are needed."""


@dataclass(frozen=True, slots=True)
class BlobPart:
    """One matrix of all experts of a layer: `num_bytes` for each expert, one after the other from `offset` of
    the file; and where its pages begin in a place."""

    file: GGUFFile
    offset: int
    num_bytes: int
    at: int

    def start(self, expert: int) -> int:
        """Where the rows of an expert begin in the file."""
        return self.offset + expert * self.num_bytes

    def start_in_place(self, expert: int) -> int:
        """Where they begin in a place."""
        return self.at + self.start(expert) % mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class LayerBlobs:
    """The blobs of one layer, in the order of `PARTS`, and the bytes of one of its places."""

    parts: tuple[BlobPart, ...]
    place_bytes: int


class BlobLayout:
    """All blobs of a model. Both sides of the blob ring build the same one."""

    def __init__(self, model: GGUFModel, num_layers: int) -> None:
        self.layers: Sequence[LayerBlobs] = [_blobs_of(model, layer) for layer in range(num_layers)]

    @property
    def place_bytes(self) -> int:
        """Of one place for each layer."""
        return sum(layer.place_bytes for layer in self.layers)

    @property
    def paths(self) -> set[Path]:
        """Of the files that hold them."""
        return {part.file.path for blobs in self.layers for part in blobs.parts}

    @property
    def largest_place_bytes(self) -> int:
        """Of one place that takes a blob of any layer."""
        return max(layer.place_bytes for layer in self.layers)

    def pool_bytes(self, places_per_layer: int) -> int:
        """Of the whole pool."""
        return places_per_layer * self.place_bytes

    def first_place(self, layer: int, places_per_layer: int) -> int:
        """Where the places of a layer begin in the pool."""
        return places_per_layer * sum(blobs.place_bytes for blobs in self.layers[:layer])


def expert_tensor(layer: int, part: str) -> str:
    """The name of the tensor that holds one matrix of all experts of a layer."""
    return f"{block_prefix(layer)}ffn_{part}_exps.weight"


def expert_tensors(num_layers: int) -> list[str]:
    """Those of all layers."""
    return [expert_tensor(layer, part) for layer in range(num_layers) for part in PARTS]


def _blobs_of(model: GGUFModel, layer: int) -> LayerBlobs:
    parts, at = [], 0
    for name in PARTS:
        info = model.info(expert_tensor(layer, name))
        num_experts = info.shape[0]
        num_bytes = info.num_bytes // num_experts
        parts.append(BlobPart(model.home(info.name), info.offset, num_bytes, at))
        in_page = (info.offset + np.arange(num_experts) * num_bytes) % mmap.PAGESIZE
        at += up_to_page(int(in_page.max()) + num_bytes)
    return LayerBlobs(tuple(parts), at)


def up_to_page(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
