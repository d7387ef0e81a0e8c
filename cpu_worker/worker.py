"""The cpu_worker at work: computes the expert slots that the gpu_worker submits."""

import logging
import os
import time

from cpu_worker.expert_layer import ExpertLayer, formats_of
from cpu_worker.expert_pool import ExpertPool
from cpu_worker.keeping import keep_experts
from cpu_worker.native_slots import NativeExperts
from cpu_worker.stager_link import StagerListener
from shared import quants
from shared.config import CpuWorkerConfig
from shared.expert_blobs import ExpertMode
from shared.model_config import read_model_config
from shared.native.team import Team
from shared.process import ProcessContext, major_faults
from shared.ring import Arrays
from shared.ring_worker import RingWork, run_ring_worker
from shared.tensor_catalog import check_tensors
from shared.topology import cpu_set, meeting_cpu, num_threads_on
from shared.work_slots import ExpertHeader, expert_ring

_log = logging.getLogger(__name__)

# What the gpu_worker's rings may take of shared memory: steps of more tokens than by default, twice, since
# those of a predecessor may not be gone yet. Chunks that stream through a device need n-gram rows only.
_RING_TOKENS, _RING_STEPS = 1024, 2


class ExpertService:
    """Serves the slots of the expert ring, one at a time."""

    def __init__(self, layers: list[ExpertLayer], team: Team, pool: ExpertPool | None = None) -> None:
        self._layers = layers
        self._team = team
        self._pool = pool

    def __call__(self, slot: Arrays) -> None:
        started = time.perf_counter_ns()
        header = slot["header"]
        if header[ExpertHeader.HAS_FAILED] and self._pool is not None:
            # Not computed again: what was read would be counted twice, and a slow disk waited for twice.
            header[ExpertHeader.HAS_FAILED] = 0
            raise self._pool.failure()
        header[ExpertHeader.DISK_WAIT_NS :] = 0
        num_tokens = int(header[ExpertHeader.NUM_TOKENS])
        faults = major_faults()
        if self._pool is not None:
            self._pool.book_into(slot)
        try:
            self._layers[int(header[ExpertHeader.LAYER])].compute(
                slot["activations"][:num_tokens],
                slot["expert_ids"][:num_tokens],
                slot["expert_weights"][:num_tokens],
                slot["outputs"][:num_tokens],
                self._team,
            )
        finally:
            # What was read for a slot that fails counts too.
            if self._pool is not None:
                header[ExpertHeader.NUM_READ] = self._pool.num_read
                header[ExpertHeader.DISK_WAIT_NS] = self._pool.wait_ns
                header[ExpertHeader.NUM_LOST] = self._pool.num_lost
        header[ExpertHeader.MAJOR_FAULTS] = major_faults() - faults
        header[ExpertHeader.COMPUTE_NS] = time.perf_counter_ns() - started


class CpuWorker:
    """The process: loads, then serves."""

    def __init__(self, context: ProcessContext[CpuWorkerConfig]) -> None:
        self._context = context

    async def run(self) -> None:
        """Runs until drained."""
        os.sched_setaffinity(0, self._cpus())
        await run_ring_worker(self._context, lambda post: self._load())

    def _load(self) -> list[RingWork]:
        context, config = self._context, self._context.config
        model_config = read_model_config(context.model, with_prediction=config.uses_prediction)
        check_tensors(context.model, model_config)
        kernels = quants.choose_kernels(
            config.cpu_kernels, config.cpu_activations, deterministic=config.deterministic
        )
        quants.warm(
            multiplied=formats_of(context.model, model_config.num_expert_layers),
            on_progress=lambda done, total, name: context.report(f"compiling {name}", done / total),
        )
        keeping = keep_experts(context, model_config)
        pool = keeping.pool
        layers = [ExpertLayer(context.model, layer, pool) for layer in range(model_config.num_expert_layers)]
        cpus = self._cpus()
        team = Team(config.pool_workers or num_threads_on(cpus), cpus)
        _log.info(
            "computes experts on CPUs %s with %d threads and %s kernels", cpus, team.num_threads, kernels
        )
        meeting = meeting_cpu()
        work = RingWork(
            shape=lambda init: expert_ring(model_config, init.ring_tokens),
            serve=ExpertService(layers, team, pool),
            native=NativeExperts(layers, team, pool),
            close=lambda: _close(team, keeping),
            cpu=meeting if meeting in cpus else None,
            capabilities={"kernels": kernels, **keeping.capabilities},
            listener=keeping if config.experts != ExpertMode.MAPPED else None,
        )
        return [work]

    def _cpus(self) -> tuple[int, ...]:
        return cpu_set(self._context.config.cpu_worker_cpus, flag="--cpu-worker-cpus", second_half=False)


def _close(team: Team, keeping: StagerListener) -> None:
    keeping.close()
    team.close()
