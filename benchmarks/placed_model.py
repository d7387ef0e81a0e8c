"""The model in this process as `in_process` has it, its experts in the ways of the engine: slots that RAM
plays the device for, transfers by a stager, a cpu_worker.

What is real: placement, plans, policy, staging, cache, rings. What is not there: processes (a thread serves
each ring) and the scheduler; whoever measures says what each step is of.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.in_process import InProcessModel, RunningSequence
from benchmarks.report import BenchmarkError
from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.native_slots import NativeExperts
from cpu_worker.worker import ExpertService
from gpu_worker.experts.counts import ExpertCounts, ExpertFiles
from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.experts.interface import ExpertsWay
from gpu_worker.experts.placement import LANDING_BUFFERS, ExpertPlacement, open_placement
from gpu_worker.experts.profile_store import ProfileStore
from gpu_worker.experts.recording import Recording
from gpu_worker.experts.staging import Staging
from gpu_worker.experts.three_ways import ThreeWays
from gpu_worker.experts.transfers import Transfers
from shared.config import GpuWorkerConfig
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.native.team import Team
from shared.placement.profile import model_identity
from shared.placement.trace import TraceHeader, TraceWriter
from shared.ring import Arrays, NativeWork, RingClient, RingServer, RingShape
from shared.run_directory import new_incarnation
from shared.work_slots import STAGING_PLACES, expert_ring, staging_ring
from stager.blob_sources import BlobSources
from stager.read_queue import ReadQueue
from stager.staging import StagingService

_TIMEOUT_S = 60.0
_READS = 16  # In flight at a time.


@dataclass(frozen=True, slots=True)
class StepRoutes:
    """Routes of one step: those whose expert was in a slot, and all."""

    device: int
    total: int


class PlacedModel:
    """Made by `placed_model`."""

    def __init__(self, model: InProcessModel, way: ExpertsWay, placement: ExpertPlacement | None) -> None:
        self._model = model
        self._way = way
        model.experts = way
        self.placement = placement
        self.config = model.config

    def new_sequence(self) -> RunningSequence:
        """A sequence that has not begun."""
        return self._model.new_sequence()

    def step(self, sequence: RunningSequence, token_ids: Sequence[int], *, is_prompt: bool) -> StepRoutes:
        """Appends tokens to a sequence, in a step that is a window unless it is of a prompt."""
        num_tokens = len(token_ids)
        self._way.begin_step([num_tokens], num_tokens if is_prompt else 0)
        try:
            self._model.step([(sequence, token_ids)])
        except BaseException:
            self._way.end_step(has_failed=True)
            raise
        self._way.end_step()
        (on_device, *_), _ = self._way.counts.ways_of(0, num_tokens)
        return StepRoutes(on_device, num_tokens * self.config.num_layers * self.config.num_experts_used)

    def load(self) -> None:
        """Returns when all slots have their experts. Raises BenchmarkError where they do not come."""
        if self.placement is None:
            return
        cache, deadline = self.placement.cache, time.monotonic() + _TIMEOUT_S
        while cache.is_busy:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"experts are not loaded within {_TIMEOUT_S:g} s")
            cache.pump()
            time.sleep(1e-4)
        table = cache.table
        if table.num_resident < table.num_slots:
            raise BenchmarkError(f"{table.num_resident} of {table.num_slots} slots have their experts")

    def save_profile(self, store: ProfileStore) -> None:
        """Writes how often experts were used."""
        assert self.placement is not None, "without a cache nobody counts"
        store.save(self.placement.hotness.profile())


@contextmanager
def placed_model(
    path: Path, settings: GpuWorkerConfig, max_tokens: int, *, threads: int = 1, trace: Path | None = None
) -> Iterator[PlacedModel]:
    """The model with the slots that the settings ask for (`expert_cache` 0: all experts are the
    cpu_worker's), for steps of up to `max_tokens` tokens; `trace` is written with their routes. Slots begin
    with what the settings' profile says, where there is such a file. Raises StrataError."""
    with ExitStack() as stack:
        model = InProcessModel(path, num_threads=threads)
        stack.callback(model.device.close)
        file, config, torch_device = model.file, model.config, model.device.torch_device
        store = ProfileStore(settings.expert_profile, file, config)
        placement = open_placement(settings, file, config, model.device, store, lambda *_: None)
        incarnation = new_incarnation()
        team = Team(threads)
        stack.callback(team.close)
        layers = [ExpertLayer(file, layer) for layer in range(config.num_layers)]
        work = ExpertService(layers, team), NativeExperts(layers, team)
        ring = stack.enter_context(
            _served(expert_ring(config, max_tokens), "cpu_worker", incarnation, lambda _: work)
        )
        counts = ExpertCounts(ExpertFiles.of(file, config.num_layers), max_tokens)
        cpu = CpuExperts(ring, torch_device, _TIMEOUT_S, counts)
        way: ExpertsWay = cpu
        if placement is not None:
            stack.callback(placement.close)
            layout = BlobLayout(file, config.num_layers)
            service = StagingService(layout, BlobSources(ExpertMode.MAPPED), lambda: ReadQueue(_READS))
            # Before the ring is let go, that is after its thread has ended.
            stack.callback(service.close)

            def opened(server: RingServer) -> tuple[StagingService, None]:
                service.open(server)
                return service, None

            shape = staging_ring(STAGING_PLACES, layout.largest_place_bytes)
            staging_client = stack.enter_context(_served(shape, "stager", incarnation, opened))
            staging = Staging(staging_client, layout, STAGING_PLACES, _TIMEOUT_S)
            placement.memory.pin(staging.memory)
            stack.callback(placement.memory.unpin, staging.memory)
            transfers = Transfers(
                placement.memory, placement.experts, placement.cache, staging, LANDING_BUFFERS, _TIMEOUT_S
            )
            stack.callback(transfers.close)
            placement.cache.attach(staging)
            stack.callback(placement.cache.detach)
            way = ThreeWays(placement, cpu, transfers, max_tokens)
        if trace is not None:
            header = TraceHeader.of(model_identity(file, config), config.num_experts_used)
            writer = TraceWriter(trace, header)
            stack.callback(writer.close)
            way = Recording(way, writer)
        yield PlacedModel(model, way, placement)


_Work = tuple[Callable[[Arrays], None], NativeWork | None]


@contextmanager
def _served(
    shape: RingShape, purpose: str, incarnation: str, work_of: Callable[[RingServer], _Work]
) -> Iterator[RingClient]:
    """A ring whose other end is served by a thread."""
    client = RingClient(shape, purpose, incarnation, spin_s=0)
    with contextlib.closing(client):
        server = RingServer(shape, client.descriptor, spin_s=0)
        thread = threading.Thread(target=server.serve, args=work_of(server), name=purpose, daemon=True)
        thread.start()
        try:
            yield client
        finally:
            server.stop()
            thread.join(_TIMEOUT_S)
            server.close()
