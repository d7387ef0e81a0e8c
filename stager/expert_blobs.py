"""Serves the cpu_worker's blob ring: reads blobs of experts into the places they are to go to.

What is in which place is the cpu_worker's business; here it is read, and the place's state written when its
three parts are there, whatever else of the slot is still under way.
"""

import errno
import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from shared import futex
from shared.expert_blobs import BlobLayout
from shared.native.ring import RingStatus
from shared.native.task import address_of
from shared.ring import Arrays, RingServer
from shared.work_slots import PARTS, BlobHeader
from stager.file_reads import FileRead, FileReader

_THERE = 1


class BlobService:
    """Does the work of blob slots, one ring after the other."""

    def __init__(self, layout: BlobLayout, reader: FileReader) -> None:
        self._layout = layout
        self._reader = reader
        self._places_per_layer = 0
        self._ring: RingServer

    def open(self, ring: RingServer, places_per_layer: int) -> None:
        """The slots to come are of this ring."""
        self._ring, self._places_per_layer = ring, places_per_layer

    def __call__(self, slot: Arrays) -> None:
        layer, count = (int(slot["header"][place]) for place in (BlobHeader.LAYER, BlobHeader.COUNT))
        batch = _Batch(self._ring, layer * self._places_per_layer + slot["places"][:count])
        try:
            reads = self._reads(layer, slot["experts"][:count].tolist(), slot["places"][:count].tolist())
            batch.begin(len(reads))
            self._reader.read(reads, batch.on_done)
        except BaseException:
            batch.give_up()
            raise
        batch.wait()

    def _reads(self, layer: int, experts: list[int], places: list[int]) -> list[FileRead]:
        blobs = self._layout.layers[layer]
        pool = pages_of(self._ring.common["pool"])
        first = self._layout.first_place(layer, self._places_per_layer)
        reads = []
        for expert, place in zip(experts, places, strict=True):
            at = first + place * blobs.place_bytes
            for part in blobs.parts:
                start, stop = part.range_of(expert)
                into = pool[at + part.at : at + blobs.place_bytes]
                reads.append(FileRead(part.file.path, start, stop - start, into))
        return reads


class _Batch:
    """The blobs of one slot while they are read: three reads each, in their order."""

    def __init__(self, ring: RingServer, numbers: NDArray[np.int32]) -> None:
        """`numbers` are those of the places, among the places of all layers."""
        self._common = ring.common
        self._status = ring.status
        self._numbers: list[int] = numbers.tolist()
        self._to_come = [len(PARTS)] * len(self._numbers)
        self._errors = [0] * len(self._numbers)
        self._blobs_to_come = len(self._numbers)
        self._lock = threading.Lock()
        self._is_done = threading.Event()

    def begin(self, num_reads: int) -> None:
        self._common["reads"][self._numbers] = 0
        self._common["read_bytes"][self._numbers] = 0
        self._status[RingStatus.OUTSTANDING] = num_reads

    def on_done(self, index: int, num_calls: int, num_bytes: int) -> None:
        """One read has ended: `stager.file_reads.OnDone`."""
        blob, part = divmod(index, len(PARTS))
        number = self._numbers[blob]
        with self._lock:
            self._common["reads"][number, part] = num_calls
            self._common["read_bytes"][number, part] = max(0, num_bytes)
            self._errors[blob] = self._errors[blob] or min(0, num_bytes)
            self._to_come[blob] -= 1
            self._status[RingStatus.OUTSTANDING] -= 1
            self._status[RingStatus.PROGRESS] += 1
            if self._to_come[blob] == 0:
                self._arrive(number, self._errors[blob] or _THERE)

    def give_up(self) -> None:
        """Nothing was read, nor will be."""
        for number in self._numbers:
            self._arrive(number, -errno.EIO)

    def wait(self) -> None:
        """Returns when all of it has ended."""
        self._is_done.wait()

    def _arrive(self, number: int, state: int) -> None:
        # In this order: whoever sees the state may use the place, and is woken to see it.
        self._common["states"][number] = state
        self._common["arrived"][0] += 1
        futex.wake(address_of(self._common["arrived"]))
        self._blobs_to_come -= 1
        if self._blobs_to_come == 0:
            self._is_done.set()


def pages_of(array: NDArray[np.uint8]) -> memoryview:
    """The array's bytes from its first whole page on."""
    return array[-address_of(array) % mmap.PAGESIZE :].data
