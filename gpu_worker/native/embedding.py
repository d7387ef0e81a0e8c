"""The token embedding as tasks: rows of its matrix, decoded into every stream."""

import functools

import numpy as np
from numpy.typing import NDArray

from gpu_worker.native.script import Script
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Floats, Matrix, Workspace
from shared.model_config import Qwen4ExpConfig
from shared.native.memory import floats_at
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants import gather_task, gathered_record
from shared.quants.jit import compile_task

SPREAD = fields(
    "rows",  # f32 [tokens, hidden]
    "streams",  # f32 [tokens, num_streams, hidden]
    "num_streams",
    "hidden",
)
_spread_at = reader(SPREAD)


def _spread_rows(params: int, start: int, stop: int, scratch: int) -> None:
    step = _spread_at(params)
    hidden, num_streams = step.hidden, step.num_streams
    for item in range(start, stop):
        row = floats_at(step.rows + item // num_streams * hidden * 4)
        stream = floats_at(step.streams + item * hidden * 4)
        for i in range(hidden):
            stream[i] = row[i]


@functools.cache
def spread_task() -> int:
    """Params `SPREAD`, items the streams of all tokens: copies."""
    return compile_task(_spread_rows, "spread_rows")


def emit_gathering(
    script: Script, matrix: Matrix, token_ids: NDArray[np.int64], rows: Floats, *, keep: object
) -> None:
    """Appends the rows of a matrix [vocabulary, width] that belong to `token_ids` [tokens], decoded into
    `rows` [tokens, width]. An id that has no row becomes NaN."""
    params = gathered_record(matrix.format, matrix.rows)
    params["numbers"], params["out"] = address_of(token_ids), address_of(rows)
    script.add(gather_task(matrix.format), params, per_token=1, ns=0.3 * rows.shape[1], keep=keep)
    script.barrier()


class Embedding:
    """The embedding of all tokens of a step."""

    def __init__(self, weights: Weights, config: Qwen4ExpConfig) -> None:
        self._config = config
        self._matrix = weights.matrix("token_embd.weight")

    def build(self, workspace: Workspace) -> None:
        """Takes its buffers."""
        config = self._config
        self.token_ids: NDArray[np.int64] = np.zeros(workspace.capacity, np.int64)
        """What the step embeds is written here. An id that has no row becomes NaN."""
        self._rows = workspace.floats("x", config.hidden)
        self._streams = workspace.floats("streams", config.stream_width)

    def emit(self, script: Script) -> None:
        """Appends all of it, from ids to streams."""
        config = self._config
        emit_gathering(script, self._matrix, self.token_ids, self._rows, keep=self)
        spread = record(
            SPREAD,
            rows=self._rows,
            streams=self._streams,
            num_streams=config.num_streams,
            hidden=config.hidden,
        )
        script.add(spread_task(), spread, per_token=config.num_streams, ns=0.1 * config.hidden, keep=self)
        script.barrier()
