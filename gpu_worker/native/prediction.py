"""The prediction block as tasks (`gpu_worker.model.prediction` has the formulas): one layer behind a
beginning of its own, in one native call where its experts are behind a ring. It has buffers of its own, so
that what the trunk leaves stays there.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import RoutedExperts
from gpu_worker.model.prediction import prediction_prefix
from gpu_worker.native.embedding import emit_gathering
from gpu_worker.native.head import Head
from gpu_worker.native.indexer import normalise
from gpu_worker.native.layer import Layer
from gpu_worker.native.layer_stack import LayerStack
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Matrix, Plane, Workspace, aligned, multiply
from shared.model_config import Qwen4ExpConfig
from shared.native.memory import floats_at
from shared.native.records import fields, reader, record
from shared.native.team import Team
from shared.quants.jit import compile_task

JOINED = fields(
    "rows",  # f32 [tokens, hidden]: embeddings
    "streams",  # f32 [tokens, num_streams, hidden]
    "row_norm",  # f32 [hidden]
    "stream_norm",  # f32 [num_streams, hidden]
    "out",  # f32 [tokens, num_streams, 2, hidden]
    "num_streams",
    "hidden",
    epsilon=np.float32,
)
_joined_at = reader(JOINED)


def _join_streams(params: int, start: int, stop: int, scratch: int) -> None:
    step = _joined_at(params)
    hidden, num_streams, epsilon = step.hidden, step.num_streams, step.epsilon
    row_norm = floats_at(step.row_norm)
    for item in range(start, stop):
        row = floats_at(step.rows + item // num_streams * hidden * 4)
        stream = floats_at(step.streams + item * hidden * 4)
        stream_norm = floats_at(step.stream_norm + item % num_streams * hidden * 4)
        out = step.out + 2 * item * hidden * 4
        normalise(row, row_norm, floats_at(out), hidden, epsilon)
        normalise(stream, stream_norm, floats_at(out + hidden * 4), hidden, epsilon)


@functools.cache
def join_streams_task() -> int:
    """Params `JOINED`, items the streams of all tokens: beside each the embedding, both normalised."""
    return compile_task(_join_streams, "join_streams")


class _JoinedInput:
    """What comes before the block's layer: from token ids and streams to the layer's streams."""

    def __init__(self, weights: Weights, config: Qwen4ExpConfig) -> None:
        prefix = prediction_prefix(config)
        self._config = config
        self._embedding = weights.matrix("token_embd.weight")
        self._row_norm = weights.floats(f"{prefix}enorm.weight")
        self._stream_norm = weights.floats(f"{prefix}hnorm.weight")
        self._projection = weights.matrix(f"{prefix}eh_proj.weight")

    def build(self, workspace: Workspace) -> None:
        """Takes its buffers."""
        config = self._config
        self._token_ids: NDArray[np.int64] = np.zeros(workspace.capacity, np.int64)
        self._rows = workspace.floats("x", config.hidden)
        self._streams = workspace.floats("streams", config.stream_width)
        # A row for each stream, where the planes of a workspace have one for each token.
        self._joined = Plane(aligned(workspace.capacity * config.num_streams, 2 * config.hidden))
        self._joining = record(
            JOINED,
            rows=self._rows,
            row_norm=self._row_norm,
            stream_norm=self._stream_norm,
            out=self._joined.floats,
            num_streams=config.num_streams,
            hidden=config.hidden,
            epsilon=config.rms_epsilon,
        )

    def take(self, token_ids: Tensor, streams: Tensor) -> None:
        """What the next step joins: ids [tokens] int64, and streams [tokens, streams, hidden], C-contiguous,
        which have to stay where they are meanwhile. They may be where the step leaves its own: they are read
        before anything is written there."""
        num_tokens = len(token_ids)
        self._token_ids[:num_tokens] = token_ids.numpy()
        self._joining["streams"] = streams.data_ptr()
        self._joined.record["num_tokens"] = num_tokens * self._config.num_streams

    def emit(self, script: Script) -> None:
        """Appends all of it."""
        config = self._config
        emit_gathering(script, self._embedding, self._token_ids, self._rows, keep=self)
        script.add(
            join_streams_task(),
            self._joining,
            per_token=config.num_streams,
            ns=2.0 * config.hidden,
            keep=self,
        )
        script.barrier()
        products = self._projection, self._streams
        multiply(script, self._joined, products, rows_per_token=config.num_streams)
        script.barrier()


class Prediction:
    """The block, from token ids and streams to logits."""

    def __init__(
        self, weights: Weights, team: Team, config: Qwen4ExpConfig, rotation: RotationTable, head: Matrix
    ) -> None:
        self._team = team
        self._input = _JoinedInput(weights, config)
        layer = Layer(weights, config.num_layers, config, rotation)
        self._stack = LayerStack(team, config, self._input, [layer], rotation)
        self._head = Head(weights, config, head, f"{prediction_prefix(config)}hc_head_")

    def __call__(self, batch: Batch, streams: Tensor, experts: RoutedExperts) -> Tensor:
        """As `gpu_worker.model.interface.Trunk.predict`."""
        self._stack.reserve(batch.num_tokens)
        streams = streams.contiguous()
        self._input.take(batch.token_ids, streams)
        return self._stack.run(batch, experts, None)

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return torch.from_numpy(self._head(self._team, streams.numpy()))
