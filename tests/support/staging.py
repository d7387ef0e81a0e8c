"""Staging places and the stager that fills them, in this process: the real ring and service, a thread."""

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_worker.experts.staging import Staging
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.ring import RingClient, RingServer
from shared.work_slots import staging_ring
from stager.blob_sources import BlobSources
from stager.read_queue import NO_FAULTS, Faults
from stager.staging import StagingService
from tests.support.expert_pool import Reader
from tests.support.expert_ring import served

_numbers = itertools.count()


@dataclass(slots=True)
class Staged:
    """Both ends."""

    staging: Staging
    ring: RingClient
    server: RingServer
    reader: Reader


@contextmanager
def staged(
    file: GGUFModel,
    sources: BlobSources,
    num_places: int,
    *,
    faults: Faults = NO_FAULTS,
    timeout_s: float = 60.0,
) -> Iterator[Staged]:
    """So many places, whose blobs come from those sources or the disk."""
    layout, reader = BlobLayout(file, read_model_config(file).num_layers), Reader(4, faults)
    service = StagingService(layout, sources, lambda: reader)
    shape = staging_ring(num_places, layout.largest_place_bytes)
    ring = RingClient(shape, f"test-staging-{next(_numbers)}", secrets.token_hex(8), spin_s=0)
    try:
        with served(ring, service, None) as server:
            service.open(server)
            yield Staged(Staging(ring, layout, num_places, timeout_s), ring, server, reader)
    finally:
        # What a test has put there may know the mapped file.
        reader.before = lambda reads: None
        service.close()
        ring.close()
