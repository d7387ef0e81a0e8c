"""The cpu_worker's side of its link to the stager: tells it how experts are kept, and makes the pool it
fills.

Each stager that says Hello gets a ring and a pool of its own, as `docs/decisions/one-segment-per-link.md`
says. The pool is most of the memory there is, so the one before has to be gone first, and making one takes
seconds: that is done in a thread, and a stager that comes meanwhile is asked to come again.
"""

import asyncio
import itertools
import logging
import threading

import numpy as np
from numpy.typing import NDArray

from cpu_worker.expert_pool import ExpertPool
from cpu_worker.residency import Residency
from shared.errors import ResourceError, WorkerFailedError
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.link import Peer
from shared.locked_memory import lock_memory, lock_refusal, may_lock
from shared.messages import FromConnecting, Init
from shared.native.task import address_of
from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import blob_ring

_log = logging.getLogger(__name__)

_RETRY_S = 1.0


class StagerListener:
    """Owns the pool's memory; who computes has the pool's table."""

    def __init__(self, incarnation: str, residency: Residency, layout: BlobLayout, num_experts: int) -> None:
        self._incarnation = incarnation
        self._residency = residency
        self._layout = layout
        places = residency.places_per_layer
        self.pool = ExpertPool(layout, num_experts, places) if residency.mode is ExpertMode.POOL else None
        """What experts are computed from, where there is one."""
        self._numbers = itertools.count(1)
        # At most one of the three: made and not offered yet, offered to a stager, served by one.
        self._spare: RingClient | None = None
        self._offered: RingClient | None = None
        self._serving: RingClient | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def capabilities(self) -> dict[str, int | float | str]:
        """What the gateway is told about experts."""
        told: dict[str, int | float | str] = {"experts": self._residency.mode}
        if self.pool is not None:
            places = self._residency.places_per_layer
            told["expert_places"] = places * len(self._layout.layers)
            told["expert_pool_gib"] = round(self._layout.pool_bytes(places) / 2**30, 2)
        return told

    def make_room(self) -> None:
        """Makes a ring and a pool for the next stager, if there is to be one. Raises ResourceError where
        shared memory does not suffice."""
        if self.pool is None:
            return
        places = self._residency.places_per_layer
        shape = blob_ring(len(self._layout.layers), places, self._layout.pool_bytes(places))
        # The stager's threads answer after a disk has: spinning for that is in vain.
        ring = RingClient(shape, f"experts-{next(self._numbers)}", self._incarnation, spin_s=0)
        _keep_from_swap(ring.common["pool"])
        self._spare = ring

    # Calls of the link, from the event loop.

    def greet(self, role: Role) -> Init | None:
        """Offers the spare ring. None while there is none."""
        mode = self._residency.mode
        if self.pool is None:
            return Init(incarnation=self._incarnation, experts=mode)
        if self._spare is None:
            return None
        self._offered, self._spare = self._spare, None
        return Init(
            incarnation=self._incarnation,
            segment=self._offered.descriptor,
            places_per_layer=self._residency.places_per_layer,
            experts=mode,
        )

    def peer_ready(self, peer: Peer) -> None:
        """The stager serves its ring."""
        if self.pool is not None and self._offered is not None:
            self._serving, self._offered = self._offered, None
            self.pool.open(self._serving)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """Ends a wait for experts, and makes a new pool once the old one is gone."""
        if self.pool is None:
            return
        self.pool.shut(
            WorkerFailedError(f"the stager is lost: {reason}; it is being restarted, try again soon")
        )
        if self._offered is not None or self._serving is not None:
            self._renewal = asyncio.get_running_loop().create_task(self._renew(), name="a new pool")

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """Heartbeats say nothing here that the link has not noted."""

    def close(self) -> None:
        """Removes what is in shared memory. Nobody computes any more."""
        with self._lock:
            self._is_closed = True
        if self._renewal is not None:
            self._renewal.cancel()
        self._let_go()

    async def _renew(self) -> None:
        assert self.pool is not None
        await asyncio.to_thread(self.pool.wait_until_left)
        self._let_go()
        while True:
            try:
                await asyncio.to_thread(self.make_room)
                return
            except ResourceError as error:
                # A stager that was only frozen may still have the old one.
                _log.error("no pool for experts: %s", error)
            await asyncio.sleep(_RETRY_S)

    def _let_go(self) -> None:
        for ring in (self._spare, self._offered, self._serving):
            if ring is not None:
                ring.close()
        self._spare = self._offered = self._serving = None


def _keep_from_swap(pool: NDArray[np.uint8]) -> None:
    """Locks the pool in RAM where that is allowed; without swap it stays there anyway."""
    try:
        if may_lock(pool.nbytes):
            lock_memory(address_of(pool), pool.nbytes)
    except OSError as error:
        _log.info("the pool of experts may be swapped out: %s", lock_refusal(pool.nbytes, error))
