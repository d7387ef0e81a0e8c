"""Serves the gpu_worker's ring of staging places: brings blobs of experts from wherever they are.

That is the page cache, where the cpu_worker computes from mapped files too: pages that are locked or mapped
are the same ones. Or a place of its pool, where experts are kept in one (`stager.blob_sources`). Else the
disk. What can be copied is copied first, one blob after the other; the rest of a slot is read, many at a
time.

Slots are served in the order of coming, each as a whole: who asks in advance asks for little at a time, or an
urgent blob waits behind all that.
"""

import errno
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared import futex
from shared.expert_blobs import BlobLayout, ExpertMode, up_to_page
from shared.native.ring import RingStatus
from shared.native.task import address_of
from shared.ring import Arrays, RingServer
from shared.work_slots import THERE, BlobHeader
from stager.blob_sources import BlobSources
from stager.expert_blobs import BlobReader, give_up, part_arrived_task
from stager.read_queue import ReadQueue, open_for_reading


class StagingService:
    """Does the work of staging slots, one ring after the other."""

    def __init__(self, layout: BlobLayout, sources: BlobSources, new_queue: Callable[[], ReadQueue]) -> None:
        """`new_queue` makes the queue that reads; it is called for each ring, since there is none on a
        machine without a device."""
        self._layout = layout
        self._sources = sources
        self._new_queue = new_queue
        # Compiled now, not when the first ring comes.
        part_arrived_task()
        self._place_bytes = layout.largest_place_bytes
        self._reader: BlobReader | None = None
        self._ring: RingServer
        self._files: dict[str, int] = {}

    def open(self, ring: RingServer) -> None:
        """The slots to come are of this ring. Raises ModelFileError where a file cannot be opened, and
        ResourceError where nothing is to be had that reads."""
        reader = BlobReader(self._layout, self._new_queue())
        reader.open(ring)
        self._reader, self._ring = reader, ring
        self._files = {str(path): open_for_reading(path, direct=False) for path in self._layout.paths}
        pool = ring.common["pool"]
        self._memory = pool[up_to_page(address_of(pool)) - address_of(pool) :]
        self._arrived = address_of(ring.common["arrived"])

    def close(self) -> None:
        """Lets go of the ring and of what reads for it. No slot may be served."""
        if self._reader is None:
            return
        self._reader.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._reader = None
        del self._ring, self._memory

    def __call__(self, slot: Arrays) -> None:
        layer, count = (int(slot["header"][place]) for place in (BlobHeader.LAYER, BlobHeader.COUNT))
        experts, places = (slot[name][:count].astype(np.int64) for name in ("experts", "places"))
        common = self._ring.common
        try:
            common["reads"][places] = 0
            common["read_bytes"][places] = 0
            if self._sources.are_cached:
                self._copy_from_files(layer, experts.tolist(), places.tolist())
                return
            rest = self._copy_from_pool(layer, experts.tolist(), places.tolist())
            if rest:
                self._read(layer, experts[rest], places[rest])
        except BaseException:
            give_up(common, places)
            raise

    def _copy_from_files(self, layer: int, experts: list[int], places: list[int]) -> None:
        """Through the page cache; not from a mapping, where a bad disk is the end of the process."""
        if self._sources.mode is ExpertMode.MAPPED:
            # All of it at once: what is not in memory is then read while others are copied.
            for expert in experts:
                for part in self._layout.layers[layer].parts:
                    file = self._files[str(part.file.path)]
                    os.posix_fadvise(file, part.start(expert), part.num_bytes, os.POSIX_FADV_WILLNEED)
        for number, (expert, place) in enumerate(zip(experts, places, strict=True)):
            self._ring.status[RingStatus.OUTSTANDING] = len(experts) - number
            is_stopped = self._ring.is_stopped
            self._arrive(place, -errno.ECANCELED if is_stopped else self._copied(layer, expert, place))
        self._ring.status[RingStatus.OUTSTANDING] = 0

    def _copied(self, layer: int, expert: int, place: int) -> int:
        """Copies one blob from the files; the state of its place."""
        try:
            rows = self._rows(layer, expert, place)
            for part, to in zip(self._layout.layers[layer].parts, rows, strict=True):
                done = 0
                while done < part.num_bytes:
                    at = part.start(expert) + done
                    brought = os.preadv(self._files[str(part.file.path)], [to[done:].data], at)
                    if not brought:
                        return -errno.ENODATA
                    done += brought
        except OSError as error:
            return -(error.errno or errno.EIO)
        return THERE

    def _copy_from_pool(self, layer: int, experts: list[int], places: list[int]) -> list[int]:
        """Copies what is in the pool; which of them are not."""
        pool, rest = self._sources.pool, []
        for number, (expert, place) in enumerate(zip(experts, places, strict=True)):
            if pool is not None and pool.copy(layer, expert, self._rows(layer, expert, place)):
                self._arrive(place, THERE)
            else:
                rest.append(number)
        return rest

    def _read(self, layer: int, experts: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        assert self._reader is not None
        addresses = address_of(self._memory) + places * self._place_bytes
        self._reader.read(layer, experts, places, addresses)

    def _rows(self, layer: int, expert: int, place: int) -> Sequence[NDArray[np.uint8]]:
        """Where the rows of an expert's parts go in a place."""
        start = place * self._place_bytes
        rows = []
        for part in self._layout.layers[layer].parts:
            begin = start + part.start_in_place(expert)
            rows.append(self._memory[begin : begin + part.num_bytes])
        return rows

    def _arrive(self, place: int, state: int) -> None:
        """In the order of `expert_part_arrived`: whoever is woken sees the state, and the progress."""
        common = self._ring.common
        self._ring.status[RingStatus.PROGRESS] += 1
        common["states"][place] = state
        common["arrived"][0] += 1
        futex.wake(self._arrived)
