"""The rings of the other workers, and the ways that the model takes through them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpu_worker.experts.counts import ExpertCounts, ExpertFiles
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.experts.gauges import ExpertGauges
from gpu_worker.experts.interface import ExpertsWay
from gpu_worker.experts.placement import LANDING_BUFFERS, ExpertPlacement
from gpu_worker.experts.recording import Recording
from gpu_worker.experts.staging import Staging
from gpu_worker.experts.three_ways import ThreeWays
from gpu_worker.experts.transfers import Transfers
from gpu_worker.ngram_way import StagedFeatures
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.model_config import Qwen4ExpConfig
from shared.placement.trace import TraceWriter
from shared.ring import RingClient
from shared.run_directory import Role
from shared.work_slots import STAGING_PLACES

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ways:
    """What the model needs from other processes."""

    experts: ExpertsWay
    ngram: StagedFeatures | None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where in the model's files that lies which other processes read: `layout` of experts, and the name of
    the file with the n-gram table, empty where there is none."""

    experts: ExpertFiles
    layout: BlobLayout
    ngram: str


class AttachedWorkers:
    """Who serves which ring. `ways` are there once all that the model needs are attached."""

    def __init__(
        self,
        config: Qwen4ExpConfig,
        torch_device: torch.device,
        files: ModelFiles,
        max_tokens: int,
        timeout_s: float,
        placement: ExpertPlacement | None = None,
        recorder: TraceWriter | None = None,
    ) -> None:
        """Steps have up to `max_tokens` tokens; a wait for a worker ends after `timeout_s` without progress.
        `placement` is there where experts are to be on the device, `recorder` where routes are written
        down."""
        self._config = config
        self._torch_device = torch_device
        self._files = files
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._placement = placement
        self._recorder = recorder
        self._counts = ExpertCounts(files.experts, max_tokens)
        self._rings: dict[Role, RingClient] = {}
        self._staging_ring: RingClient | None = None
        self._staging: Staging | None = None
        self._transfers: Transfers | None = None
        self.ways: Ways | None = None
        """None while a worker is missing."""

    def attach(
        self,
        role: Role,
        ring: RingClient | None,
        staging: RingClient | None = None,
        experts: ExpertMode | None = None,
    ) -> None:
        """A worker serves these rings from now on; `experts` is how the cpu_worker keeps them."""
        if role is Role.CPU_WORKER and self._placement is not None:
            self._placement.cache.keeps_lent = experts not in (None, ExpertMode.RESIDENT)
        if ring is not None:
            self._rings[role] = ring
        if staging is not None:
            self._staging_ring = staging
            self._begin_staging(staging)
        self.ways = self._complete()

    def detach(self, role: Role) -> None:
        """The worker is lost: its rings are closed."""
        self.ways = None
        if role is Role.STAGER:
            self._end_staging()
        if role in self._rings:
            self._rings.pop(role).close()

    def close(self) -> None:
        """Lets everything go."""
        self.ways = None
        self._end_staging()
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def set_in_use(self, is_in_use: bool) -> None:
        """Tells the workers whether there will be work soon."""
        for ring in self._all():
            ring.set_in_use(is_in_use)

    def describe(self) -> Iterator[str]:
        """What each worker is at, for the log."""
        for role, ring in self._rings.items():
            yield f"the {role} {ring.describe()}"
        if self._staging_ring is not None:
            yield f"the {Role.STAGER}, for experts, {self._staging_ring.describe()}"

    def claim_context(self, num_bytes: int) -> None:
        """Before a step: so much do keys and values take after it."""
        if self._placement is not None and self.ways is not None:
            self._placement.claim_context(num_bytes)

    def rest(self, context_bytes: int) -> None:
        """There is nothing to compute, and keys and values take so much: slots that were lent are filled
        again meanwhile."""
        placement = self._placement
        if placement is None or not placement.cache.lent_bytes:
            return
        if self._transfers is not None and self._transfers.has_extra:
            self._transfers.set_extra(0)
        placement.claim_context(context_bytes)
        placement.claim_work_space(0)

    @property
    def has_lent(self) -> bool:
        """Whether slots are lent."""
        return self._placement is not None and self._placement.cache.lent_bytes > 0

    def go_on_loading(self) -> bool:
        """Takes the loading of experts as far as it goes; whether there is more to come."""
        if self._placement is None:
            return False
        cache = self._placement.cache
        cache.pump()
        return cache.is_busy

    def gauges(self) -> ExpertGauges:
        """How experts are placed; called from any thread."""
        return self._placement.gauges() if self._placement is not None else ExpertGauges()

    def _all(self) -> list[RingClient]:
        return [*self._rings.values(), *([self._staging_ring] if self._staging_ring is not None else [])]

    def _begin_staging(self, ring: RingClient) -> None:
        placement = self._placement
        if placement is None:
            return
        staging = Staging(ring, self._files.layout, STAGING_PLACES, self._timeout_s)
        placement.memory.pin(staging.memory)
        self._staging = staging
        self._transfers = Transfers(
            placement.memory, placement.experts, placement.cache, staging, LANDING_BUFFERS, self._timeout_s
        )
        placement.cache.attach(staging)

    def _end_staging(self) -> None:
        """Nothing of the stager's memory is used any more when this returns."""
        if self._placement is not None and self._staging is not None:
            self._placement.cache.detach()
            if self._transfers is not None:
                self._transfers.close()
            self._placement.claim_work_space(0)
            self._placement.memory.unpin(self._staging.memory)
        self._staging = self._transfers = None
        if self._staging_ring is not None:
            self._staging_ring.close()
            self._staging_ring = None

    def _complete(self) -> Ways | None:
        experts_ring, ngram_ring = self._rings.get(Role.CPU_WORKER), self._rings.get(Role.STAGER)
        config = self._config.ngram
        lacks_staging = self._placement is not None and self._transfers is None
        if experts_ring is None or (config is not None and ngram_ring is None) or lacks_staging:
            return None
        cpu = CpuExperts(experts_ring, self._torch_device, self._timeout_s, self._counts)
        experts: ExpertsWay = cpu
        if self._placement is not None and self._transfers is not None:
            experts = ThreeWays(self._placement, cpu, self._transfers, self._max_tokens)
        if self._recorder is not None:
            experts = Recording(experts, self._recorder)
        features = None
        if ngram_ring is not None and config is not None:
            num_heads = len(config.head_vocab_sizes)
            features = StagedFeatures(
                ngram_ring, self._torch_device, self._timeout_s, self._files.ngram, num_heads
            )
        return Ways(experts, features)
