"""The work of expert slots as machine code: a slot of the ring is done without returning to Python.

Left to Python (`cpu_worker.worker`) is a slot that makes no sense or whose experts could not be had, for
which an error has to be worded, and one for which the team's memory has to grow.
"""

import functools
import resource
from collections.abc import Sequence

import numpy as np

from cpu_worker.expert_layer import ExpertLayer
from cpu_worker.expert_plan import NOT_THERE, SMALLEST_MEMORY, compute_layer
from cpu_worker.expert_pool import ExpertPool, pool_at
from cpu_worker.expert_tasks import layer_at
from shared.native.memory import carray, clock_ns, floats_at, ids_at, load, major_faults, store
from shared.native.records import Record, fields, reader, record
from shared.native.team import Team
from shared.quants.jit import compile_task
from shared.ring import RingServer
from shared.work_slots import ExpertHeader

SERVICE = fields(
    "layers",  # i64 [num_layers]: the addresses of their LAYERs
    "num_layers",
    "team",
    "memory",  # for the plan of a layer
    "memory_bytes",
    # Where the arrays of a slot begin, and how large they are.
    "header",
    "activations",
    "expert_ids",
    "expert_weights",
    "outputs",
    "disk_routes",
    "reads",
    "read_bytes",
    "failures",
    "max_tokens",
    "hidden",
    "num_used",
    "pool",  # POOL; 0 for none
    "major_faults",  # of the process, when the slot before was done
)
_service_at = reader(SERVICE)
_LAYER, _NUM_TOKENS, _COMPUTE_NS, _DISK_WAIT_NS, _NUM_READ, _MAJOR_FAULTS, _HAS_FAILED, _NUM_LOST = (
    8 * int(place) for place in ExpertHeader
)


def _compute_slot(params: int, slot: int, is_done: int, scratch: int) -> None:
    service = _service_at(params)
    started = clock_ns()
    header = slot + service.header
    layer, num_tokens = load(header + _LAYER), load(header + _NUM_TOKENS)
    if not (0 <= layer < service.num_layers and 1 <= num_tokens <= service.max_tokens):
        return
    layer_address = load(service.layers + 8 * layer)
    if layer_at(layer_address).hidden != service.hidden:
        return
    for word in (_NUM_READ, _DISK_WAIT_NS, _MAJOR_FAULTS, _HAS_FAILED, _NUM_LOST):
        store(header + word, 0)
    if service.pool != 0:
        pool = pool_at(service.pool)
        pool.disk_routes = slot + service.disk_routes
        pool.token_reads = slot + service.reads
        pool.token_read_bytes = slot + service.read_bytes
        pool.token_failures = slot + service.failures
    wide, routes = (num_tokens, service.hidden), (num_tokens, service.num_used)
    result = compute_layer(
        layer_address,
        service.team,
        service.memory,
        service.memory_bytes,
        carray(floats_at(slot + service.activations), wide),
        carray(ids_at(slot + service.expert_ids), routes),
        carray(floats_at(slot + service.expert_weights), routes),
        carray(floats_at(slot + service.outputs), wide),
    )
    if result < 0 or result > NOT_THERE:
        return
    if service.pool != 0:
        pool = pool_at(service.pool)
        store(header + _NUM_READ, pool.num_read)
        store(header + _DISK_WAIT_NS, pool.wait_ns)
        store(header + _NUM_LOST, pool.num_lost)
    if result == NOT_THERE:
        store(header + _HAS_FAILED, 1)
        return
    faults = major_faults()
    store(header + _MAJOR_FAULTS, faults - service.major_faults)
    service.major_faults = faults
    store(header + _COMPUTE_NS, clock_ns() - started)
    store(is_done, 1)


@functools.cache
def compute_slot_task() -> int:
    """Params `SERVICE`; see `shared.native.ring.serve_kernel`."""
    return compile_task(_compute_slot, "compute_expert_slot")


class NativeExperts:
    """The layers as that task sees them."""

    def __init__(self, layers: Sequence[ExpertLayer], team: Team, pool: ExpertPool | None = None) -> None:
        self.task = compute_slot_task()
        self._pool = pool
        self._layers = list(layers)
        self._team = team
        self._addresses = np.array([layer.address for layer in layers], np.int64)

    def params(self, server: RingServer) -> Record:
        """With the team's memory as it is now."""
        team, arrays, pool = self._team, server.shape.arrays, self._pool
        if pool is not None:
            pool.serve(server)
        _, (max_tokens, hidden) = arrays["activations"]
        _, (_, num_used) = arrays["expert_ids"]
        return record(
            SERVICE,
            layers=self._addresses,
            num_layers=len(self._addresses),
            team=team.address,
            memory=team.workspace(SMALLEST_MEMORY),
            memory_bytes=team.workspace_bytes,
            max_tokens=max_tokens,
            hidden=hidden,
            num_used=num_used,
            pool=pool.address if pool is not None else 0,
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            **{name: server.offsets[name] for name in arrays},
        )
