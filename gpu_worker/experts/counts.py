"""Which way the routed experts of a step were computed and what had to be read for them, token by token,
added up over its layers; and which tokens had to do without one.

What the cpu_worker has read, it says in the slot of each layer (`shared.work_slots.expert_ring`). Where
layers are computed in machine code, that adds it up too (`gpu_worker.native.layer_loop`). Whoever sends
routes another way than to the cpu_worker says so here; those that nobody speaks for are the cpu_worker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpu_worker.native.expert_counts import (
    COUNTS,
    add_bytes_kernel,
    add_routes_kernel,
    count_handed_over_kernel,
)
from shared.errors import DiskError
from shared.expert_blobs import expert_tensor
from shared.gguf.model import GGUFModel
from shared.native.records import record
from shared.native.task import address_of
from shared.ring import Arrays
from shared.work_slots import PARTS, ExpertHeader

_TOTALS = [
    ExpertHeader.NUM_READ,
    ExpertHeader.DISK_WAIT_NS,
    ExpertHeader.MAJOR_FAULTS,
    ExpertHeader.NUM_LOST,
]


class Way(IntEnum):
    """Where the bytes of an expert are read, or moved, to use it."""

    DEVICE = 0
    """From a slot of the device."""
    TRANSFERRED = 1
    """From RAM to the device, for this step."""
    RAM = 2
    """From RAM, by the cpu_worker."""


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """The files that experts lie in, which of them (`index` int64 [layers, 3]) has gate, up and down of a
    layer, and how many experts a layer has, each of how many bytes (`blob_bytes` int64 [layers])."""

    names: tuple[str, ...]
    index: NDArray[np.int64]
    blob_bytes: NDArray[np.int64]
    num_experts: int

    @classmethod
    def of(cls, model: GGUFModel, num_layers: int) -> "ExpertFiles":
        """Those of a model."""
        homes = [
            [model.home(expert_tensor(layer, part)).path.name for part in PARTS]
            for layer in range(num_layers)
        ]
        names = tuple(dict.fromkeys(name for layer in homes for name in layer))
        num_experts = model.info(expert_tensor(0, PARTS[0])).shape[0]
        blob_bytes = [
            sum(model.info(expert_tensor(layer, part)).num_bytes for part in PARTS) // num_experts
            for layer in range(num_layers)
        ]
        return cls(
            names,
            np.array([[names.index(name) for name in layer] for layer in homes], np.int64),
            np.array(blob_bytes, np.int64),
            num_experts,
        )


class ExpertCounts:
    """The counts of one step."""

    def __init__(self, files: ExpertFiles, max_tokens: int) -> None:
        self.files = files
        self.disk_routes: NDArray[np.int32] = np.zeros(max_tokens, np.int32)
        """Of each token, over all layers: routes to the cpu_worker's experts that had to be read."""
        self._routes: NDArray[np.int32] = np.zeros((3, max_tokens), np.int32)
        self.device_routes, self.transferred_routes, self.skipped_routes = self._routes
        """Likewise int32 [max_tokens]: those to experts in slots of the device, to experts that were copied
        there for the step, and those that were left out. The rest are the cpu_worker's."""
        self.expert_bytes: NDArray[np.int64] = np.zeros((len(Way), max_tokens), np.int64)
        """By `Way` and token: bytes of experts. An expert counts once a layer and way, on its first token."""
        self.reads: NDArray[np.int64] = np.zeros((len(files.names), max_tokens), np.int64)
        """For each file and token: the reads that were made for it."""
        self.read_bytes: NDArray[np.int64] = np.zeros_like(self.reads)
        # Of each token: errno, layer and expert of the first blob that could not be read; zeros for none.
        self._failures = np.zeros((max_tokens, 3), np.int32)
        # Blobs read, nanoseconds waited for them, major faults, routes lost.
        self._totals = np.zeros(4, np.int64)
        self._stops: Sequence[int] = ()
        self._marks = np.zeros(files.num_experts, np.int64)
        self._record = record(
            COUNTS,
            max_tokens=max_tokens,
            num_layers=len(files.blob_bytes),
            num_experts=files.num_experts,
            blob_bytes=files.blob_bytes,
            routes=self._routes,
            num_bytes=self.expert_bytes,
            marks=self._marks,
        )
        self._address = address_of(self._record)
        self._count_handed_over = count_handed_over_kernel()
        self._add_routes = add_routes_kernel()
        self._add_bytes = add_bytes_kernel()
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
                    self._record,
                )
            ),
        ]

    @property
    def num_read(self) -> int:
        """Blobs that were read."""
        return int(self._totals[0])

    @property
    def wait_s(self) -> float:
        """Seconds in which the cpu_worker, or the step, had nothing else to do than to wait for them."""
        return float(self._totals[1]) * 1e-9

    @property
    def major_faults(self) -> int:
        """Of the cpu_worker."""
        return int(self._totals[2])

    @property
    def num_lost(self) -> int:
        """Routes that were lost, since their experts could not be read."""
        return int(self._totals[3])

    def begin(self, stops: Sequence[int]) -> None:
        """A step begins, of sequences whose last tokens come before those places."""
        # Of the step before: nothing lies behind its last token.
        num_tokens = self._stops[-1] if self._stops else self.disk_routes.size
        self._routes[:, :num_tokens] = 0
        self.expert_bytes[:, :num_tokens] = 0
        self._stops = stops
        if self.num_lost:
            self._failures[:] = 0
        if self.num_read:
            self.disk_routes[:], self.reads[:], self.read_bytes[:] = 0, 0, 0
        self._totals[:] = 0

    def add(self, slot: Arrays) -> None:
        """Adds what a slot of the cpu_worker's says that has been served."""
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

    def add_ways(
        self, device: NDArray[np.int32], transferred: NDArray[np.int32], skipped: NDArray[np.int32]
    ) -> None:
        """Adds the routes of one layer that do not go to the cpu_worker, int32 [tokens] of each way, from the
        first token of the step on. Raises ValueError where these are not as many, or too many."""
        if not self._add_routes(self._address, device, transferred, skipped):
            raise ValueError(
                f"routes of {len(device)}, {len(transferred)} and {len(skipped)} tokens, of at most "
                f"{self.disk_routes.size}"
            )

    def add_blobs(self, way: Way, layer: int, tokens: NDArray[np.int32]) -> None:
        """Adds the bytes of experts of a layer that are used in a way, one for each of the tokens int32
        [experts], on which it is booked: the first that chose it; where nobody has, as of a whole layer that
        is moved, the first of the step. Those of the cpu_worker are added by `add_handed_over`.

        Raises ValueError where there is no such layer, or token.
        """
        # As a plain number: to find out what an enum is takes machine code's caller 8 us.
        if not self._add_bytes(self._address, int(way), layer, tokens):
            raise ValueError(
                f"experts of layer {layer} of {len(self.files.blob_bytes)}, for tokens {tokens.tolist()} of "
                f"at most {self.disk_routes.size}"
            )

    def add_handed_over(self, layer: int, expert_ids: NDArray[np.int32]) -> None:
        """Adds the bytes of the experts of a layer that the cpu_worker is to compute, expert_ids int32
        [tokens, used], negative for routes that go another way; each on the first token that chose it.

        Raises ValueError where there is no such layer, or there are too many tokens.
        """
        if not self._count_handed_over(self._address, layer, expert_ids):
            raise ValueError(
                f"{len(expert_ids)} tokens in layer {layer}, of {self.disk_routes.size} tokens at most and "
                f"{len(self.files.blob_bytes)} layers"
            )

    def add_reads(
        self,
        layer: int,
        token: int,
        reads: Sequence[int],
        num_bytes: Sequence[int],
        wait_s: float = 0.0,
    ) -> None:
        """Adds the reads of gate, up and down, and their bytes, of an expert that was transferred and had to
        be read for that, on the first token that chose it; and the part of `transfer_waited_s` in which the
        step had nothing else to do than to wait for them."""
        self._totals[0] += 1
        self._totals[1] += round(wait_s * 1e9)
        for file, count, size in zip(self.files.index[layer], reads, num_bytes, strict=True):
            self.reads[file, token] += count
            self.read_bytes[file, token] += size

    def note_lost(self, layer: int, tokens: Sequence[int], expert: int, error_number: int) -> None:
        """An expert of a layer could not be read to be transferred, for that errno: the routes of those
        tokens to it are lost, one of each. What a token has lost before remains its reason."""
        self._totals[3] += len(tokens)
        for token in tokens:
            if not self._failures[token, 0]:
                self._failures[token] = error_number, layer, expert

    def ways_of(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Of tokens `start` to `stop`: the routes to the device, the transferred and the skipped ones; and
        the bytes by `Way`."""
        tokens = slice(start, stop)
        return self._routes[:, tokens].sum(axis=1).tolist(), self.expert_bytes[:, tokens].sum(axis=1).tolist()

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
