"""What had to be read for the routed experts of a step, token by token, added up over its layers; and which
tokens had to do without one.

The cpu_worker says it in the slot of each layer (`shared.work_slots.expert_ring`). Where layers are computed
in machine code, that adds it up too (`gpu_worker.native.layer_loop`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared.errors import DiskError
from shared.expert_blobs import expert_tensor
from shared.gguf.model import GGUFModel
from shared.native.task import address_of
from shared.ring import Arrays
from shared.work_slots import PARTS, ExpertHeader

_TOTALS = [
    ExpertHeader.NUM_READ,
    ExpertHeader.DISK_WAIT_NS,
    ExpertHeader.MAJOR_FAULTS,
    ExpertHeader.NUM_LOST,
]


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The files that experts lie in, and which of them (`index` int64 [layers, 3]) has gate, up and down of a
    layer."""

    names: tuple[str, ...]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, model: GGUFModel, num_layers: int) -> "ExpertFiles":
        """Those of a model."""
        homes = [
            [model.home(expert_tensor(layer, part)).path.name for part in PARTS]
            for layer in range(num_layers)
        ]
        names = tuple(dict.fromkeys(name for layer in homes for name in layer))
        return cls(names, np.array([[names.index(name) for name in layer] for layer in homes], np.int64))


class ExpertCounts:
    """The counts of one step."""

    def __init__(self, files: ExpertFiles, max_tokens: int) -> None:
        self.files = files
        self.disk_routes: NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        """Of each token, over all layers: routes to experts that had to be read."""
        self.reads: NDArray[np.int64] = np.zeros((len(files.names), max_tokens), np.int64)
        """For each file and token: the reads that were made for it."""
        self.read_bytes: NDArray[np.int64] = np.zeros_like(self.reads)
        # Of each token: errno, layer and expert of the first blob that could not be read; zeros for none.
        self._failures = np.zeros((max_tokens, 3), np.int32)
        # Blobs read, nanoseconds waited for them, major faults, routes lost.
        self._totals = np.zeros(4, np.int64)
        self._stops: Sequence[int] = ()
        # What machine code is given, in this order.
        self.native = [
            max_tokens,
            *(
                address_of(array)
                for array in (
                    files.index,
                    self.disk_routes,
                    self.reads,
                    self.read_bytes,
                    self._failures,
                    self._totals,
                )
            ),
        ]

    @property
    def num_read(self) -> int:
        """Blobs that were read."""
        return int(self._totals[0])

    @property
    def wait_s(self) -> float:
        """Seconds in which the cpu_worker had nothing else to do than to wait for them."""
        return float(self._totals[1]) * 1e-9

    @property
    def major_faults(self) -> int:
        """Of the cpu_worker."""
        return int(self._totals[2])

    @property
    def num_lost(self) -> int:
        """Routes that were done without, since their experts could not be read."""
        return int(self._totals[3])

    def begin(self, stops: Sequence[int]) -> None:
        """A step begins, of sequences whose last tokens come before those places."""
        self._stops = stops
        if self.num_lost:
            self._failures[:] = 0
        if self.num_read:
            self.disk_routes[:], self.reads[:], self.read_bytes[:] = 0, 0, 0
        self._totals[:] = 0

    def add(self, slot: Arrays) -> None:
        """Adds what a slot says that has been served."""
        header = slot["header"]
        self._totals += header[_TOTALS]
        num_tokens, layer = header[ExpertHeader.NUM_TOKENS], header[ExpertHeader.LAYER]
        if header[ExpertHeader.NUM_LOST]:
            failures, found = self._failures[:num_tokens], slot["failures"][:num_tokens]
            is_first = (failures[:, 0] == 0) & (found[:, 0] != 0)
            failures[is_first] = np.insert(found[is_first], 1, layer, axis=1)
        if not header[ExpertHeader.NUM_READ]:
            return
        self.disk_routes[:num_tokens] += slot["disk_routes"][:num_tokens]
        for part, file in enumerate(self.files.index[layer]):
            self.reads[file, :num_tokens] += slot["reads"][:num_tokens, part]
            self.read_bytes[file, :num_tokens] += slot["read_bytes"][:num_tokens, part]

    def failure(self, start: int, stop: int) -> DiskError | None:
        """Why the sequence whose tokens are those of the step cannot go on; None where it can."""
        if not self.num_lost:
            return None
        for number, layer, expert in self._failures[start:stop].tolist():
            if number:
                names = dict.fromkeys(self.files.names[file] for file in self.files.index[layer])
                return DiskError.of(", ".join(names), f"expert {expert} of layer {layer}", number)
        return None

    def check(self) -> None:
        """Raises DiskError where no sequence of the step can go on."""
        if not self.num_lost:
            return
        first: DiskError | None = None
        for start, stop in pairwise((0, *self._stops)):
            failure = self.failure(start, stop)
            if failure is None:
                return
            first = first or failure
        if first is not None:
            raise first
