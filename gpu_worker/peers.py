"""The gpu_worker's side of its links to cpu_worker and stager: a fresh ring for each that says Hello.

A worker that was lost may only have been frozen, and go on writing when it wakes up. It then writes into the
ring it was given, which nobody reads any more; its successor has another one.
"""

import itertools
import logging
from collections.abc import Callable

from gpu_worker.engine import AttachRing, DetachRing, Engine
from shared.errors import ResourceError, WorkerFailedError
from shared.link import Peer
from shared.messages import FromConnecting, Init
from shared.model_config import Qwen4ExpConfig
from shared.ring import RingClient, RingShape
from shared.run_directory import Role
from shared.topology import spin_time_s
from shared.work_slots import expert_ring, ngram_ring

_log = logging.getLogger(__name__)


class PeerListener:
    """Makes rings, and tells the engine which of them are served."""

    def __init__(
        self,
        config: Qwen4ExpConfig,
        max_tokens: int,
        incarnation: str,
        engine: Engine,
        on_change: Callable[[], None],
    ) -> None:
        """`max_tokens` is the size of the largest step; `on_change` is called when a peer comes or goes."""
        self._config = config
        self._max_tokens = max_tokens
        self._incarnation = incarnation
        self._engine = engine
        self._on_change = on_change
        self._numbers = itertools.count(1)
        # Rings of peers that were greeted; the engine closes them once they are attached.
        self._offered: dict[Role, RingClient] = {}
        self._serving: dict[Role, RingClient] = {}
        self._ready: set[Role] = set()

    @property
    def missing(self) -> list[Role]:
        """The workers the gpu_worker waits for."""
        return [role for role in (Role.CPU_WORKER, Role.STAGER) if role not in self._ready]

    def greet(self, role: Role) -> Init | None:
        """Makes the ring that the new peer is to serve. None where there is no room for it now: the ring of
        its predecessor may not be gone yet."""
        self._withdraw(role)
        shape = self._shape(role)
        if shape is None:
            return Init(incarnation=self._incarnation)
        purpose = f"{role}-{next(self._numbers)}"
        try:
            ring = RingClient(shape, purpose, self._incarnation, spin_s=spin_time_s())
        except ResourceError as error:
            _log.error("%s", error)
            return None
        self._offered[role] = ring
        return Init(incarnation=self._incarnation, segment=ring.descriptor, ring_tokens=self._max_tokens)

    def peer_ready(self, peer: Peer) -> None:
        """The peer serves its ring: the engine may use it."""
        ring = self._offered.pop(peer.role, None)
        if ring is not None:
            self._serving[peer.role] = ring
            self._engine.submit(AttachRing(peer.role, ring))
        self._ready.add(peer.role)
        self._on_change()

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """Ends the wait of a running step, and with it every request."""
        failure = WorkerFailedError(
            f"the {peer.role} is lost: {reason}; it is being restarted, try again soon"
        )
        self._ready.discard(peer.role)
        self._withdraw(peer.role)
        ring = self._serving.pop(peer.role, None)
        if ring is not None:
            ring.fail(failure)
            self._engine.submit(DetachRing(peer.role, failure))
        self._on_change()

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """Heartbeats say nothing here that the link has not noted."""

    def close(self) -> None:
        """Ends the wait of a running step, and removes the rings that the engine was not given."""
        for ring in self._serving.values():
            ring.fail(WorkerFailedError("the gpu_worker is stopping"))
        for role in list(self._offered):
            self._withdraw(role)

    def _withdraw(self, role: Role) -> None:
        ring = self._offered.pop(role, None)
        if ring is not None:
            ring.close()

    def _shape(self, role: Role) -> RingShape | None:
        if role is Role.CPU_WORKER:
            return expert_ring(self._config, self._max_tokens)
        if self._config.ngram is not None:
            return ngram_ring(self._config.ngram, self._max_tokens)
        return None
