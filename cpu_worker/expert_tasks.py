"""The tasks that a layer's experts consist of, and the records they read.

A *group* is one expert and the routes that chose it, up to `WAVE_ROUTES` of them; a *wave* is some groups
whose values are in memory at the same time. Their tasks::

    gather    copies the rounded activations of a group's tokens side by side, where they are not already
    gate_up   h = silu(gate x) * (up x) for some rows of one group, rounded again for `down`
    down      some columns of the layer's output: each group's products, weighted and added up

`down` takes columns of the whole wave instead of single experts, so that the products of a route are used by
the thread that made them, as long as they are in its cache, and are added in a fixed order: that of the
experts, which does not depend on threads, nor on the other tokens of the step.

Addresses and strides are in bytes, other numbers in elements. `cpu_worker.expert_waves` fills the records in.
"""

import functools

from shared.native.arithmetic import silu
from shared.native.matrices import matrix_at, plane_at
from shared.native.memory import call_task, floats_at, ids_at, integers_at, prefetch
from shared.native.records import fields, reader
from shared.native.task import OUTER_SCRATCH_BYTES, SCRATCH_BYTES
from shared.quants.jit import compile_task, jitable
from shared.quants.matrix import CODE_STRIDE, HALF_GROUP
from shared.quants.matrix import GROUP as QUANT_GROUP

WAVE_ROUTES = 512
"""Routes of one wave. More are worth little, since what a tile of decoded weights costs is spread over enough
tokens by then; the wave's buffers (about 20 kB a route of the real model, twice) stay in the last cache."""

_RECORD_BYTES = 64
PARTIAL_BYTES = OUTER_SCRATCH_BYTES - _RECORD_BYTES
"""For the products of some columns with all routes of a wave, in each thread's own memory."""

LAYER = fields(
    *("gate_task", "up_task", "down_task", "quantise_task"),  # of shared.quants
    *("gather", "gate_up", "down"),  # the tasks below
    *("gate_weights", "up_weights", "down_weights"),  # u8 [experts, rows, row_bytes]
    *("gate_row_bytes", "up_row_bytes", "down_row_bytes"),
    "hidden",
    "width",  # of one expert
    "num_experts",
    "reads_floats",  # 1 where gate or up read the activations as they are
    "activation_bytes",  # to which gate or up read them rounded; 0 where neither does
    "rounds_h",  # 1 where down reads rounded activations
    "blobs",  # LAYER_BLOBS: experts are in a pool, and the addresses of weights above are none; 0 otherwise
    "uses",  # f32 [experts]: decayed counts of routes, in units of
    "use_weight",  # f32: what a route counts now
)

GROUP = fields(
    "layer",
    "gate_matrix",  # MATRIX each
    "up_matrix",
    "x_plane",  # PLANE each
    "h_plane",
    "down_weights",  # of this expert; 0 where it could not be had, and nothing is added
    "num_routes",
    "expert",
    "is_due",  # 1 until gate_up is under way; only where it may have to be waited for
)

WAVE = fields(
    "layer",
    "groups",  # GROUP [num_groups], GROUP_STRIDE bytes apart
    "num_groups",
    "num_routes",
    "tokens",  # i32 [num_routes], the wave's routes one group after the other
    "weights",  # f32 [num_routes]
    "out",  # f32 [num_tokens, hidden]
    "num_tokens",
    "is_first",  # 1 in the wave that begins the sums
)

GATHER = fields(
    "layer",
    "from_plane",  # PLANE: the tokens of the step
    "to_plane",  # PLANE: the routes of the wave
    "routes",  # i32 [num_routes], of the wave
    "num_routes",
    "tokens",  # as in WAVE
)

layer_at = reader(LAYER)
group_at = reader(GROUP)
wave_at = reader(WAVE)
gather_at = reader(GATHER)

GROUP_STRIDE = 256
"""Behind each GROUP lie the records it points at."""
_CODE_BYTES_A_WORD = 8
_PREFETCHED_BYTES = 2048
_CACHE_LINE = 64


@jitable
def _prefetch_begin(weights: int) -> None:
    """Of weights that are read next: the CPU finds the stream by itself after that."""
    for offset in range(0, _PREFETCHED_BYTES, _CACHE_LINE):
        prefetch(weights + offset)


@jitable
def _copy_words(source: int, target: int, count: int) -> None:
    read, written = integers_at(source), integers_at(target)
    for i in range(count):
        written[i] = read[i]


@jitable
def _copy_floats(source: int, target: int, count: int) -> None:
    read, written = floats_at(source), floats_at(target)
    for i in range(count):
        written[i] = read[i]


def _gather(params: int, start: int, stop: int, scratch: int) -> None:
    """Items: entries of `routes`."""
    gather = gather_at(params)
    layer = layer_at(gather.layer)
    source, target = plane_at(gather.from_plane), plane_at(gather.to_plane)
    routes, tokens, hidden = ids_at(gather.routes), ids_at(gather.tokens), layer.hidden
    num_groups, num_halves = hidden // QUANT_GROUP, hidden // HALF_GROUP
    for item in range(start, stop):
        route = routes[item]
        token = tokens[route]
        if layer.reads_floats != 0:
            _copy_floats(source.floats + token * hidden * 4, target.floats + route * hidden * 4, hidden)
        if layer.activation_bytes != 0:
            stride = hidden * CODE_STRIDE
            num_words = hidden * layer.activation_bytes // _CODE_BYTES_A_WORD
            _copy_words(source.codes + token * stride, target.codes + route * stride, num_words)
            _copy_floats(
                source.scales + token * num_groups * 4, target.scales + route * num_groups * 4, num_groups
            )
            _copy_floats(
                source.sums + token * num_halves * 4, target.sums + route * num_halves * 4, num_halves
            )


@jitable
def _gated(gate: int, up: int, count: int) -> None:
    """gate = silu(gate) * up."""
    gates, ups = floats_at(gate), floats_at(up)
    for i in range(count):
        gates[i] = silu(gates[i]) * ups[i]


def _gate_up(params: int, start: int, stop: int, scratch: int) -> None:
    """Items: rows of a group's gate and up matrices; `start` is a multiple of 32, `stop` too."""
    group = group_at(params)
    layer, gate, up = layer_at(group.layer), matrix_at(group.gate_matrix), matrix_at(group.up_matrix)
    call_task(layer.gate_task, group.gate_matrix, start, stop, scratch)
    call_task(layer.up_task, group.up_matrix, start, stop, scratch)
    width = layer.width
    for route in range(group.num_routes):
        offset = (route * width + start) * 4
        _gated(gate.out + offset, up.out + offset, stop - start)
    if layer.rounds_h != 0:
        for route in range(group.num_routes):
            first = route * (width // QUANT_GROUP)
            begun, ended = first + start // QUANT_GROUP, first + stop // QUANT_GROUP
            call_task(layer.quantise_task, group.h_plane, begun, ended, scratch)


@jitable
def _clear(out: int, count: int) -> None:
    written = floats_at(out)
    for i in range(count):
        written[i] = 0


@jitable
def _add_weighted(weight: float, partial: int, out: int, count: int) -> None:
    products, sums = floats_at(partial), floats_at(out)
    for i in range(count):
        sums[i] += weight * products[i]


def _down(params: int, start: int, stop: int, scratch: int) -> None:
    """Items: columns of the layer's output; `start` is a multiple of 16. At most as many at a time as fit
    into PARTIAL_BYTES."""
    wave = wave_at(params)
    layer = layer_at(wave.layer)
    hidden, columns = layer.hidden, stop - start
    record = scratch + SCRATCH_BYTES
    partial = record + _RECORD_BYTES
    matrix = matrix_at(record)
    matrix.row_bytes = layer.down_row_bytes
    matrix.out_stride = columns
    first_byte = start * layer.down_row_bytes
    at = partial
    for number in range(wave.num_groups):
        group = group_at(wave.groups + number * GROUP_STRIDE)
        matrix.weights = group.down_weights
        matrix.plane = group.h_plane
        matrix.out = at - start * 4
        if number + 1 < wave.num_groups:
            following = group_at(wave.groups + (number + 1) * GROUP_STRIDE)
            _prefetch_begin(following.down_weights + first_byte)
        if group.down_weights != 0:
            call_task(layer.down_task, record, start, stop, scratch)
        else:
            _clear(at, group.num_routes * columns)
        at += group.num_routes * columns * 4
    out = wave.out + start * 4
    if wave.is_first != 0:
        for token in range(wave.num_tokens):
            _clear(out + token * hidden * 4, columns)
    tokens, weights = ids_at(wave.tokens), floats_at(wave.weights)
    for route in range(wave.num_routes):
        _add_weighted(
            weights[route], partial + route * columns * 4, out + tokens[route] * hidden * 4, columns
        )


@functools.cache
def gather_task() -> int:
    """The address of the task; its params are a GATHER."""
    return compile_task(_gather, "gather_activations")


@functools.cache
def gate_up_task() -> int:
    """The address of the task; its params are a GROUP."""
    return compile_task(_gate_up, "expert_gate_up")


@functools.cache
def down_task() -> int:
    """The address of the task; its params are a WAVE."""
    return compile_task(_down, "expert_down")
