"""The causal convolution over each channel: one token at a time, and the history that a span leaves.

Tokens are independent of each other as long as the history stays as it was before the span, so it is moved on
in a step of its own. What a history is, pending tokens included, is in `gpu_worker.state.sequence_state`.
"""

import functools

from gpu_worker.native.regions import region
from shared.native.arithmetic import Pointer, silu
from shared.native.memory import floats_at
from shared.native.records import fields, reader
from shared.quants.jit import compile_task, jitable

CONVOLVED_SPAN = fields(
    "start",  # first token of the step
    "num_tokens",
    "history",  # f32 [reach + kept tokens, channels]
    "num_pending",  # of these before the span
    "num_kept",  # of the tokens of the span
    "snapshots",  # CONVOLVED_SNAPSHOT [num_snapshots]
    "num_snapshots",
)
CONVOLVED_SNAPSHOT = fields(
    "number",  # of the token in the span that it is before
    "history",  # f32 [reach + 1, channels]: with the inputs of the token before
)
HISTORIES = fields(
    "spans",  # CONVOLVED_SPAN [num_spans]
    "inputs",  # f32 [tokens, channels]
    "reach",
    "channels",
)
SPAN_BYTES = CONVOLVED_SPAN.itemsize
_SNAPSHOT_BYTES = CONVOLVED_SNAPSHOT.itemsize

convolved_span_at = reader(CONVOLVED_SPAN)
_snapshot_at = reader(CONVOLVED_SNAPSHOT)
_histories_at = reader(HISTORIES)

get_input, _ = region(0)
get_kernel, _ = region(1)
get_out, put_out = region(2)


@jitable
def convolve(
    inputs: Pointer,
    history: Pointer,
    kernel: Pointer,
    out: Pointer,
    number: int,
    stride: int,
    width: int,
    taps: int,
    dilation: int,
) -> None:
    """`width` neighbouring channels of one token, the one of that number in its span, with SiLU: inputs
    [tokens of the span, stride], history [(taps - 1) * dilation, stride], kernel [taps, stride], out [width],
    which must be other memory. Compiled code only."""
    reach = (taps - 1) * dilation
    # The tap of the token itself, which is always among the inputs.
    last, at = (taps - 1) * stride, number * stride
    for i in range(width):
        put_out(out, i, get_kernel(kernel, last + i) * get_input(inputs, at + i))
    for tap in range(taps - 1):
        source, weights = number + tap * dilation, tap * stride
        # Both are only read here, so that one region may be either.
        rows = history if source < reach else inputs
        row = (source if source < reach else source - reach) * stride
        for i in range(width):
            put_out(out, i, get_out(out, i) + get_kernel(kernel, weights + i) * get_input(rows, row + i))
    for i in range(width):
        put_out(out, i, silu(get_out(out, i)))


@jitable
def history_of(history: int, num_pending: int, channels: int) -> int:
    """The address of the inputs before a span, oldest first. Compiled code only."""
    return history + num_pending * channels * 4


@jitable
def _copy_history(
    to: Pointer, history: Pointer, inputs: Pointer, first: int, count: int, reach: int, channels: int
) -> None:
    """Rows from the `first` on, of the history [reach, channels] and the inputs behind it. Where `to` is in
    the memory of the history, it is no later than the first row."""
    for row in range(count):
        source = first + row
        rows = history if source < reach else inputs
        at = (source if source < reach else source - reach) * channels
        for i in range(channels):
            to[row * channels + i] = rows[at + i]


def _advance_histories(params: int, start: int, stop: int, scratch: int) -> None:
    step = _histories_at(params)
    channels, reach = step.channels, step.reach
    for item in range(start, stop):
        span = convolved_span_at(step.spans + item * SPAN_BYTES)
        inputs = floats_at(step.inputs + span.start * channels * 4)
        history = floats_at(history_of(span.history, span.num_pending, channels))
        for number in range(span.num_snapshots):
            snapshot = _snapshot_at(span.snapshots + number * _SNAPSHOT_BYTES)
            to, first = floats_at(snapshot.history), snapshot.number - 1
            _copy_history(to, history, inputs, first, reach + 1, reach, channels)
        to, first = floats_at(span.history), span.num_tokens - span.num_kept
        _copy_history(to, history, inputs, first, reach + span.num_kept, reach, channels)


@functools.cache
def advance_histories_task() -> int:
    """Params `HISTORIES`, items spans: their history is then that of the next span."""
    return compile_task(_advance_histories, "advance_histories")
