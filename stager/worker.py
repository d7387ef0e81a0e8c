"""The stager at work: serves the n-gram ring of the gpu_worker and the blob ring of the cpu_worker, and takes
the gateway's hints."""

import logging
import os
import time

from shared import quants
from shared.config import StagerConfig
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.messages import ForgetPrompt, FromBinding, Init, StagePrompt
from shared.model_config import read_model_config
from shared.process import ProcessContext
from shared.ring import Arrays, RingShape
from shared.ring_worker import RingWork, run_ring_worker
from shared.tensor_catalog import NGRAM_TABLE, check_tensors
from shared.topology import cpu_set
from shared.work_slots import NgramHeader, blob_ring, ngram_ring
from stager.expert_blobs import BlobService
from stager.file_reads import FileReader
from stager.native_slots import NativeNgrams
from stager.ngram_hash import NgramHash
from stager.ngram_table import NgramTable
from stager.prefetch import PromptPrefetcher
from stager.ram_residency import RamResidency

_log = logging.getLogger(__name__)


class NgramReader:
    """Fills the slots of the n-gram ring."""

    def __init__(self, table: NgramTable, ngram_hash: NgramHash) -> None:
        self._table = table
        self._hash = ngram_hash

    def __call__(self, slot: Arrays) -> None:
        started = time.perf_counter_ns()
        num_tokens = int(slot["header"][NgramHeader.NUM_TOKENS])
        rows = self._hash.rows(slot["windows"][:num_tokens])
        slot["features"][:num_tokens] = self._table.features(rows)
        slot["header"][NgramHeader.SERVE_NS] = time.perf_counter_ns() - started


class Stager:
    """The process: loads, then serves."""

    def __init__(self, context: ProcessContext[StagerConfig]) -> None:
        self._context = context
        self._prefetcher: PromptPrefetcher | None = None

    async def run(self) -> None:
        """Runs until drained."""
        config = self._context.config
        os.sched_setaffinity(0, cpu_set(config.stager_cpus, flag="--stager-cpus", second_half=True))
        keeps_experts = config.experts != ExpertMode.MAPPED
        await run_ring_worker(
            self._context, self._load, self._hint, load_first=self._load_blobs if keeps_experts else None
        )

    def _load(self) -> RingWork | None:
        model = self._context.model
        model_config = read_model_config(model)
        check_tensors(model, model_config)
        ngram = model_config.ngram
        if ngram is None:
            return None
        self._context.report("compiling the decoder of the n-gram table", 0.5)
        table_format = quants.block_format(model.info(NGRAM_TABLE).type.type_id)
        quants.warm(decoded=[table_format], gathered=[table_format])
        table, ngram_hash = NgramTable(model, ngram), NgramHash(ngram)
        self._prefetcher = prefetcher = PromptPrefetcher(table, ngram_hash, ngram)
        return RingWork(
            shape=lambda init: ngram_ring(ngram, init.ring_tokens),
            serve=NgramReader(table, ngram_hash),
            close=prefetcher.stop,
            native=NativeNgrams(table, ngram),
        )

    def _load_blobs(self) -> RingWork:
        """What is done for the cpu_worker: experts are read when it asks, or all of them before it begins."""
        context = self._context
        num_layers = read_model_config(context.model).num_layers
        layout, reader = BlobLayout(context.model, num_layers), FileReader()
        service = BlobService(layout, reader)
        residency = RamResidency(context.model, num_layers, context.report)

        def shape(init: Init) -> RingShape:
            return blob_ring(num_layers, init.places_per_layer, layout.pool_bytes(init.places_per_layer))

        def prepare(init: Init) -> None:
            if init.experts == ExpertMode.RESIDENT:
                residency.hold(is_required=context.config.experts == ExpertMode.RESIDENT)

        return RingWork(
            shape=shape,
            serve=service,
            close=reader.close,
            prepare=prepare,
            release=residency.release,
            opened=lambda ring, init: service.open(ring, init.places_per_layer),
        )

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
