"""A pool of experts and the stager that fills it, in this process: the real ring, the real reads, a
thread."""

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.expert_pool import ExpertPool
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.native.records import Record
from shared.ring import Arrays, RingClient
from shared.work_slots import blob_ring
from stager.blob_sources import BlobSources
from stager.expert_blobs import BlobService
from stager.read_queue import NO_FAULTS, Faults, ReadQueue
from tests.support.expert_ring import served

_numbers = itertools.count()


class Reader(ReadQueue):
    """Reads as the stager does. `before` sees every batch of reads first, and may change or delay it."""

    def __init__(self, depth: int, faults: Faults) -> None:
        super().__init__(depth, faults)
        self.before: Callable[[Record], None] = lambda reads: None

    @property
    def num_reads(self) -> int:
        return self.counts.num_reads

    @property
    def num_bytes(self) -> int:
        return self.counts.num_bytes

    def run(self, reads: Record, on_read: int | None = None, params: int = 0) -> None:
        self.before(reads)
        super().run(reads, on_read, params)


@dataclass(slots=True)
class Pooled:
    """The layers of a model behind a pool."""

    layers: list[ExpertLayer]
    pool: ExpertPool
    ring: RingClient
    reader: Reader
    sources: BlobSources


@contextmanager
def pooled(
    file: GGUFModel,
    places_per_layer: int,
    *,
    attached: bool = True,
    depth: int = 4,
    faults: Faults = NO_FAULTS,
) -> Iterator[Pooled]:
    """A pool of that size, with a stager behind it unless it is not `attached`."""
    config = read_model_config(file)
    layout, reader = BlobLayout(file, config.num_expert_layers), Reader(depth, faults)
    pool = ExpertPool(layout, config.num_experts, places_per_layer)
    shape = blob_ring(config.num_expert_layers, places_per_layer, layout.pool_bytes(places_per_layer))
    sources = BlobSources(ExpertMode.POOL)
    service = BlobService(layout, reader, sources)
    ring = RingClient(shape, f"test-pool-{next(_numbers)}", secrets.token_hex(8), spin_s=0)
    layers = [ExpertLayer(file, layer, pool) for layer in range(config.num_expert_layers)]

    def work(slot: Arrays) -> None:
        service(slot)

    try:
        with served(ring, work, None) as server:
            service.open(server, places_per_layer)
            if attached:
                pool.open(ring)
            yield Pooled(layers, pool, ring, reader, sources)
    finally:
        # What a test has put there may know the layers, and through them the mapped file.
        reader.before = lambda reads: None
        service.close()
        ring.close()
