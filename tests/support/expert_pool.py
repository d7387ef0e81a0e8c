"""A pool of experts and the stager that fills it, in this process: the real ring, the real reads, a
thread."""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.expert_pool import ExpertPool
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.ring import Arrays, RingClient
from shared.work_slots import blob_ring
from stager.expert_blobs import BlobService
from stager.file_reads import FileRead, FileReader, OnDone
from tests.support.expert_ring import served

_numbers = itertools.count()


@dataclass(slots=True)
class Reader:
    """Reads as the stager does. `before` sees every batch of reads first, and may change or delay it; with
    `pause_s` each read waits so long for its turn."""

    files: FileReader = field(default_factory=lambda: FileReader(4))
    before: Callable[[list[FileRead]], None] = lambda reads: None
    pause_s: float = 0.0
    num_reads: int = 0
    num_bytes: int = 0

    def read(self, reads: Sequence[FileRead], on_done: OnDone) -> None:
        changed = list(reads)
        self.before(changed)

        def count(index: int, num_calls: int, num_bytes: int) -> None:
            self.num_reads += num_calls
            self.num_bytes += max(0, num_bytes)
            on_done(index, num_calls, num_bytes)

        if not self.pause_s:
            self.files.read(changed, count)
            return
        for index, read in enumerate(changed):
            time.sleep(self.pause_s)
            self.files.read(
                [read], lambda _, num_calls, num_bytes, index=index: count(index, num_calls, num_bytes)
            )


@dataclass(slots=True)
class Pooled:
    """The layers of a model behind a pool."""

    layers: list[ExpertLayer]
    pool: ExpertPool
    ring: RingClient
    reader: Reader


@contextmanager
def pooled(file: GGUFModel, places_per_layer: int, *, attached: bool = True) -> Iterator[Pooled]:
    """A pool of that size, with a stager behind it unless it is not `attached`."""
    config = read_model_config(file)
    layout, reader = BlobLayout(file, config.num_layers), Reader()
    pool = ExpertPool(layout, config.num_experts, places_per_layer)
    shape = blob_ring(config.num_layers, places_per_layer, layout.pool_bytes(places_per_layer))
    service = BlobService(layout, reader)  # type: ignore[arg-type]
    ring = RingClient(shape, f"test-pool-{next(_numbers)}", secrets.token_hex(8), spin_s=0)
    layers = [ExpertLayer(file, layer, pool) for layer in range(config.num_layers)]

    def work(slot: Arrays) -> None:
        service(slot)

    try:
        with served(ring, work, None) as server:
            service.open(server, places_per_layer)
            if attached:
                pool.open(ring)
            yield Pooled(layers, pool, ring, reader)
    finally:
        # What a test has put there may know the layers, and through them the mapped file.
        reader.before = lambda reads: None
        reader.files.close()
        ring.close()
