"""Hyper-connections as tasks: what a block writes to the residual streams, and what the next one reads.

Writing and the norm that the next read begins with are one pass over the streams. The reader's two small
products follow, then one pass that gates and adds up (`gpu_worker.model.hyper_connection` has the formulas).
"""

import functools
from dataclasses import dataclass

import numpy as np

from gpu_worker.native.script import Script
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Floats, Matrix, Workspace, multiply
from shared.model_config import Qwen4ExpConfig
from shared.native.arithmetic import sigmoid, silu, sum_of_squares
from shared.native.memory import floats_at
from shared.native.records import Record, fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import compile_task

_CHUNK = 128
"""Neighbouring values that are gated together: few enough to stay in the first cache."""

STREAMS = fields(
    "streams",  # f32 [tokens, num_streams, hidden]
    "output",  # f32 [tokens, hidden]: what is written to the streams first; 0 where there is nothing
    "gains",  # f32 [tokens, num_streams], before the sigmoid
    "shared",  # f32 [tokens, hidden], added to the output; 0 where there is nothing
    "shared_gate",  # f32 [tokens], before the sigmoid
    "norm",  # f32 [num_streams, hidden]
    "normalised",  # f32 [tokens, num_streams, hidden], divided by num_streams; 0 where nobody reads it
    "num_streams",
    "hidden",
    epsilon=np.float32,
)
GATES = fields(
    "gates",  # f32 [tokens, num_streams, hidden], before the sigmoid
    "normalised",
    "out",  # f32 [tokens, hidden]
    "num_streams",
    "hidden",
)
ROWS = fields("values", "width")

_streams_at = reader(STREAMS)
_gates_at = reader(GATES)
_rows_at = reader(ROWS)


def _write_and_normalise(params: int, start: int, stop: int, scratch: int) -> None:
    step = _streams_at(params)
    hidden, num_streams = step.hidden, step.num_streams
    has_output, has_shared, is_read = step.output != 0, step.shared != 0, step.normalised != 0
    for item in range(start, stop):
        token, stream = item // num_streams, item % num_streams
        x = floats_at(step.streams + item * hidden * 4)
        if has_output:
            output = floats_at(step.output + token * hidden * 4)
            gain = np.float32(2) * sigmoid(floats_at(step.gains)[item])
            if has_shared:
                shared = floats_at(step.shared + token * hidden * 4)
                gate = sigmoid(floats_at(step.shared_gate)[token])
                for i in range(hidden):
                    x[i] += gain * (output[i] + gate * shared[i])
            else:
                for i in range(hidden):
                    x[i] += gain * output[i]
        if is_read:
            norm = floats_at(step.norm + stream * hidden * 4)
            normalised = floats_at(step.normalised + item * hidden * 4)
            mean = np.divide(sum_of_squares(x, hidden), np.float32(hidden))
            scale = np.divide(np.float32(1), np.sqrt(mean + step.epsilon) * np.float32(num_streams))
            for i in range(hidden):
                normalised[i] = x[i] * scale * norm[i]


def _gated_sum(params: int, start: int, stop: int, scratch: int) -> None:
    step = _gates_at(params)
    hidden, num_streams = step.hidden, step.num_streams
    num_chunks = (hidden + _CHUNK - 1) // _CHUNK
    for item in range(start, stop):
        token, first = item // num_chunks, item % num_chunks * _CHUNK
        width = min(_CHUNK, hidden - first)
        out = floats_at(step.out + (token * hidden + first) * 4)
        for i in range(width):
            out[i] = np.float32(0)
        for stream in range(num_streams):
            at = ((token * num_streams + stream) * hidden + first) * 4
            gates, normalised = floats_at(step.gates + at), floats_at(step.normalised + at)
            for i in range(width):
                out[i] += sigmoid(gates[i]) * normalised[i]


def _silu_rows(params: int, start: int, stop: int, scratch: int) -> None:
    step = _rows_at(params)
    width = step.width
    values = floats_at(step.values + start * width * 4)
    for i in range((stop - start) * width):
        values[i] = silu(values[i])


@functools.cache
def write_task() -> int:
    """Params `STREAMS`, items the streams of all tokens: writes the output, normalises what is then there."""
    return compile_task(_write_and_normalise, "write_streams")


@functools.cache
def gated_sum_task() -> int:
    """Params `GATES`, items the chunks of all tokens' outputs: the gated sum of the normalised streams."""
    return compile_task(_gated_sum, "gate_streams")


@functools.cache
def silu_task() -> int:
    """Params `ROWS`, items rows: SiLU in place."""
    return compile_task(_silu_rows, "silu_rows")


@dataclass(frozen=True, slots=True)
class Written:
    """What a block left to be written to the streams: `output` [tokens, hidden], and for experts what
    `shared` [tokens, hidden] adds to it, with `shared_gate` [tokens, 1]. The gains are the reader's.

    Without `output` its address is entered in the record before each run.
    """

    output: Floats | None
    shared: Floats | None = None
    shared_gate: Floats | None = None


class StreamReader:
    """Reads a block's input from the streams."""

    def __init__(self, weights: Weights, prefix: str, config: Qwen4ExpConfig, *, has_gains: bool) -> None:
        """`has_gains`: whether the block writes back, so that its gains are read with its input."""
        self._config = config
        self._norm = weights.floats(f"{prefix}norm.weight")
        self._down = weights.matrix(f"{prefix}down.weight")
        self._up = weights.matrix(f"{prefix}up.weight")
        self._inject: Matrix | None = weights.matrix(f"{prefix}inject.weight") if has_gains else None

    def emit(self, script: Script, workspace: Workspace, written: Written | None) -> Record:
        """Appends: `written` goes to the buffer `streams`, and what is then read from it to the plane `x`.
        Returns the record of the writing, `STREAMS`."""
        config = self._config
        width, rank = config.stream_width, config.stream_rank
        normalised = workspace.plane("normalised", width)
        low, gates = workspace.plane("low", rank), workspace.floats("gates", width)
        x = workspace.floats("x", config.hidden)
        writing = emit_write(
            script, workspace, config, written, norm=self._norm, normalised=normalised.floats
        )
        script.barrier()
        products = [(self._down, low.floats)]
        if self._inject is not None:
            products.append((self._inject, workspace.floats("gains", config.num_streams)))
        multiply(script, normalised, *products)
        script.barrier()
        script.add(
            silu_task(), record(ROWS, values=low.floats, width=rank), per_token=1, ns=0.5 * rank, keep=low
        )
        script.barrier()
        multiply(script, low, (self._up, gates))
        script.barrier()
        script.add(
            gated_sum_task(),
            record(
                GATES,
                gates=gates,
                normalised=normalised.floats,
                out=x,
                num_streams=config.num_streams,
                hidden=config.hidden,
            ),
            per_token=-(-config.hidden // _CHUNK),
            ns=0.7 * _CHUNK * config.num_streams,
            keep=(gates, normalised, x),
        )
        script.barrier()
        return writing


def emit_write(
    script: Script,
    workspace: Workspace,
    config: Qwen4ExpConfig,
    written: Written | None,
    *,
    norm: Floats | None = None,
    normalised: Floats | None = None,
) -> Record:
    """Appends the writing to the streams and, where there is a `norm`, what is read from them afterwards.
    Returns its record."""
    params = record(
        STREAMS,
        streams=workspace.floats("streams", config.stream_width),
        num_streams=config.num_streams,
        hidden=config.hidden,
        epsilon=config.rms_epsilon,
    )
    if written is not None:
        params["output"] = address_of(written.output) if written.output is not None else 0
        params["gains"] = address_of(workspace.floats("gains", config.num_streams))
        if written.shared is not None and written.shared_gate is not None:
            params["shared"] = address_of(written.shared)
            params["shared_gate"] = address_of(written.shared_gate)
    if norm is not None and normalised is not None:
        params["norm"], params["normalised"] = address_of(norm), address_of(normalised)
    script.add(
        write_task(),
        params,
        per_token=config.num_streams,
        ns=0.5 * config.hidden,
        keep=(workspace, written, norm, normalised),
    )
    return params
