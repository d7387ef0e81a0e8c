"""The n-gram embedding as tasks (`gpu_worker.model.ngram_embedding` has the formulas)."""

import functools

import numpy as np

from gpu_worker.model.ngram_embedding import MIN_MATCH
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
from gpu_worker.native.script import Script
from gpu_worker.native.spans import SnapshotRecords, SpanRecords, StepSpans
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Floats, Workspace, multiply
from gpu_worker.state.sequence_state import num_kept
from shared.model_config import NgramConfig, Qwen4ExpConfig
from shared.native.arithmetic import Pointer, sigmoid, sum_of_squares
from shared.native.memory import floats_at, integers_at
from shared.native.records import fields, reader, record
from shared.quants.jit import compile_task, jitable, jitable_sum
from shared.tensor_catalog import block_prefix

EMBEDDING = fields(
    "spans",  # CONVOLVED_SPAN [num_spans]
    "token_spans",  # i64 [tokens]
    "streams",  # f32 [tokens, num_streams, hidden], added to
    "keys",  # f32 [tokens, num_streams, hidden]
    "values",  # f32 [tokens, hidden]
    "conv_inputs",  # f32 [tokens, num_streams, hidden]
    "key_norm",  # f32 [num_streams, hidden]
    "query_norm",
    "conv_norm",
    "kernel",  # f32 [taps, num_streams, hidden]
    "taps",
    "dilation",
    "num_streams",
    "hidden",
    epsilon=np.float32,
)

_embedding_at = reader(EMBEDDING)


@jitable_sum
def _match(key: Pointer, key_norm: Pointer, query: Pointer, query_norm: Pointer, width: int) -> np.float32:
    """The product of the two, each times its norm's weights."""
    total = np.float32(0)
    for i in range(width):
        total += (key[i] * key_norm[i]) * (query[i] * query_norm[i])
    return total


@jitable
def _root_mean_square(x: Pointer, width: int, epsilon: np.float32) -> np.float32:
    result: np.float32 = np.sqrt(np.divide(sum_of_squares(x, width), np.float32(width)) + epsilon)
    return result


def _gate_streams(params: int, start: int, stop: int, scratch: int) -> None:
    step = _embedding_at(params)
    hidden, num_streams, epsilon = step.hidden, step.num_streams, step.epsilon
    for item in range(start, stop):
        token, first = item // num_streams, item % num_streams * hidden * 4
        key, x = floats_at(step.keys + item * hidden * 4), floats_at(step.streams + item * hidden * 4)
        value = floats_at(step.values + token * hidden * 4)
        # The scales of the two norms are taken out of the sum.
        match = _match(key, floats_at(step.key_norm + first), x, floats_at(step.query_norm + first), hidden)
        scales = _root_mean_square(key, hidden, epsilon) * _root_mean_square(x, hidden, epsilon)
        match = np.divide(match, scales * np.sqrt(np.float32(hidden)))
        size = -match if match < 0 else match
        root = np.sqrt(np.float32(MIN_MATCH) if size < np.float32(MIN_MATCH) else size)
        # The sign of 0 is 0, and of NaN NaN.
        root = -root if match < 0 else (root if match > 0 else match)
        gate = sigmoid(root)
        mean = np.divide(sum_of_squares(value, hidden), np.float32(hidden)) * gate * gate
        scale = np.divide(np.float32(1), np.sqrt(mean + epsilon))
        conv_norm = floats_at(step.conv_norm + first)
        conv_inputs = floats_at(step.conv_inputs + item * hidden * 4)
        for i in range(hidden):
            gated = gate * value[i]
            x[i] += gated
            conv_inputs[i] = gated * scale * conv_norm[i]


def _convolve_streams(params: int, start: int, stop: int, scratch: int) -> None:
    step = _embedding_at(params)
    hidden, num_streams = step.hidden, step.num_streams
    for item in range(start, stop):
        token, first = item // num_streams, item % num_streams * hidden * 4
        span = convolved_span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        # The keys are not needed any more.
        convolved = floats_at(step.keys + item * hidden * 4)
        convolve(
            floats_at(step.conv_inputs + span.start * num_streams * hidden * 4 + first),
            floats_at(history_of(span.history, span.num_pending, num_streams * hidden) + first),
            floats_at(step.kernel + first),
            convolved,
            token - span.start,
            num_streams * hidden,
            hidden,
            step.taps,
            step.dilation,
        )
        x = floats_at(step.streams + item * hidden * 4)
        for i in range(hidden):
            x[i] += convolved[i]


@functools.cache
def gate_task() -> int:
    """Params `EMBEDDING`, items the streams of all tokens: adds the gated values, leaves the inputs of the
    convolution."""
    return compile_task(_gate_streams, "gate_ngrams")


@functools.cache
def convolve_task() -> int:
    """Params `EMBEDDING`, items the streams of all tokens: adds the convolution."""
    return compile_task(_convolve_streams, "convolve_ngrams")


class NgramEmbedding:
    """The n-gram module of one block."""

    def __init__(self, weights: Weights, config: Qwen4ExpConfig, ngram: NgramConfig) -> None:
        prefix = f"{block_prefix(ngram.layer)}ple_"
        self._config = config
        self._ngram = ngram
        self._key = weights.matrix(f"{prefix}key.weight")
        self._value = weights.matrix(f"{prefix}value.weight")
        self._key_norm, self._query_norm, self._conv_norm = (
            weights.floats(f"{prefix}norm_{which}.weight") for which in ("key", "query", "conv")
        )
        self._kernel = np.ascontiguousarray(weights.floats(f"{prefix}conv1d.weight").T)

    def build(self, workspace: Workspace, spans: StepSpans) -> None:
        """Takes its buffers."""
        config = self._config
        self._step = spans
        self._features = workspace.plane("features", self._ngram.feature_width)
        self._streams = workspace.floats("streams", config.stream_width)
        # Two that no other part needs at that time.
        self._keys = workspace.floats("gates", config.stream_width)
        self._conv_inputs = workspace.floats("normalised", config.stream_width)
        self._values = workspace.floats("x", config.hidden)
        self._spans = SpanRecords(CONVOLVED_SPAN, workspace.capacity)
        self._snapshots = SnapshotRecords(CONVOLVED_SNAPSHOT)

    def emit(self, script: Script) -> None:
        """Appends all of it, from features to streams."""
        config, ngram = self._config, self._ngram
        multiply(script, self._features, (self._key, self._keys), (self._value, self._values))
        script.barrier()
        params = record(
            EMBEDDING,
            spans=self._spans.records,
            token_spans=self._step.of_tokens,
            streams=self._streams,
            keys=self._keys,
            values=self._values,
            conv_inputs=self._conv_inputs,
            key_norm=self._key_norm,
            query_norm=self._query_norm,
            conv_norm=self._conv_norm,
            kernel=self._kernel,
            taps=ngram.conv_kernel,
            dilation=ngram.ngram_size,
            num_streams=config.num_streams,
            hidden=config.hidden,
            epsilon=config.rms_epsilon,
        )
        stream_ns = 2.0 * config.hidden
        script.add(gate_task(), params, per_token=config.num_streams, ns=stream_ns, keep=self)
        script.barrier()
        script.add(convolve_task(), params, per_token=config.num_streams, ns=stream_ns, keep=self)
        script.barrier()
        histories = record(
            HISTORIES,
            spans=self._spans.records,
            inputs=self._conv_inputs,
            reach=ngram.history_length,
            channels=config.stream_width,
        )
        script.add(advance_histories_task(), histories, per_span=1, ns=1.0 * config.stream_width, keep=self)
        script.barrier()

    @property
    def features(self) -> Floats:
        """Where the features of a step go, [capacity, feature width]."""
        return self._features.floats

    def begin(self) -> None:
        """Takes the spans of the next step."""
        self._snapshots.begin()
        for number, span in enumerate(self._step.all):
            state = span.state
            assert state.ngram_inputs is not None
            history = state.ngram_inputs.data_ptr(), state.num_pending, num_kept(span.num_tokens)
            rows = [
                (cut, snapshot.ngram_inputs.data_ptr())
                for cut, snapshot in zip(span.cuts, span.snapshots, strict=True)
                if snapshot.ngram_inputs is not None
            ]
            self._spans.put(number, (span.start, span.num_tokens, *history, *self._snapshots.put(rows)))
