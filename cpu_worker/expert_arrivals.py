"""Computes a layer some of whose experts are not in the pool: asks for them, and takes each as it comes.

Waves are computed one after the other. Of a wave, `gate_up` of an expert begins when its blob is there, and
`down` when all of them were computed: sums are taken in the same order as always, so that timing changes no
bit. The blobs of later waves are asked for as early as there are places for them.

Where a blob cannot be read, the others are computed all the same: tokens that did not choose that expert have
their sums.
"""

import errno

from cpu_worker.expert_pool import (
    ask,
    await_arrival,
    begin_step,
    blobs_at,
    book,
    give_up,
    lose,
    need,
    pool_at,
    send,
    state_of,
)
from cpu_worker.expert_program import (
    enter_down,
    enter_gate_up,
    enter_gather,
    enter_rounding,
    groups_row_ns,
    run,
)
from cpu_worker.expert_tasks import GROUP_STRIDE, group_at, layer_at, wave_at
from cpu_worker.expert_waves import WAVE_STRIDE, plan_at, set_weights
from shared.native.matrices import UNITS_A_THREAD, row_cost_ns, unit_cost_ns
from shared.native.memory import integers_at, load_shared
from shared.native.team import num_threads
from shared.quants.jit import jitable
from shared.work_slots import THERE

_CANCELED = -errno.ECANCELED


@jitable
def are_there(memory: int, layer_address: int) -> bool:
    """Whether every expert that was chosen is in the pool."""
    layer = layer_at(layer_address)
    counts, start = integers_at(plan_at(memory).counts), 0
    for expert in range(layer.num_experts):
        if counts[expert] > start and state_of(layer.blobs, expert) != THERE:
            return False
        start = counts[expert]
    return True


@jitable
def _note_needs(memory: int, layer_address: int, num_waves: int) -> None:
    """Tells the pool which waves need which experts."""
    plan, pool = plan_at(memory), blobs_at(layer_at(layer_address).blobs).pool
    begin_step(pool, plan.num_tokens)
    for number in range(num_waves):
        wave = wave_at(plan.waves + number * WAVE_STRIDE)
        for place in range(wave.num_groups):
            need(pool, group_at(wave.groups + place * GROUP_STRIDE).expert, number)


@jitable
def _ask_for_wave(memory: int, layer_address: int, number: int, present: int) -> bool:
    """Asks for what a wave needs while the wave `present` is at hand: all of it, if it is that one. Whether
    it got that."""
    wave, layer = wave_at(plan_at(memory).waves + number * WAVE_STRIDE), layer_at(layer_address)
    for place in range(wave.num_groups):
        expert = group_at(wave.groups + place * GROUP_STRIDE).expert
        if not ask(layer.blobs, layer.uses, expert, present, number == present):
            return False
    return True


@jitable
def _enter_arrived(
    memory: int, layer_address: int, number: int, entry: int, step: int, threads: int
) -> tuple[int, float, int]:
    """gate_up of those groups of a wave whose experts have come since; returns also how many groups are still
    due, -1 where the stager is ending. Those whose experts cannot be read are left out."""
    address = plan_at(memory).waves + number * WAVE_STRIDE
    wave, layer = wave_at(address), layer_at(layer_address)
    wave_ns = 2 * layer.width * groups_row_ns(address, layer.hidden)
    num_due, cost_ns, tokens = 0, 0.0, wave.tokens
    for place in range(wave.num_groups):
        group_address = wave.groups + place * GROUP_STRIDE
        group = group_at(group_address)
        of_group, tokens = tokens, tokens + group.num_routes * 4
        if group.is_due == 0:
            continue
        state = state_of(layer.blobs, group.expert)
        if state == _CANCELED:
            give_up(layer.blobs)
            return entry, cost_ns, -1
        if state < 0:
            lose(layer.blobs, group.expert, of_group, group.num_routes)
            group.is_due = 0
            group.down_weights = 0
            continue
        if state != THERE:
            num_due += 1
            continue
        group.is_due = 0
        set_weights(group_address)
        # A few at a time: each is divided among all threads.
        unit_ns = unit_cost_ns(wave_ns / wave.num_groups, threads * UNITS_A_THREAD)
        entry = enter_gate_up(group_address, unit_ns, entry, step)
        cost_ns += 2 * layer.width * row_cost_ns(layer.hidden, 1, group.num_routes)
    return entry, cost_ns, num_due


@jitable
def _run_wave(memory: int, layer_address: int, team: int, number: int) -> bool:
    """One wave, each group when its expert is there, all sums at the end; False where there is no stager any
    more."""
    plan, threads = plan_at(memory), num_threads(team)
    pool_address = blobs_at(layer_at(layer_address).blobs).pool
    entry, cost_ns = plan.entries, 0.0
    if number == 0:
        entry, cost_ns = enter_rounding(memory, layer_address, entry)
    entry, ns = enter_gather(memory, layer_address, number, entry, 1)
    cost_ns += ns
    while True:
        # Looked at before the states: what arrives after that is not slept through.
        arrived = load_shared(pool_at(pool_address).arrived)
        before = entry
        entry, ns, num_due = _enter_arrived(memory, layer_address, number, entry, 2, threads)
        cost_ns += ns
        if num_due < 0:
            return False
        has_come = entry != before
        if num_due == 0:
            entry, ns = enter_down(memory, layer_address, number, entry, 3, threads)
            cost_ns += ns
        if entry != plan.entries:
            run(team, plan.entries, entry, cost_ns)
        if num_due == 0:
            return True
        if not has_come and not await_arrival(pool_address, arrived):
            return False
        entry, cost_ns = plan.entries, 0.0


@jitable
def _book_wave(memory: int, layer_address: int, number: int) -> None:
    """Books what has come for a wave: all that was not lost, unless the wave has failed."""
    wave, layer = wave_at(plan_at(memory).waves + number * WAVE_STRIDE), layer_at(layer_address)
    tokens = wave.tokens
    for place in range(wave.num_groups):
        group = group_at(wave.groups + place * GROUP_STRIDE)
        if state_of(layer.blobs, group.expert) == THERE:
            book(layer.blobs, group.expert, tokens, group.num_routes)
        tokens += group.num_routes * 4


@jitable
def run_as_they_come(memory: int, layer_address: int, team: int, num_waves: int) -> bool:
    """Wave after wave, the blobs of later ones being read meanwhile, as far as there are places for them."""
    pool = blobs_at(layer_at(layer_address).blobs).pool
    _note_needs(memory, layer_address, num_waves)
    for number in range(num_waves):
        if not _ask_for_wave(memory, layer_address, number, number):
            return False
        ahead = number + 1
        while ahead < num_waves and _ask_for_wave(memory, layer_address, ahead, number):
            ahead += 1
        send(pool)
        is_computed = _run_wave(memory, layer_address, team, number)
        _book_wave(memory, layer_address, number)
        if not is_computed:
            return False
    return True
