"""The stager's way of experts: blobs come to staging places in shared memory, from where they are copied to
the device.

A place is *free*; or *under way*, asked for and not answered (state 0); or its blob is *there* (1) or could
not be had (negative). Which expert is in which place is the business of who asks. For one thread.
"""

import errno
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import DiskError, WorkerFailedError
from shared.expert_blobs import BlobLayout, up_to_page
from shared.native.task import address_of
from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import BlobHeader


class _Slot(NamedTuple):
    """Its arrays as memoryviews, which are written many times as fast."""

    header: memoryview
    experts: memoryview
    places: memoryview


class Staging:
    """The places, and the ring that they are asked for through.

    The stager serves what it is asked for in the order of asking. A blob that is needed at once waits for all
    that was asked for before, so whoever asks in advance keeps that short.
    """

    def __init__(self, ring: RingClient, layout: BlobLayout, num_places: int, timeout_s: float) -> None:
        """A ring of `shared.work_slots.staging_ring` with so many places. Waits end after `timeout_s` in
        which the stager has noted no progress."""
        self._ring = ring
        self._layers = layout.layers
        self._place_bytes = layout.largest_place_bytes
        self._timeout_s = timeout_s
        self.num_places = num_places
        self._free = deque(range(num_places))
        # Given back before they were answered: the stager may still write to them.
        self._abandoned: list[int] = []
        slots = [ring.slot(ticket) for ticket in range(ring.shape.num_slots)]
        self._slots = {id(slot): _Slot(*(slot[name].data for name in _Slot._fields)) for slot in slots}
        common = ring.common
        self._states, self._arrived = common["states"].data, common["arrived"].data
        self._reads, self._read_bytes = common["reads"], common["read_bytes"]
        start = up_to_page(address_of(common["pool"])) - address_of(common["pool"])
        self.memory: NDArray[np.uint8] = common["pool"][start : start + num_places * self._place_bytes]
        """All places one after the other, on whole pages: what has to be pinned."""

    @property
    def num_free(self) -> int:
        """Places that can be asked for."""
        if self._abandoned:
            self._reclaim()
        return len(self._free)

    @property
    def arrived(self) -> int:
        """Grows whenever a place changes its state; see `wait_any`."""
        return int(self._arrived[0])

    def request(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Asks for experts of a layer, the first ones as far as there are free places, and returns their
        places. Does not wait: there are none where the stager has too much to do already."""
        count = min(len(experts), self.num_free)
        if not count or not self._ring.has_free_slot:
            return []
        places = [self._free.popleft() for _ in range(count)]
        slot = self._slots[id(self._ring.next_slot(self._timeout_s, Role.STAGER))]
        slot.header[BlobHeader.LAYER], slot.header[BlobHeader.COUNT] = layer, count
        for number, place in enumerate(places):
            slot.experts[number] = experts[number]
            slot.places[number] = place
            self._states[place] = 0
        self._ring.submit()
        return places

    def state(self, place: int) -> int:
        """0 while the blob is under way, 1 when it is there, or the negative errno of what could not be read.
        ECANCELED is no bad disk, but a stager that ends."""
        return int(self._states[place])

    def failure(self, layer: int, expert: int, error_number: int) -> DiskError:
        """What a blob that could not be read is to be told as, with the errno of `state`."""
        names = dict.fromkeys(part.file.path.name for part in self._layers[layer].parts)
        return DiskError.of(", ".join(names), f"expert {expert} of layer {layer}", error_number)

    def reads(self, place: int) -> tuple[list[int], list[int]]:
        """The reads that were made for the gate, up and down of a place that was answered, and their bytes;
        zeros for what was copied from memory."""
        return self._reads[place].tolist(), self._read_bytes[place].tolist()

    def parts(self, place: int, layer: int, expert: int) -> list[NDArray[np.uint8]]:
        """The encoded rows of gate, up and down of the expert in a place: views."""
        begin, parts = place * self._place_bytes, []
        for part in self._layers[layer].parts:
            start = begin + part.start_in_place(expert)
            parts.append(self.memory[start : start + part.num_bytes])
        return parts

    def free(self, place: int) -> None:
        """Gives a place back. One that is still under way is asked for again only once it was answered."""
        if self._states[place] == 0:
            self._abandoned.append(place)
        else:
            self._free.append(place)

    def wait(self, places: Iterable[int]) -> None:
        """Waits until all of these places were answered, well or not.

        Raises WorkerFailedError where the stager is lost or ends, and StepStalledError where it does not
        answer.
        """
        for place in places:
            while True:
                # Looked at before the state: what arrives after that is not slept through.
                seen = self._arrived[0]
                if self._states[place] != 0:
                    break
                self.wait_any(seen)
            if self._states[place] == -errno.ECANCELED:
                raise WorkerFailedError("the stager is stopping; it is being restarted, try again soon")

    def wait_any(self, seen: int) -> None:
        """Waits until some place has changed its state since `arrived` was `seen`. Raises as `wait`."""
        self._ring.wait_for_change("arrived", seen, self._timeout_s, Role.STAGER)

    def _reclaim(self) -> None:
        # Each state is looked at once: it may change between two looks.
        abandoned, self._abandoned = self._abandoned, []
        for place in abandoned:
            self.free(place)
