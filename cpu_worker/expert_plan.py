"""One layer's experts as one native call: groups the routes, writes the program, runs it on the team."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from cpu_worker.expert_arrivals import are_there, run_as_they_come
from cpu_worker.expert_pool import begin_results, blobs_at, enter, leave
from cpu_worker.expert_program import run_waves
from cpu_worker.expert_tasks import WAVE_ROUTES, layer_at
from cpu_worker.expert_waves import decay_uses, groups_a_wave, lay_out, plan_at, sort_routes, write_waves
from shared.native.matrices import set_plane
from shared.native.memory import floats_at
from shared.quants.jit import INTEGER, READONLY_ROWS, ROWS, compile_kernel, jitable

Compute = Callable[
    [int, int, int, int, NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]],
    int,
]

TOO_LITTLE_MEMORY = 1 << 48
"""`compute` returns this plus the number of bytes it needs."""
NOT_THERE = 1 << 47
"""What `compute` returns where experts are not in the pool, and there is nobody who brings them."""
SMALLEST_MEMORY = 4096
"""Enough to find out how much is needed."""


@jitable
def compute_layer(
    layer_address: int,
    team: int,
    memory: int,
    memory_bytes: int,
    x: Any,
    expert_ids: Any,
    route_weights: Any,
    out: Any,
) -> int:
    """Native: computes a layer's experts for all tokens of a step.

    Addresses of a LAYER, of a team (`Team.address`) and of at least SMALLEST_MEMORY bytes, 64-byte aligned;
    x float32 [tokens, hidden], expert_ids int32 [tokens, chosen], weights float32 [tokens, chosen] and out
    float32 [tokens, hidden], all C-contiguous. Returns the number of experts computed; or, having written
    nothing to `out`, -1 - expert where that one does not exist, and TOO_LITTLE_MEMORY + the bytes it needs
    where there are fewer; or NOT_THERE where experts cannot be had, for which the pool knows the reason. One
    that cannot be read costs the tokens that chose it, which are booked (`cpu_worker.expert_pool`).
    """
    layer = layer_at(layer_address)
    if layer.blobs != 0:
        begin_results(blobs_at(layer.blobs).pool)
    num_tokens, num_chosen = expert_ids.shape
    needed_bytes = lay_out(memory, layer_address, num_tokens, num_chosen)
    if needed_bytes > memory_bytes:
        return TOO_LITTLE_MEMORY + needed_bytes
    num_routes = sort_routes(memory, layer.num_experts, expert_ids, route_weights)
    if num_routes < 0:
        return num_routes
    out_address = out.ctypes.data
    if num_routes == 0:
        sums = floats_at(out_address)
        for i in range(num_tokens * layer.hidden):
            sums[i] = 0
        return 0
    plan = plan_at(memory)
    set_plane(plan.step_plane, x.ctypes.data, plan.step_codes, num_tokens, layer.hidden)
    if layer.blobs == 0:
        num_waves, num_experts = write_waves(memory, layer_address, out_address, WAVE_ROUTES)
        run_waves(memory, layer_address, team, num_waves)
    else:
        pool = blobs_at(layer.blobs).pool
        if not enter(pool):
            return NOT_THERE
        if are_there(memory, layer_address):
            num_waves, num_experts = write_waves(memory, layer_address, out_address, WAVE_ROUTES)
            run_waves(memory, layer_address, team, num_waves)
            is_done = True
        else:
            most = groups_a_wave(layer_address)
            num_waves, num_experts = write_waves(memory, layer_address, out_address, most)
            is_done = run_as_they_come(memory, layer_address, team, num_waves)
        leave(pool)
        if not is_done:
            return NOT_THERE
    decay_uses(layer_address, num_tokens)
    return num_experts


def _compute(
    layer: int,
    team: int,
    memory: int,
    memory_bytes: int,
    x: Any,
    expert_ids: Any,
    route_weights: Any,
    out: Any,
) -> int:
    return compute_layer(layer, team, memory, memory_bytes, x, expert_ids, route_weights, out)


@functools.cache
def compute() -> Compute:
    """`compute_layer` as a function for Python."""
    ids = types.Array(types.int32, 2, "C", readonly=True)
    arrays = READONLY_ROWS, ids, READONLY_ROWS, ROWS
    return compile_kernel(_compute, "compute_experts", *4 * (INTEGER,), *arrays)
