"""A step's layers as one native call: programs, and between them the experts' way through the ring.

For each layer: what mixes tokens and routes; a slot of the cpu_worker's ring is filled and handed over; the
shared expert; the wait for the slot's outputs, whose address goes into the record of the next program. Coming
back to Python for each of that took longer than the layers of the demo model.

N-gram features are collected from the stager's ring on the way. Python takes over between two layers where
blocks have to be chosen, where a wait has ended without a result, and where tokens have lost an expert: it
knows what to raise then.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.experts.cpu_way import SLOT_ARRAYS, CpuExperts
from gpu_worker.native.expert_counts import count_handed_over
from gpu_worker.native.workspace import Floats
from gpu_worker.ngram_way import StagedFeatures
from shared.native.memory import clock_ns, floats_at, ids_at, integers_at, load, load_shared, store
from shared.native.program import Program
from shared.native.records import Record, fields, reader, record
from shared.native.ring import (
    ARRIVED,
    CLIENT_SLEEPS,
    COMPLETED,
    ERROR,
    NUM_SLOTS,
    SERVER_SLEEPS,
    SUBMITTED,
    await_above,
    publish,
    slot_of,
)
from shared.native.task import address_of
from shared.native.team import Team, run_entries
from shared.quants.jit import INTEGER, compile_kernel, jitable
from shared.work_slots import PARTS, ExpertHeader

# Rows of the table of layers. The last row has what follows the last layer, without experts.
_PROGRAM = ("entries", "num_entries", "num_units", "cost_ns")
LAYER = fields(
    *_PROGRAM,  # from the streams to the routes
    *(f"shared_{name}" for name in _PROGRAM),  # the shared expert
    "has_experts",
    "features",  # f32 [tokens, feature_width]: where n-gram features go before the layer; 0 for nowhere
    # Where the address of the outputs of the layer before goes; 0 for none.
    "first_pending",
    "second_pending",
)
STEP = fields(
    "team",
    "layers",  # LAYER [num_layers + 1]
    "first_layer",  # number of the first of these in the model
    # What is handed over.
    "activations",  # f32 [tokens, hidden]
    "expert_ids",  # i32 [tokens, used]
    "expert_weights",  # f32 [tokens, used]
    "num_tokens",
    "hidden",
    "num_used",
    # The ring, where the arrays of its slots begin, and how long it is waited for (`CpuExperts.native_way`).
    "ring",
    *(f"slot_{name}" for name in SLOT_ARRAYS),
    "timeout_ns",
    # What is added up of the slots (`ExpertCounts.native`).
    "max_tokens",
    "file_index",  # i64 [layers, 3]
    "disk_routes",  # i32 [max_tokens]
    "file_reads",  # i64 [files, max_tokens]
    "file_read_bytes",  # i64 [files, max_tokens]
    "token_failures",  # i32 [max_tokens, 3]
    "totals",  # i64 [4]
    "counts",  # COUNTS
    # The stager's ring, where the features of its slots begin, how long it is waited for
    # (`StagedFeatures.native_way`), and the ticket of the step.
    "ngram_ring",
    "slot_features",
    "ngram_timeout_ns",
    "ngram_ticket",
    "feature_width",
    # Written by native code.
    "outputs",  # of the last layer that was computed
    "ticket",  # that was last waited for
    "layer",  # that it was for
    "waited_ns",  # for outputs, and for a slot to be free
    "ngram_waited_ns",
)
_LAYER_BYTES = LAYER.itemsize
_PLACES = {name: place for place, name in enumerate(STEP.names or ())}
_NUM_TOKENS_AT, _WAY, _NGRAM_WAY = _PLACES["num_tokens"], _PLACES["ring"], _PLACES["ngram_ring"]
_NGRAM_TICKET, _NGRAM_WAITED_NS = _PLACES["ngram_ticket"], _PLACES["ngram_waited_ns"]
_OUTPUTS, _TICKET, _WAITED_NS = _PLACES["outputs"], _PLACES["ticket"], _PLACES["waited_ns"]
_LAYER = _PLACES["layer"]
_DONE, _EXPERTS_FAILED, _EXPERTS_LOST, _NGRAM_FAILED = range(4)
_layer_at = reader(LAYER)
_step_at = reader(STEP)
_NUM_READ, _DISK_WAIT_NS, _MAJOR_FAULTS, _NUM_LOST = (
    int(ExpertHeader[name]) for name in ("NUM_READ", "DISK_WAIT_NS", "MAJOR_FAULTS", "NUM_LOST")
)
_LAYER_NUMBER, _NUM_TOKENS = (8 * int(place) for place in (ExpertHeader.LAYER, ExpertHeader.NUM_TOKENS))


@jitable
def _hand_over(step_address: int, layer: int) -> bool:
    """Fills the next slot; whether it is under way."""
    step = _step_at(step_address)
    step.layer = layer
    ring, num_tokens = step.ring, step.num_tokens
    number = load(load(ring + SUBMITTED))
    # Normally the slot is free. After a step that failed half-way the server may still be busy with it.
    step.ticket = number - load(ring + NUM_SLOTS)
    if step.ticket >= 0 and load_shared(load(ring + COMPLETED)) <= step.ticket:
        started, sleeps = clock_ns(), load(ring + CLIENT_SLEEPS)
        end = await_above(ring, load(ring + COMPLETED), step.ticket, sleeps, step.timeout_ns)
        step.waited_ns += clock_ns() - started
        if end != ARRIVED:
            return False
    slot = slot_of(ring, number)
    store(slot + step.slot_header + _LAYER_NUMBER, layer)
    store(slot + step.slot_header + _NUM_TOKENS, num_tokens)
    x, to_x = floats_at(step.activations), floats_at(slot + step.slot_activations)
    for i in range(num_tokens * step.hidden):
        to_x[i] = x[i]
    ids, to_ids = ids_at(step.expert_ids), ids_at(slot + step.slot_expert_ids)
    weights, to_weights = floats_at(step.expert_weights), floats_at(slot + step.slot_expert_weights)
    for i in range(num_tokens * step.num_used):
        to_ids[i] = ids[i]
        to_weights[i] = weights[i]
    step.ticket = number
    publish(load(ring + SUBMITTED), number + 1, load(ring + SERVER_SLEEPS))
    return True


@jitable
def _is_served(ring: int, ticket: int, patience_ns: int) -> bool:
    """Waits until the server has taken the ticket; whether it did so in time and without an error."""
    sleeps = load(ring + CLIENT_SLEEPS)
    if await_above(ring, load(ring + COMPLETED), ticket, sleeps, patience_ns) != ARRIVED:
        return False
    return load(slot_of(ring, ticket) + load(ring + ERROR)) == 0


@jitable
def _note_lost(step_address: int, slot: int) -> None:
    """Keeps which tokens have lost an expert, for those that have not lost one before."""
    step = _step_at(step_address)
    failures, to_failures = ids_at(slot + step.slot_failures), ids_at(step.token_failures)
    for token in range(step.num_tokens):
        if failures[2 * token] != 0 and to_failures[3 * token] == 0:
            to_failures[3 * token] = failures[2 * token]
            to_failures[3 * token + 1] = step.layer
            to_failures[3 * token + 2] = failures[2 * token + 1]


@jitable
def _count(step_address: int) -> None:
    """Adds up what the slot of the ticket says of reads, as `ExpertCounts.add` does."""
    step = _step_at(step_address)
    slot = slot_of(step.ring, step.ticket)
    header, totals = integers_at(slot + step.slot_header), integers_at(step.totals)
    totals[0] += header[_NUM_READ]
    totals[1] += header[_DISK_WAIT_NS]
    totals[2] += header[_MAJOR_FAULTS]
    totals[3] += header[_NUM_LOST]
    if header[_NUM_LOST] != 0:
        _note_lost(step_address, slot)
    if header[_NUM_READ] == 0:
        return
    routes, to_routes = ids_at(slot + step.slot_disk_routes), ids_at(step.disk_routes)
    reads, to_reads = ids_at(slot + step.slot_reads), integers_at(step.file_reads)
    num_bytes, to_num_bytes = integers_at(slot + step.slot_read_bytes), integers_at(step.file_read_bytes)
    files = integers_at(step.file_index + 8 * len(PARTS) * step.layer)
    for token in range(step.num_tokens):
        to_routes[token] += routes[token]
        for part in range(len(PARTS)):
            to = files[part] * step.max_tokens + token
            to_reads[to] += reads[len(PARTS) * token + part]
            to_num_bytes[to] += num_bytes[len(PARTS) * token + part]


@jitable
def _collect(step_address: int) -> int:
    """Waits for the outputs of the ticket: _DONE where they are there, though maybe not for all tokens
    (_EXPERTS_LOST)."""
    step = _step_at(step_address)
    started = clock_ns()
    is_served = _is_served(step.ring, step.ticket, step.timeout_ns)
    step.waited_ns += clock_ns() - started
    if is_served:
        step.outputs = slot_of(step.ring, step.ticket) + step.slot_outputs
    if load_shared(load(step.ring + COMPLETED)) > step.ticket:
        # What was read for it is counted too where it has failed.
        _count(step_address)
    if not is_served:
        return _EXPERTS_FAILED
    slot = slot_of(step.ring, step.ticket)
    return _DONE if integers_at(slot + step.slot_header)[_NUM_LOST] == 0 else _EXPERTS_LOST


@jitable
def _collect_features(step_address: int, features: int) -> bool:
    """Waits for the n-gram features of the step; whether they are there."""
    step = _step_at(step_address)
    started = clock_ns()
    is_served = _is_served(step.ngram_ring, step.ngram_ticket, step.ngram_timeout_ns)
    step.ngram_waited_ns += clock_ns() - started
    if not is_served:
        return False
    slot = slot_of(step.ngram_ring, step.ngram_ticket)
    read, written = floats_at(slot + step.slot_features), floats_at(features)
    for i in range(step.num_tokens * step.feature_width):
        written[i] = read[i]
    return True


def _run_layers(step_address: int, start: int, stop: int) -> int:
    step = _step_at(step_address)
    for row in range(start, stop):
        layer, number = _layer_at(step.layers + row * _LAYER_BYTES), step.first_layer + row
        if layer.features != 0 and not _collect_features(step_address, layer.features):
            return _NGRAM_FAILED
        if layer.first_pending != 0:
            store(layer.first_pending, step.outputs)
        if layer.second_pending != 0:
            store(layer.second_pending, step.outputs)
        run_entries(step.team, layer.entries, layer.num_entries, layer.num_units, layer.cost_ns)
        if layer.has_experts == 0:
            continue
        if not _hand_over(step_address, number):
            return _EXPERTS_FAILED
        count_handed_over(step.counts, number, step.expert_ids, step.num_tokens, step.num_used)
        run_entries(
            step.team,
            layer.shared_entries,
            layer.shared_num_entries,
            layer.shared_num_units,
            layer.shared_cost_ns,
        )
        end = _collect(step_address)
        if end != _DONE:
            return end
    return _DONE


@functools.cache
def _run_layers_kernel() -> Callable[[int, int, int], int]:
    return compile_kernel(_run_layers, "run_layers", INTEGER, INTEGER, INTEGER)


class LayerLoop:
    """The table of layers, and the call."""

    def __init__(
        self,
        team: Team,
        x: Floats,
        expert_ids: NDArray[np.int32],
        expert_weights: Floats,
        first_layer: int = 0,
    ) -> None:
        """What each layer leaves for its experts: [capacity, hidden], and [capacity, used] twice. The first
        layer of the table has that number in the model."""
        self._kept = x, expert_ids, expert_weights
        self._first_layer = first_layer
        self._step = record(
            STEP,
            team=team.address,
            first_layer=first_layer,
            activations=x,
            expert_ids=expert_ids,
            expert_weights=expert_weights,
            hidden=x.shape[1],
            num_used=expert_ids.shape[1],
        )
        self._words = self._step.view(np.int64).data
        self._address = address_of(self._step)
        self._run = _run_layers_kernel()

    def set_pending(self, places: Sequence[Sequence[int]]) -> None:
        """Makes the table. For each layer, and for what follows the last one: the addresses, two at most,
        that the outputs before it go to."""
        self._layers = np.zeros(len(places), LAYER)
        for row, addresses in zip(self._layers, places, strict=True):
            row["first_pending"], row["second_pending"] = (*addresses, 0, 0)[:2]
        self._step["layers"] = address_of(self._layers)

    def set_programs(self, number: int, program: Program, shared: Program | None) -> None:
        """What the layer in that row runs from now on, both as they are now; without `shared` there are no
        experts."""
        row = self._layers[number]
        program.ready()
        for name, value in zip(_PROGRAM, _described(program), strict=True):
            row[name] = value
        row["has_experts"] = shared is not None
        if shared is not None:
            shared.ready()
            for name, value in zip(_PROGRAM, _described(shared), strict=True):
                row[f"shared_{name}"] = value

    def begin_table(self) -> Record:
        """Begins another table, in which the programs of all rows are then to be set; the one before stays as
        it is."""
        self.use(self._layers.copy())
        return self._layers

    def use(self, table: Record) -> None:
        """Runs what that table says from now on."""
        self._layers = table
        self._step["layers"] = address_of(self._layers)

    def set_features(self, number: int, features: Floats | None) -> None:
        """Where n-gram features go before a layer; None where they are brought there, or there are none."""
        self._layers[number]["features"] = 0 if features is None else address_of(features)
        if features is not None:
            self._step["feature_width"] = features.shape[1]

    def begin(self, num_tokens: int, experts: CpuExperts, ngram: StagedFeatures | None) -> None:
        """Begins a step whose experts and features come that way."""
        words = self._words
        words[_NUM_TOKENS_AT] = num_tokens
        words[_WAY : _WAY + len(experts.native_way)] = experts.native_way
        if ngram is not None:
            words[_NGRAM_WAY : _NGRAM_WAY + len(ngram.native_way)] = ngram.native_way
            words[_NGRAM_TICKET] = ngram.ticket

    @property
    def outputs(self) -> int:
        """The address of what the experts of the last layer that was computed left, [tokens, hidden]."""
        return self._words[_OUTPUTS]

    def run(self, start: int, stop: int, experts: CpuExperts, ngram: StagedFeatures | None) -> None:
        """Computes layers. Raises as `CpuExperts.collect` and `StagedFeatures.collect` do."""
        words = self._words
        while True:
            words[_WAITED_NS] = words[_NGRAM_WAITED_NS] = 0
            end = self._run(self._address, start, stop)
            experts.waited_s += words[_WAITED_NS] * 1e-9
            if ngram is not None:
                ngram.waited_s += words[_NGRAM_WAITED_NS] * 1e-9
                if end == _NGRAM_FAILED:
                    raise ngram.failure()
            if end == _EXPERTS_FAILED:
                raise experts.failure(words[_TICKET])
            if end == _DONE:
                return
            # Sequences that lack none go on, if there are any.
            experts.counts.check()
            start = words[_LAYER] + 1 - self._first_layer


def _described(program: Program) -> tuple[int, int, int, int]:
    """In the order of _PROGRAM."""
    return program.address, len(program.entries), program.num_units, program.cost_ns
