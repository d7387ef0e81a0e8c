"""The gpu_worker's side of its links to cpu_worker and stager: fresh rings for each that says Hello.

A worker that was lost may only have been frozen, and go on writing when it wakes up. It then writes into the
ring it was given, which nobody reads any more; its successor has another one.
"""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.engine import AttachRing, DetachRing, Engine
from shared.errors import ResourceError, WorkerFailedError
from shared.expert_blobs import ExpertMode
from shared.link import Peer
from shared.messages import FromConnecting, Init
from shared.model_config import Qwen4ExpConfig
from shared.ring import RingClient, RingShape
from shared.run_directory import Role
from shared.topology import spin_time_s
from shared.work_slots import RingTokens, expert_ring, ngram_ring, staging_ring

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rings:
    """Those of one peer, as far as there are any."""

    main: RingClient | None = None
    staging: RingClient | None = None

    def fail(self, failure: WorkerFailedError) -> None:
        """Ends waits for them."""
        for ring in (self.main, self.staging):
            if ring is not None:
                ring.fail(failure)

    def close(self) -> None:
        """Removes them."""
        for ring in (self.main, self.staging):
            if ring is not None:
                ring.close()


class PeerListener:
    """Makes rings, and tells the engine which of them are served."""

    def __init__(
        self,
        config: Qwen4ExpConfig,
        tokens: RingTokens,
        incarnation: str,
        engine: Engine,
        on_change: Callable[[], None],
        staging_places: int = 0,
        staging_place_bytes: int = 0,
    ) -> None:
        """`tokens` is what steps have of each worker at most; `on_change` is called when a peer comes or
        goes.
        Where there are `staging_places`, the stager gets a ring for them too; they take
        `staging_place_bytes` each (`BlobLayout.largest_place_bytes`)."""
        self._config = config
        self._tokens = tokens
        self._incarnation = incarnation
        self._engine = engine
        self._on_change = on_change
        self._staging_places = staging_places
        self._staging_place_bytes = staging_place_bytes
        self._numbers = itertools.count(1)
        # Rings of peers that were greeted; the engine closes them once they are attached.
        self._offered: dict[Role, _Rings] = {}
        self._serving: dict[Role, _Rings] = {}
        self._ready: set[Role] = set()

    @property
    def missing(self) -> list[Role]:
        """The workers the gpu_worker waits for."""
        return [role for role in (Role.CPU_WORKER, Role.STAGER) if role not in self._ready]

    def greet(self, role: Role) -> Init | None:
        """Makes the rings that the new peer is to serve. None where there is no room for them now: those of
        its predecessor may not be gone yet."""
        self._withdraw(role)
        tokens = self._tokens.experts if role is Role.CPU_WORKER else self._tokens.ngrams
        shape, number, rings = self._shape(role, tokens), next(self._numbers), _Rings()
        try:
            if shape is not None:
                rings.main = self._make(shape, f"{role}-{number}", spin_time_s())
            if role is Role.STAGER and self._staging_places:
                staging = staging_ring(self._staging_places, self._staging_place_bytes)
                # Blobs are large, and those of a disk come when it has them: spinning for that is in vain.
                rings.staging = self._make(staging, f"staging-{number}", spin_s=0)
        except ResourceError as error:
            _log.error("%s", error)
            rings.close()
            return None
        if rings.main is not None or rings.staging is not None:
            self._offered[role] = rings
        return Init(
            incarnation=self._incarnation,
            segment=rings.main.descriptor if rings.main is not None else None,
            ring_tokens=tokens if rings.main is not None else 0,
            staging_segment=rings.staging.descriptor if rings.staging is not None else None,
            staging_places=self._staging_places if rings.staging is not None else 0,
        )

    def peer_ready(self, peer: Peer) -> None:
        """The peer serves its rings: the engine may use them."""
        rings = self._offered.pop(peer.role, None)
        if rings is not None:
            self._serving[peer.role] = rings
            mode = peer.capabilities.get("experts")
            experts = ExpertMode(mode) if mode in list(ExpertMode) else None
            self._engine.submit(AttachRing(peer.role, rings.main, rings.staging, experts))
        self._ready.add(peer.role)
        self._on_change()

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """Ends the wait of a running step, and with it every request."""
        failure = WorkerFailedError(
            f"the {peer.role} is lost: {reason}; it is being restarted, try again soon"
        )
        self._ready.discard(peer.role)
        self._withdraw(peer.role)
        rings = self._serving.pop(peer.role, None)
        if rings is not None:
            rings.fail(failure)
            self._engine.submit(DetachRing(peer.role, failure))
        self._on_change()

    def message(self, peer: Peer, message: FromConnecting) -> None:
        """Heartbeats say nothing here that the link has not noted."""

    def close(self) -> None:
        """Ends the wait of a running step, and removes the rings that the engine was not given."""
        for rings in self._serving.values():
            rings.fail(WorkerFailedError("the gpu_worker is stopping"))
        for role in list(self._offered):
            self._withdraw(role)

    def _withdraw(self, role: Role) -> None:
        rings = self._offered.pop(role, None)
        if rings is not None:
            rings.close()

    def _make(self, shape: RingShape, purpose: str, spin_s: float) -> RingClient:
        return RingClient(shape, purpose, self._incarnation, spin_s=spin_s)

    def _shape(self, role: Role, tokens: int) -> RingShape | None:
        if role is Role.CPU_WORKER:
            return expert_ring(self._config, tokens)
        if self._config.ngram is not None:
            return ngram_ring(self._config.ngram, tokens)
        return None
