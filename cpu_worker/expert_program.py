"""The program of one layer's experts, for waves 0 to n - 1 (`cpu_worker.expert_tasks` says what the tasks
do)::

    step 0        round the activations
    step 1        gather wave 0
    step 2        gate_up wave 0,      gather wave 1
    step 3        gate_up wave 1,      gather wave 2,      down wave 0
    ...
    step n + 2                                             down wave n - 1

A step overlaps the stages of three waves, so that the end of a wave leaves no thread without work; every
other wave therefore uses the same buffers. Steps without items (tokens that lie side by side need no
gathering) cost nothing. For one token this is: round, gate_up, down.

`enter_...` write entries from an address on, and return where they end and what they cost in ns.
"""

from cpu_worker.expert_tasks import GROUP_STRIDE, PARTIAL_BYTES, gather_at, group_at, layer_at, wave_at
from cpu_worker.expert_waves import GATHER_AT, WAVE_STRIDE, plan_at, set_weights
from shared.native.matrices import (
    ROUNDED_AT_ONCE,
    ROUNDING_NS,
    UNITS_A_THREAD,
    grain_of,
    row_cost_ns,
    unit_cost_ns,
)
from shared.native.program import ENTRY_BYTES, seal_entries, set_entry
from shared.native.team import num_threads, run_entries
from shared.quants.jit import jitable
from shared.quants.matrix import GROUP as QUANT_GROUP

# What a thread takes for a route that is gathered. Rough, as all costs.
_ROUTE_NS = 500.0
_GATHERED_AT_ONCE = 16
# Each unit goes through all experts of the wave, which is cheaper with more columns at a time.
_DOWN_UNITS_A_THREAD = 8
# Where a kernel's tiles begin, and what activations share a scale.
_DOWN_MULTIPLE = 16
_GATE_UP_MULTIPLE = 32


@jitable
def groups_row_ns(wave_address: int, width: int) -> float:
    """What one row of every group's matrix costs together."""
    wave = wave_at(wave_address)
    return row_cost_ns(width, wave.num_groups, wave.num_routes)


@jitable
def enter_rounding(memory: int, layer_address: int, entry: int) -> tuple[int, float]:
    """Step 0, if there is anything to round. As all that follow: writes entries from an address on; returns
    where they end, and what they cost in ns."""
    plan, layer = plan_at(memory), layer_at(layer_address)
    if layer.activation_bytes == 0:
        return entry, 0.0
    num_groups = plan.num_tokens * (layer.hidden // QUANT_GROUP)
    end = set_entry(entry, layer.quantise_task, plan.step_plane, num_groups, ROUNDED_AT_ONCE, 0)
    return end, num_groups * ROUNDING_NS


@jitable
def enter_gather(memory: int, layer_address: int, number: int, entry: int, step: int) -> tuple[int, float]:
    """The gathering of one wave."""
    gather_address = plan_at(memory).waves + number * WAVE_STRIDE + GATHER_AT
    num_routes = gather_at(gather_address).num_routes
    gather_task = layer_at(layer_address).gather
    return set_entry(
        entry, gather_task, gather_address, num_routes, _GATHERED_AT_ONCE, step
    ), num_routes * _ROUTE_NS


@jitable
def enter_gate_up(group_address: int, unit_ns: float, entry: int, step: int) -> int:
    """One group's gate_up in units of about that cost."""
    group = group_at(group_address)
    layer = layer_at(group.layer)
    row_ns = 2 * row_cost_ns(layer.hidden, 1, group.num_routes)
    grain = grain_of(row_ns, unit_ns, _GATE_UP_MULTIPLE)
    return set_entry(entry, layer.gate_up, group_address, layer.width, grain, step)


@jitable
def enter_gate_ups(
    memory: int, layer_address: int, number: int, entry: int, step: int, threads: int
) -> tuple[int, float]:
    """Those of a whole wave."""
    address = plan_at(memory).waves + number * WAVE_STRIDE
    wave, layer = wave_at(address), layer_at(layer_address)
    wave_ns = 2 * layer.width * groups_row_ns(address, layer.hidden)
    unit_ns = unit_cost_ns(wave_ns, threads * UNITS_A_THREAD)
    for place in range(wave.num_groups):
        entry = enter_gate_up(wave.groups + place * GROUP_STRIDE, unit_ns, entry, step)
    return entry, wave_ns


@jitable
def enter_down(
    memory: int, layer_address: int, number: int, entry: int, step: int, threads: int
) -> tuple[int, float]:
    """The sums of one wave."""
    address = plan_at(memory).waves + number * WAVE_STRIDE
    layer = layer_at(layer_address)
    row_ns = groups_row_ns(address, layer.width)
    unit_ns = unit_cost_ns(layer.hidden * row_ns, threads * _DOWN_UNITS_A_THREAD)
    most = PARTIAL_BYTES // (4 * wave_at(address).num_routes)
    grain = grain_of(row_ns, min(unit_ns, most * row_ns), _DOWN_MULTIPLE)
    return set_entry(entry, layer.down, address, layer.hidden, grain, step), layer.hidden * row_ns


@jitable
def run(team: int, entries: int, end: int, cost_ns: float) -> None:
    num_entries = (end - entries) // ENTRY_BYTES
    run_entries(team, entries, num_entries, seal_entries(entries, num_entries), int(cost_ns))


@jitable
def run_waves(memory: int, layer_address: int, team: int, num_waves: int) -> None:
    """All waves as one program: every weight is there."""
    plan, threads = plan_at(memory), num_threads(team)
    for number in range(num_waves):
        wave = wave_at(plan.waves + number * WAVE_STRIDE)
        for place in range(wave.num_groups):
            set_weights(wave.groups + place * GROUP_STRIDE)
    entry, cost_ns = enter_rounding(memory, layer_address, plan.entries)
    for step in range(1, num_waves + 3):
        if 2 <= step <= num_waves + 1:
            entry, ns = enter_gate_ups(memory, layer_address, step - 2, entry, step, threads)
            cost_ns += ns
        if 1 <= step <= num_waves:
            entry, ns = enter_gather(memory, layer_address, step - 1, entry, step)
            cost_ns += ns
        if step >= 3:
            entry, ns = enter_down(memory, layer_address, step - 3, entry, step, threads)
            cost_ns += ns
    run(team, plan.entries, entry, cost_ns)
