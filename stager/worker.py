"""The stager at work: serves the gpu_worker's rings of n-gram features and of staging places and the
cpu_worker's blob ring, and takes the gateway's hints."""

import logging
import os
import time
from collections.abc import Callable

import numpy as np

from shared import quants
from shared.config import StagerConfig
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.messages import ForgetPrompt, FromBinding, Init, Message, StagePrompt
from shared.model_config import NgramConfig, read_model_config
from shared.process import ProcessContext
from shared.ring import Arrays, RingShape
from shared.ring_worker import RingWork, run_ring_worker
from shared.tensor_catalog import NGRAM_TABLE, check_tensors
from shared.topology import cpu_set
from shared.work_slots import NgramHeader, blob_ring, ngram_ring, staging_ring
from stager.blob_sources import BlobSources
from stager.expert_blobs import BlobService
from stager.native_slots import NativeNgrams
from stager.ngram_rows import MAX_ROWS, RowReader
from stager.ngram_table import NgramTable, TableOptions
from stager.prefetch import TOKENS_PER_PIECE, PromptPrefetcher
from stager.ram_residency import RamResidency
from stager.read_queue import Faults, ReadQueue
from stager.staging import StagingService

_log = logging.getLogger(__name__)


class NgramSlots:
    """Serves slots of the n-gram ring that machine code left alone, or says what is wrong with them."""

    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    def __call__(self, slot: Arrays) -> None:
        """Raises ValueError for a slot that makes no sense."""
        started, rows = time.perf_counter_ns(), self._rows
        num_tokens = int(slot["header"][NgramHeader.NUM_TOKENS])
        windows = slot["windows"][:num_tokens]
        most = min(rows.max_tokens, len(slot["windows"]))
        if not 1 <= num_tokens <= most or (windows[:, 0] < 0).any():
            raise ValueError(
                f"a slot of {num_tokens} tokens (1 to {most} are possible), "
                f"the first window {slot['windows'][0].tolist()}"
            )
        slot["features"][:num_tokens] = rows.features(np.ascontiguousarray(windows))
        for name, counts in rows.counts_of_tokens.items():
            slot[name][:num_tokens] = counts[:num_tokens]
        slot["header"][NgramHeader.SERVE_NS] = time.perf_counter_ns() - started
        slot["header"][NgramHeader.DISK_WAIT_NS] = rows.wait_ns


class NgramService:
    """Serves n-gram features to steps, and stages those of prompts."""

    def __init__(self, table: NgramTable, config: NgramConfig, post: Callable[[Message], None]) -> None:
        self._table = table
        most_tokens = MAX_ROWS // len(config.head_vocab_sizes)
        self._reader = self._new_reader(config, most_tokens, is_staging=False)
        self._readers = [self._reader]
        self.prefetcher: PromptPrefetcher | None = None
        if table.cache is not None:
            staging = self._new_reader(config, TOKENS_PER_PIECE, is_staging=True)
            self._readers.append(staging)
            self.prefetcher = PromptPrefetcher(
                staging, config, table.path.name, table.cache.num_places, lambda: self._reader.num_rows, post
            )
        self.work = RingWork(
            shape=lambda init: ngram_ring(config, init.ring_tokens),
            serve=NgramSlots(self._reader),
            close=self._close,
            native=NativeNgrams(self._reader, config.ngram_size),
            capabilities={
                **table.capabilities(),
                "io_backend": self._reader.queue.backend.name.lower(),
            },
        )

    def gauges(self) -> dict[str, float]:
        """What was read and found so far."""
        counts = [reader.queue.counts for reader in self._readers]
        cache = self._table.cache
        return {
            "ngram_rows": float(sum(reader.num_rows for reader in self._readers)),
            "ngram_row_hits": float(sum(reader.num_hits for reader in self._readers)),
            "ngram_row_failures": float(sum(reader.num_failures for reader in self._readers)),
            "ngram_cached_rows": float(cache.num_present if cache is not None else 0),
            "ngram_evicted_rows": float(cache.num_evicted if cache is not None else 0),
            "ngram_reads": float(sum(count.num_reads for count in counts)),
            "ngram_read_bytes": float(sum(count.num_bytes for count in counts)),
        }

    def _new_reader(self, config: NgramConfig, max_tokens: int, *, is_staging: bool) -> RowReader:
        queue = ReadQueue(self._table.depth, self._table.faults)
        return RowReader(self._table, config, queue, max_tokens, is_staging=is_staging)

    def _close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.stop()
        for reader in self._readers:
            reader.close()
        self._table.close()


class Stager:
    """The process: loads, then serves."""

    def __init__(self, context: ProcessContext[StagerConfig]) -> None:
        self._context = context
        config = context.config
        self._faults = Faults(delay_s=config.io_delay_ms / 1000, fail_every=config.io_fail_every)
        self._prefetcher: PromptPrefetcher | None = None
        self._sources = BlobSources()

    async def run(self) -> None:
        """Runs until drained."""
        config = self._context.config
        os.sched_setaffinity(0, cpu_set(config.stager_cpus, flag="--stager-cpus", second_half=True))
        keeps_experts = config.experts != ExpertMode.MAPPED
        if not keeps_experts:
            self._sources.mode = ExpertMode.MAPPED
        await run_ring_worker(
            self._context, self._load, self._hint, load_first=self._load_blobs if keeps_experts else None
        )

    def _load(self, post: Callable[[Message], None]) -> list[RingWork]:
        """What is done for the gpu_worker."""
        model_config = read_model_config(
            self._context.model, with_prediction=self._context.config.uses_prediction
        )
        check_tensors(self._context.model, model_config)
        # Only the trunk's experts are ever on the device.
        staging = self._load_staging(BlobLayout(self._context.model, model_config.num_layers))
        if model_config.ngram is None:
            return [staging]
        return [self._load_ngrams(model_config.ngram, post), staging]

    def _load_ngrams(self, ngram: NgramConfig, post: Callable[[Message], None]) -> RingWork:
        context, config = self._context, self._context.config
        context.report("compiling the decoder of the n-gram table", 0.1)
        table_format = quants.block_format(context.model.info(NGRAM_TABLE).type.type_id)
        quants.warm(gathered=[table_format])
        options = TableOptions(config.ple_io, config.ple_cache_bytes, config.io_depth, self._faults)
        table = NgramTable(context.model, options, context.report)
        service = NgramService(table, ngram, post)
        self._prefetcher = service.prefetcher
        context.measure = service.gauges
        return service.work

    def _load_staging(self, layout: BlobLayout) -> RingWork:
        depth = self._context.config.io_depth
        service = StagingService(layout, self._sources, lambda: ReadQueue(depth, self._faults))
        return RingWork(
            shape=lambda init: staging_ring(init.staging_places, layout.largest_place_bytes),
            serve=service,
            close=service.close,
            opened=lambda ring, init: service.open(ring),
            closed=service.close,
            segment=lambda init: init.staging_segment,
        )

    def _load_blobs(self, post: Callable[[Message], None]) -> list[RingWork]:
        """What is done for the cpu_worker: experts are read when it asks, or all of them before it begins."""
        context = self._context
        config = read_model_config(context.model, with_prediction=context.config.uses_prediction)
        num_layers = config.num_expert_layers
        layout = BlobLayout(context.model, num_layers)
        service = BlobService(layout, ReadQueue(context.config.io_depth, self._faults), self._sources)
        residency = RamResidency(context.model, num_layers, context.report)

        def shape(init: Init) -> RingShape:
            return blob_ring(num_layers, init.places_per_layer, layout.pool_bytes(init.places_per_layer))

        def prepare(init: Init) -> None:
            if init.experts == ExpertMode.RESIDENT:
                residency.hold(is_required=context.config.experts == ExpertMode.RESIDENT)
            self._sources.mode = ExpertMode(init.experts)

        def release() -> None:
            self._sources.mode = None
            residency.release()

        work = RingWork(
            shape=shape,
            serve=service,
            close=service.close,
            prepare=prepare,
            release=release,
            opened=lambda ring, init: service.open(ring, init.places_per_layer),
            closed=service.forget_ring,
        )
        return [work]

    def _hint(self, message: FromBinding) -> None:
        if self._prefetcher is None:
            return
        match message:
            case StagePrompt(request_id=request_id, prompt_token_ids=token_ids):
                self._prefetcher.stage(request_id, token_ids)
            case ForgetPrompt(request_id=request_id):
                self._prefetcher.forget(request_id)
            case _:
                _log.error("the gateway sent a %s, which is not for a stager", type(message).__name__)
