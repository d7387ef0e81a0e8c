"""The cpu_worker at work: computes the expert slots that the gpu_worker submits."""

import logging
import os
import time

from cpu_worker.expert_layer import ExpertLayer, formats_of
from cpu_worker.native_slots import NativeExperts
from shared import quants
from shared.config import CpuWorkerConfig
from shared.model_config import read_model_config
from shared.native.team import Team
from shared.process import ProcessContext
from shared.ring import Arrays
from shared.ring_worker import RingWork, run_ring_worker
from shared.tensor_catalog import check_tensors
from shared.topology import cpu_set, meeting_cpu, num_threads_on
from shared.work_slots import ExpertHeader, expert_ring

_log = logging.getLogger(__name__)


class ExpertService:
    """Serves the slots of the expert ring, one at a time."""

    def __init__(self, layers: list[ExpertLayer], team: Team) -> None:
        self._layers = layers
        self._team = team

    def __call__(self, slot: Arrays) -> None:
        started = time.perf_counter_ns()
        header = slot["header"]
        num_tokens = int(header[ExpertHeader.NUM_TOKENS])
        self._layers[int(header[ExpertHeader.LAYER])].compute(
            slot["activations"][:num_tokens],
            slot["expert_ids"][:num_tokens],
            slot["expert_weights"][:num_tokens],
            slot["outputs"][:num_tokens],
            self._team,
        )
        header[ExpertHeader.COMPUTE_NS] = time.perf_counter_ns() - started


class CpuWorker:
    """The process: loads, then serves."""

    def __init__(self, context: ProcessContext[CpuWorkerConfig]) -> None:
        self._context = context

    async def run(self) -> None:
        """Runs until drained."""
        os.sched_setaffinity(0, self._cpus())
        await run_ring_worker(self._context, lambda post: self._load())

    def _load(self) -> RingWork:
        context, config = self._context, self._context.config
        model_config = read_model_config(context.model)
        check_tensors(context.model, model_config)
        kernels = quants.choose_kernels(config.cpu_kernels, config.cpu_activations)
        quants.warm(
            multiplied=formats_of(context.model, model_config.num_layers),
            on_progress=lambda done, total, name: context.report(f"compiling {name}", done / total),
        )
        layers = [ExpertLayer(context.model, layer) for layer in range(model_config.num_layers)]
        cpus = self._cpus()
        team = Team(config.pool_workers or num_threads_on(cpus), cpus)
        _log.info(
            "computes experts on CPUs %s with %d threads and %s kernels", cpus, team.num_threads, kernels
        )
        meeting = meeting_cpu()
        return RingWork(
            shape=lambda max_tokens: expert_ring(model_config, max_tokens),
            serve=ExpertService(layers, team),
            native=NativeExperts(layers, team),
            close=team.close,
            cpu=meeting if meeting in cpus else None,
            capabilities={"kernels": kernels},
        )

    def _cpus(self) -> tuple[int, ...]:
        return cpu_set(self._context.config.cpu_worker_cpus, flag="--cpu-worker-cpus", second_half=False)
