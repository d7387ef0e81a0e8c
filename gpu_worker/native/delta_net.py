"""The gated delta net as tasks: projections, convolution, recurrence, output.

The recurrence is taken token by token for spans of any length, each head's state being small enough to stay
in the caches. With S the state before a token,

    r = S^T k,  s = S^T q;   d = b (v - l r);   S <- l S + k d^T;   o = l s + (k . q) d

which is what `gpu_worker.model.delta_net` writes down, with o taken from the state before the token. So r and
s of one token are gathered in the pass over the state that writes the token before. (Measured with heads of
128: 0.9 us a token and head; the chunks that suit a graphics card take eight times as long here.)
"""

import functools
import math

import numpy as np

from gpu_worker.native.convolution import (
    CONVOLVED_SNAPSHOT,
    CONVOLVED_SPAN,
    HISTORIES,
    SPAN_BYTES,
    advance_histories_task,
    convolve,
    convolved_span_at,
    history_of,
)
from gpu_worker.native.regions import region
from gpu_worker.native.script import Script
from gpu_worker.native.spans import SnapshotRecords, SpanRecords, StepSpans
from gpu_worker.native.streams import Written
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Workspace, multiply
from gpu_worker.state.sequence_state import num_kept
from shared.model_config import Qwen4ExpConfig
from shared.native.arithmetic import Pointer, dot, sigmoid, sum_of_squares
from shared.native.memory import floats_at, integers_at, load
from shared.native.records import fields, reader, record
from shared.quants.jit import compile_task, jitable, jitable_sum
from shared.tensor_catalog import block_prefix

DELTA_SPAN = fields(
    "start",  # first token
    "num_tokens",
    "num_pending",  # before the span
    "num_kept",  # of the tokens of the span
    "matrices",  # f32 [value heads, head_dim, head_dim]
    "decays",  # f32 [pending, value heads]
    "keys",  # f32 [pending, value heads, head_dim]
    "deltas",  # f32 [pending, value heads, head_dim]
    "snapshots",  # DELTA_SNAPSHOT [num_snapshots]
    "num_snapshots",
)
DELTA_SNAPSHOT = fields(
    "number",  # of the token in the span that it is before
    "matrices",  # without the update of the token before
    "decays",  # f32 [value heads]: that update
    "keys",  # f32 [value heads, head_dim]
    "deltas",  # f32 [value heads, head_dim]
)
CONVOLUTION = fields(
    "spans",  # CONVOLVED_SPAN [num_spans]
    "token_spans",  # i64 [tokens]
    "inputs",  # f32 [tokens, channels]
    "kernel",  # f32 [taps, channels]
    "out",  # f32 [tokens, channels]
    "taps",
    "num_key_heads",
    "num_value_heads",
    "head_dim",
    epsilon=np.float32,
)
RECURRENCE = fields(
    "spans",  # DELTA_SPAN [num_spans]
    "heads",  # f32 [tokens, channels]: queries, keys (unit vectors) and values
    "alpha",  # f32 [tokens, value heads]
    "beta",  # f32 [tokens, value heads]
    "decay_rate",  # f32 [value heads]
    "decay_bias",  # f32 [value heads]
    "out",  # f32 [tokens, value heads, head_dim]
    "num_key_heads",
    "num_value_heads",
    "head_dim",
)
OUTPUT = fields(
    "values",  # f32 [tokens, value heads, head_dim], changed in place
    "gate",  # the same shape, before the sigmoid
    "norm",  # f32 [head_dim]
    "head_dim",
    epsilon=np.float32,
)
_DELTA_SPAN_BYTES, _SNAPSHOT_BYTES = DELTA_SPAN.itemsize, DELTA_SNAPSHOT.itemsize

_span_at = reader(DELTA_SPAN)
_snapshot_at = reader(DELTA_SNAPSHOT)
_convolution_at = reader(CONVOLUTION)
_recurrence_at = reader(RECURRENCE)
_output_at = reader(OUTPUT)

# Four rows of a state at a time, and what is kept of one token.
get_row0, put_row0 = region(0)
get_row1, put_row1 = region(1)
get_row2, put_row2 = region(2)
get_row3, put_row3 = region(3)
get_recalled, put_recalled = region(4)
get_answered, put_answered = region(5)
get_delta, put_delta = region(6)


def _convolve_heads(params: int, start: int, stop: int, scratch: int) -> None:
    step = _convolution_at(params)
    head_dim, num_key_heads = step.head_dim, step.num_key_heads
    num_heads = 2 * num_key_heads + step.num_value_heads
    channels = num_heads * head_dim
    query_scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    for item in range(start, stop):
        token, head = item // num_heads, item % num_heads
        span = convolved_span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        first = head * head_dim * 4
        out = floats_at(step.out + item * head_dim * 4)
        convolve(
            floats_at(step.inputs + span.start * channels * 4 + first),
            floats_at(history_of(span.history, span.num_pending, channels) + first),
            floats_at(step.kernel + first),
            out,
            token - span.start,
            channels,
            head_dim,
            step.taps,
            1,
        )
        if head < 2 * num_key_heads:
            scale = np.divide(np.float32(1), np.sqrt(sum_of_squares(out, head_dim) + step.epsilon))
            if head < num_key_heads:
                scale *= query_scale
            for i in range(head_dim):
                out[i] *= scale


@jitable
def _softplus(x: np.float32) -> float:
    # From 20 on the difference is below float32's precision; torch takes x itself there.
    return float(x) if x > 20 else math.log1p(math.exp(x))


@jitable_sum
def _write_and_recall(
    state: Pointer,
    decay: np.float32,
    key: Pointer,
    delta: Pointer,
    next_key: Pointer,
    next_query: Pointer,
    recalled: Pointer,
    answered: Pointer,
    dim: int,
) -> None:
    """S <- decay S + key delta^T, and in the same pass recalled = S^T k and answered = S^T q [dim] for the
    next token.

    All that a state goes through goes through this function, so that it does not depend on how the tokens of
    a sequence were spread over steps.
    """
    for j in range(dim):
        put_recalled(recalled, j, np.float32(0))
        put_answered(answered, j, np.float32(0))
    whole = dim // 4 * 4
    for i in range(0, whole, 4):
        w0, w1, w2, w3 = key[i], key[i + 1], key[i + 2], key[i + 3]
        k0, k1, k2, k3 = next_key[i], next_key[i + 1], next_key[i + 2], next_key[i + 3]
        q0, q1, q2, q3 = next_query[i], next_query[i + 1], next_query[i + 2], next_query[i + 3]
        row0, row1, row2, row3 = i * dim, (i + 1) * dim, (i + 2) * dim, (i + 3) * dim
        for j in range(dim):
            d = get_delta(delta, j)
            s0 = decay * get_row0(state, row0 + j) + w0 * d
            s1 = decay * get_row1(state, row1 + j) + w1 * d
            s2 = decay * get_row2(state, row2 + j) + w2 * d
            s3 = decay * get_row3(state, row3 + j) + w3 * d
            put_row0(state, row0 + j, s0)
            put_row1(state, row1 + j, s1)
            put_row2(state, row2 + j, s2)
            put_row3(state, row3 + j, s3)
            put_recalled(recalled, j, get_recalled(recalled, j) + (k0 * s0 + k1 * s1 + k2 * s2 + k3 * s3))
            put_answered(answered, j, get_answered(answered, j) + (q0 * s0 + q1 * s1 + q2 * s2 + q3 * s3))
    for i in range(whole, dim):
        w, k, q = key[i], next_key[i], next_query[i]
        for j in range(dim):
            new = decay * state[i * dim + j] + w * delta[j]
            state[i * dim + j] = new
            recalled[j] += k * new
            answered[j] += q * new


@jitable
def _take_snapshot(
    address: int, head: int, state: Pointer, decay: np.float32, key: Pointer, delta: Pointer, dim: int
) -> None:
    snapshot = _snapshot_at(address)
    matrix = floats_at(snapshot.matrices + head * dim * dim * 4)
    to_key, to_delta = floats_at(snapshot.keys + head * dim * 4), floats_at(snapshot.deltas + head * dim * 4)
    floats_at(snapshot.decays)[head] = decay
    for i in range(dim):
        to_key[i], to_delta[i] = key[i], delta[i]
    for i in range(dim * dim):
        matrix[i] = state[i]


def _recur(params: int, start: int, stop: int, scratch: int) -> None:
    step = _recurrence_at(params)
    dim, num_key_heads, num_heads = step.head_dim, step.num_key_heads, step.num_value_heads
    channels = (2 * num_key_heads + num_heads) * dim
    # Each on cache lines of its own.
    room = (dim * 4 + 63) // 64 * 64
    recalled, answered, zeros = floats_at(scratch), floats_at(scratch + room), floats_at(scratch + 2 * room)
    # The state within a window, where the tokens of the window may be taken back.
    copied = floats_at(scratch + 3 * room)
    for i in range(dim):
        zeros[i] = np.float32(0)
    for item in range(start, stop):
        span, head = _span_at(step.spans + item // num_heads * _DELTA_SPAN_BYTES), item % num_heads
        matrix = floats_at(span.matrices + head * dim * dim * 4)
        decays, keys, deltas = (
            floats_at(span.decays),
            span.keys + head * dim * 4,
            span.deltas + head * dim * 4,
        )
        key_head = head % num_key_heads
        first_kept = span.num_tokens - span.num_kept
        # The state of the last token, and the update that the next one's follows by.
        state = matrix
        decay, key, delta = np.float32(1), zeros, zeros
        if span.num_pending > 0:
            for place in range(span.num_pending - 1):
                at = place * num_heads
                _write_and_recall(
                    matrix,
                    decays[at + head],
                    floats_at(keys + at * dim * 4),
                    floats_at(deltas + at * dim * 4),
                    zeros,
                    zeros,
                    recalled,
                    answered,
                    dim,
                )
            at = (span.num_pending - 1) * num_heads
            decay = decays[at + head]
            key, delta = floats_at(keys + at * dim * 4), floats_at(deltas + at * dim * 4)
        next_snapshot, snapshots_end = span.snapshots, span.snapshots + span.num_snapshots * _SNAPSHOT_BYTES
        for number in range(span.num_tokens):
            if next_snapshot < snapshots_end and load(next_snapshot) == number:
                _take_snapshot(next_snapshot, head, state, decay, key, delta, dim)
                next_snapshot += _SNAPSHOT_BYTES
            token = span.start + number
            row = step.heads + token * channels * 4
            query = floats_at(row + key_head * dim * 4)
            own_key = floats_at(row + (num_key_heads + key_head) * dim * 4)
            value = floats_at(row + (2 * num_key_heads + head) * dim * 4)
            out = floats_at(step.out + (token * num_heads + head) * dim * 4)
            _write_and_recall(state, decay, key, delta, own_key, query, recalled, answered, dim)
            rate = sigmoid(floats_at(step.beta)[token * num_heads + head])
            argument = floats_at(step.alpha)[token * num_heads + head] + floats_at(step.decay_bias)[head]
            decay = np.float32(math.exp(floats_at(step.decay_rate)[head] * _softplus(argument)))
            match = dot(own_key, query, dim)
            at = max(0, number - first_kept) * num_heads
            decays[at + head] = decay
            key, delta = floats_at(keys + at * dim * 4), floats_at(deltas + at * dim * 4)
            for j in range(dim):
                key[j] = own_key[j]
            for j in range(dim):
                d = rate * (value[j] - decay * get_recalled(recalled, j))
                put_delta(delta, j, d)
                out[j] = decay * get_answered(answered, j) + match * d
            if number == first_kept and number + 1 < span.num_tokens:
                for i in range(dim * dim):
                    copied[i] = matrix[i]
                state = copied


def _gate_output(params: int, start: int, stop: int, scratch: int) -> None:
    step = _output_at(params)
    dim = step.head_dim
    norm = floats_at(step.norm)
    for item in range(start, stop):
        values, gate = floats_at(step.values + item * dim * 4), floats_at(step.gate + item * dim * 4)
        mean = np.divide(sum_of_squares(values, dim), np.float32(dim))
        scale = np.divide(np.float32(1), np.sqrt(mean + step.epsilon))
        for i in range(dim):
            values[i] = values[i] * scale * norm[i] * sigmoid(gate[i])


@functools.cache
def convolve_task() -> int:
    """Params `CONVOLUTION`, items the heads of all tokens: convolution, SiLU, unit queries and keys."""
    return compile_task(_convolve_heads, "convolve_heads")


@functools.cache
def recur_task() -> int:
    """Params `RECURRENCE`, items the value heads of spans, each through all tokens of its span."""
    return compile_task(_recur, "delta_recurrence")


@functools.cache
def gate_output_task() -> int:
    """Params `OUTPUT`, items the value heads of all tokens: norm and gate, in place."""
    return compile_task(_gate_output, "gate_delta_output")


class DeltaNet:
    """The token mixer of one delta-net layer."""

    def __init__(self, weights: Weights, layer: int, config: Qwen4ExpConfig) -> None:
        prefix = block_prefix(layer)
        self._layer = layer
        self._config = config
        self._qkv = weights.matrix(f"{prefix}attn_qkv.weight")
        self._gate = weights.matrix(f"{prefix}attn_gate.weight")
        self._alpha = weights.matrix(f"{prefix}ssm_alpha.weight")
        self._beta = weights.matrix(f"{prefix}ssm_beta.weight")
        self._out = weights.matrix(f"{prefix}ssm_out.weight")
        self._kernel = np.ascontiguousarray(weights.floats(f"{prefix}ssm_conv1d.weight").T)
        self._decay_rate = weights.floats(f"{prefix}ssm_a")
        self._decay_bias = weights.floats(f"{prefix}ssm_dt.bias")
        self._norm = weights.floats(f"{prefix}ssm_norm.weight")

    def build(self, workspace: Workspace, spans: StepSpans) -> None:
        """Takes its buffers."""
        config = self._config
        self._step = spans
        heads, width = config.num_delta_value_heads, config.num_delta_value_heads * config.delta_head_dim
        self._x = workspace.plane("x", config.hidden)
        self._qkv_out = workspace.floats("qkv", config.delta_channels)
        self._heads = workspace.floats("heads", config.delta_channels)
        self._gate_out = workspace.floats("delta gate", width)
        self._alpha_out, self._beta_out = workspace.floats("alpha", heads), workspace.floats("beta", heads)
        self._mixed = workspace.plane("delta mixed", width)
        self._output = workspace.floats("output", config.hidden)
        self._convolved = SpanRecords(CONVOLVED_SPAN, workspace.capacity)
        self._spans = SpanRecords(DELTA_SPAN, workspace.capacity)
        self._snapshots = SnapshotRecords(DELTA_SNAPSHOT)
        self._convolved_snapshots = SnapshotRecords(CONVOLVED_SNAPSHOT)

    def emit(self, script: Script) -> Written:
        """Appends all of it, from the plane `x`; what the layer leaves to be written."""
        self._emit_heads(script)
        self._emit_recurrence(script)
        return self._emit_output(script)

    def _emit_heads(self, script: Script) -> None:
        config = self._config
        multiply(
            script,
            self._x,
            (self._qkv, self._qkv_out),
            (self._gate, self._gate_out),
            (self._alpha, self._alpha_out),
            (self._beta, self._beta_out),
        )
        script.barrier()
        params = record(
            CONVOLUTION,
            spans=self._convolved.records,
            token_spans=self._step.of_tokens,
            inputs=self._qkv_out,
            kernel=self._kernel,
            out=self._heads,
            taps=config.conv_kernel,
            num_key_heads=config.num_delta_key_heads,
            num_value_heads=config.num_delta_value_heads,
            head_dim=config.delta_head_dim,
            epsilon=config.rms_epsilon,
        )
        num_heads = 2 * config.num_delta_key_heads + config.num_delta_value_heads
        head_ns = 1.5 * config.delta_head_dim
        script.add(convolve_task(), params, per_token=num_heads, ns=head_ns, keep=self)
        script.barrier()

    def _emit_recurrence(self, script: Script) -> None:
        config = self._config
        params = record(
            RECURRENCE,
            spans=self._spans.records,
            heads=self._heads,
            alpha=self._alpha_out,
            beta=self._beta_out,
            decay_rate=self._decay_rate,
            decay_bias=self._decay_bias,
            out=self._mixed.floats,
            num_key_heads=config.num_delta_key_heads,
            num_value_heads=config.num_delta_value_heads,
            head_dim=config.delta_head_dim,
        )
        head_ns = 100 + 0.06 * config.delta_head_dim**2
        heads = config.num_delta_value_heads
        # The state is in no cache: it was last touched a step ago.
        state_ns = 0.3 * config.delta_head_dim**2
        script.add(recur_task(), params, per_span=heads, ns=state_ns, ns_per_token=head_ns, keep=self)
        histories = record(
            HISTORIES,
            spans=self._convolved.records,
            inputs=self._qkv_out,
            reach=config.conv_kernel - 1,
            channels=config.delta_channels,
        )
        script.add(advance_histories_task(), histories, per_span=1, ns=0.3 * config.delta_channels, keep=self)
        script.barrier()

    def _emit_output(self, script: Script) -> Written:
        config = self._config
        params = record(
            OUTPUT,
            values=self._mixed.floats,
            gate=self._gate_out,
            norm=self._norm,
            head_dim=config.delta_head_dim,
            epsilon=config.rms_epsilon,
        )
        head_ns = 1.0 * config.delta_head_dim
        script.add(gate_output_task(), params, per_token=config.num_delta_value_heads, ns=head_ns, keep=self)
        script.barrier()
        multiply(script, self._mixed, (self._out, self._output))
        script.barrier()
        return Written(self._output)

    def begin(self) -> None:
        """Takes the spans of the next step."""
        self._snapshots.begin()
        self._convolved_snapshots.begin()
        for number, span in enumerate(self._step.all):
            state, place = span.state.delta[self._layer], (span.start, span.num_tokens)
            pending = span.state.num_pending, num_kept(span.num_tokens)
            matrices, conv_inputs = state.matrices.data_ptr(), state.conv_inputs.data_ptr()
            updates = [update.data_ptr() for update in state.updates]
            cuts, snapshots = span.cuts, [snapshot.delta[self._layer] for snapshot in span.snapshots]
            of_delta = [
                (cut, *(tensor.data_ptr() for tensor in (snapshot.matrices, *snapshot.updates)))
                for cut, snapshot in zip(cuts, snapshots, strict=True)
            ]
            of_inputs = [
                (cut, snapshot.conv_inputs.data_ptr()) for cut, snapshot in zip(cuts, snapshots, strict=True)
            ]
            self._spans.put(number, (*place, *pending, matrices, *updates, *self._snapshots.put(of_delta)))
            self._convolved.put(
                number, (*place, conv_inputs, *pending, *self._convolved_snapshots.put(of_inputs))
            )
