"""Serves the cpu_worker's blob ring: reads blobs of experts into the places they are to go to.

What is in which place is the cpu_worker's business; here it is read, and the place's state written when its
three parts are there, whatever else of the slot is still under way. What was read where is kept, for who
serves the gpu_worker (`stager.blob_sources`).
"""

import errno
import functools
import os

import numpy as np
from numpy.typing import NDArray

from shared import futex
from shared.expert_blobs import BlobLayout
from shared.native.memory import EVERYONE, futex_wake_shared, ids_at, integers_at, load, store_shared
from shared.native.records import Record, fields, reader, record
from shared.native.ring import INTERRUPT
from shared.native.task import address_of
from shared.quants.jit import compile_task
from shared.ring import Arrays, RingServer
from shared.work_slots import PARTS, THERE, BlobHeader
from stager.blob_sources import BlobSources, PoolContents
from stager.read_queue import PAGE_BYTES, READ, READ_BYTES, ReadQueue, open_model_file

_NUM_PARTS = len(PARTS)

BATCH = fields(
    "reads",  # READ [num_blobs, 3], of a slot's blobs
    "numbers",  # i64 [num_blobs]: of their places, among all places of the ring
    "experts",  # i64 [num_blobs]
    "to_come",  # i64 [num_blobs]: parts that have not ended
    "errors",  # i64 [num_blobs]: the negative errno of one that failed, 0 for none
    # Common arrays of the ring.
    "states",  # i64 [num_places]
    "place_reads",  # i32 [num_places, 3]
    "place_bytes",  # i64 [num_places, 3]
    "arrived",  # the word that is counted up with every blob
    "contents",  # i32 [num_places]: the expert whose blob is there; 0 where nobody keeps that
)
_batch_at = reader(BATCH)
_read_at = reader(READ)


def _part_arrived(params: int, read_address: int, data: int, scratch: int) -> None:
    """Params BATCH: notes that a part has been read; and its blob, if it was the last one."""
    if read_address == 0:
        return
    batch, read = _batch_at(params), _read_at(read_address)
    index = (read_address - batch.reads) // READ_BYTES
    blob = index // _NUM_PARTS
    number = integers_at(batch.numbers)[blob]
    at = number * _NUM_PARTS + index % _NUM_PARTS
    ids_at(batch.place_reads)[at] = read.num_calls
    integers_at(batch.place_bytes)[at] = read.num_brought
    errors, to_come = integers_at(batch.errors), integers_at(batch.to_come)
    if read.result < 0:
        errors[blob] = read.result
    to_come[blob] -= 1
    if to_come[blob] == 0:
        if errors[blob] == 0 and batch.contents != 0:
            ids_at(batch.contents)[number] = integers_at(batch.experts)[blob]
        # In this order: whoever sees the state may use the place, and is woken to see it.
        store_shared(batch.states + 8 * number, errors[blob] if errors[blob] != 0 else THERE)
        store_shared(batch.arrived, load(batch.arrived) + 1)
        futex_wake_shared(batch.arrived, EVERYONE)


@functools.cache
def part_arrived_task() -> int:
    """Params BATCH: what `BlobReader` has done with every part that was read."""
    return compile_task(_part_arrived, "expert_part_arrived")


class BlobReader:
    """Reads blobs from the files into places of one ring after the other. For one thread."""

    def __init__(self, layout: BlobLayout, queue: ReadQueue) -> None:
        """Raises ModelFileError where a file cannot be opened."""
        self._layout = layout
        self._queue = queue
        self._on_read = part_arrived_task()
        opened = {path: open_model_file(path) for path in layout.paths}
        self._descriptors = {path: descriptor for path, (descriptor, _) in opened.items()}
        self._is_direct = all(is_direct for _, is_direct in opened.values())
        self._common: Arrays = {}
        self._contents: NDArray[np.int32] | None = None

    def open(self, ring: RingServer, contents: NDArray[np.int32] | None = None) -> None:
        """Places are those of this ring. `contents` [num_places] is written, before a place's state, with the
        expert whose blob is there."""
        self._common, self._contents = ring.common, contents
        self._queue.report_to(ring.status_address, ring.address + INTERRUPT)

    def forget_ring(self) -> None:
        """Lets go of the ring's memory."""
        self._common, self._contents = {}, None

    def read(
        self, layer: int, experts: NDArray[np.int64], numbers: NDArray[np.int64], addresses: NDArray[np.int64]
    ) -> None:
        """Reads experts of a layer into the places of those numbers, which begin at those addresses; returns
        when every place has its state."""
        common, contents = self._common, self._contents
        common["reads"][numbers] = 0
        common["read_bytes"][numbers] = 0
        reads = self._reads(layer, experts, addresses)
        to_come, errors = np.full(len(experts), _NUM_PARTS, np.int64), np.zeros(len(experts), np.int64)
        batch = record(
            BATCH,
            reads=reads,
            numbers=numbers,
            experts=experts,
            to_come=to_come,
            errors=errors,
            states=common["states"],
            place_reads=common["reads"],
            place_bytes=common["read_bytes"],
            arrived=common["arrived"],
            contents=contents if contents is not None else 0,
        )
        self._queue.run(reads, self._on_read, address_of(batch))
        self._forget_pages(reads)

    def close(self) -> None:
        """Closes the files and the queue. Nothing may be reading."""
        self._queue.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _reads(self, layer: int, experts: NDArray[np.int64], addresses: NDArray[np.int64]) -> Record:
        """READs of the whole pages of all parts, [num_blobs, 3] one after the other."""
        reads = np.zeros((len(experts), _NUM_PARTS), READ)
        for number, part in enumerate(self._layout.layers[layer].parts):
            starts = part.offset + experts * part.num_bytes
            begins = starts // PAGE_BYTES * PAGE_BYTES
            needed = starts + part.num_bytes - begins
            of_part = reads[:, number]
            of_part["file"] = self._descriptors[part.file.path]
            of_part["offset"] = begins
            of_part["needed"] = needed
            of_part["num_bytes"] = -(-needed // PAGE_BYTES) * PAGE_BYTES
            of_part["address"] = addresses + part.at
        return reads.reshape(-1)

    def _forget_pages(self, reads: Record) -> None:
        """What came through the page cache is in its place now, and nobody reads it there again."""
        if self._is_direct:
            return
        for descriptor, offset, num_bytes in reads[["file", "offset", "num_bytes"]].tolist():
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def give_up(common: Arrays, numbers: NDArray[np.int64]) -> None:
    """What has not come to these places of a ring will not come."""
    states = common["states"]
    states[numbers[states[numbers] == 0]] = -errno.EIO
    common["arrived"][0] += 1
    futex.wake(address_of(common["arrived"]))


class BlobService:
    """Does the work of blob slots, one ring after the other."""

    def __init__(self, layout: BlobLayout, queue: ReadQueue, sources: BlobSources | None = None) -> None:
        """`sources` are told of the pool. Raises ModelFileError where a file cannot be opened."""
        self._layout = layout
        self._reader = BlobReader(layout, queue)
        self._sources = sources if sources is not None else BlobSources()
        self._contents: PoolContents | None = None
        self._common: Arrays = {}

    def open(self, ring: RingServer, places_per_layer: int) -> None:
        """The slots to come are of this ring."""
        self._common = ring.common
        contents = PoolContents(self._layout, places_per_layer, ring.common["pool"])
        self._reader.open(ring, contents.expert_of)
        self._contents = self._sources.pool = contents

    def forget_ring(self) -> None:
        """Lets go of the ring, whose pool is most of the memory there is. No slot may be served."""
        self._contents = self._sources.pool = None
        self._common = {}
        self._reader.forget_ring()

    def __call__(self, slot: Arrays) -> None:
        contents = self._contents
        assert contents is not None, "slots come from a ring that was opened"
        layer, count = (int(slot["header"][place]) for place in (BlobHeader.LAYER, BlobHeader.COUNT))
        places = slot["places"][:count].astype(np.int64)
        numbers = layer * contents.places_per_layer + places
        try:
            contents.begin_refill(numbers)
            addresses = contents.addresses(layer, places)
            self._reader.read(layer, slot["experts"][:count].astype(np.int64), numbers, addresses)
        except BaseException:
            give_up(self._common, numbers)
            raise

    def close(self) -> None:
        """Closes the files and the queue. No slot may be served."""
        self._reader.close()
