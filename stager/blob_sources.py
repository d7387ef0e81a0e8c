"""Where experts are, besides the disk: what the stager knows of that from its work for the cpu_worker, kept
for its work for the gpu_worker.

One thread fills the pool while another copies from it. Neither waits for the other: a copy is worth nothing
where its place was refilled meanwhile, and who made it finds that out::

    who refills                            who copies
    -----------                            ----------
    expert_of[place] = none                seen = refills[place]
    refills[place] += 1                    expert_of[place] is the expert?
    writes to the place                    copies
    expert_of[place] = expert              refills[place] is still `seen`?

Bytes of a refill are written after `refills` was counted up, so a copy that has some of them sees the count.
Both are plain stores and loads, which x86-64 makes visible in program order (`shared.ring`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.expert_blobs import BlobLayout, ExpertMode, up_to_page
from shared.native.task import address_of

NO_EXPERT = -1


class PoolContents:
    """Which blob is in which place of the cpu_worker's pool, as who fills it knows. Keeps the pool's memory
    for as long as it is kept."""

    def __init__(self, layout: BlobLayout, places_per_layer: int, pool: NDArray[np.uint8]) -> None:
        """All places are empty. `pool` is the array of the blob ring."""
        self._layout = layout
        self.places_per_layer = places_per_layer
        self._pool = pool
        self._first = up_to_page(address_of(pool)) - address_of(pool)
        self._first_places = [
            self._first + layout.first_place(layer, places_per_layer) for layer in range(len(layout.layers))
        ]
        num_places = len(layout.layers) * places_per_layer
        self.expert_of = np.full(num_places, NO_EXPERT, np.int32)
        """Of the places of all layers, in their order; written when a blob has come."""
        self._refills = np.zeros(num_places, np.int64)

    def addresses(self, layer: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where places of a layer begin."""
        first = address_of(self._pool) + self._first_places[layer]
        return first + places * self._layout.layers[layer].place_bytes

    def begin_refill(self, numbers: NDArray[np.int64]) -> None:
        """Something else will be written to those places from now on; each is named once."""
        self.expert_of[numbers] = NO_EXPERT
        self._refills[numbers] += 1

    def copy(self, layer: int, expert: int, rows: Sequence[NDArray[np.uint8]]) -> bool:
        """Copies the rows of an expert's parts to those arrays, if they are there and stay meanwhile; whether
        they did. What is in the arrays is worth nothing otherwise. Called by another thread than who refills,
        which is not held up by it."""
        start = layer * self.places_per_layer
        found = np.flatnonzero(self.expert_of[start : start + self.places_per_layer] == expert)
        if not len(found):
            return False
        place = int(found[0])
        seen = self._refills[start + place]
        if self.expert_of[start + place] != expert:
            return False
        blobs = self._layout.layers[layer]
        begin = self._first_places[layer] + place * blobs.place_bytes
        for part, to in zip(blobs.parts, rows, strict=True):
            at = begin + part.start_in_place(expert)
            # The GIL is not held meanwhile.
            to[...] = self._pool[at : at + part.num_bytes]
        return bool(self._refills[start + place] == seen)


@dataclass(slots=True)
class BlobSources:
    """Written by who serves the cpu_worker, read by who serves the gpu_worker, each field for itself."""

    mode: ExpertMode | None = None
    """How experts are kept; None while nobody keeps them."""
    pool: PoolContents | None = None

    @property
    def are_cached(self) -> bool:
        """Whether experts are to be had from the page cache, if anywhere in memory."""
        return self.mode in (ExpertMode.MAPPED, ExpertMode.RESIDENT)
