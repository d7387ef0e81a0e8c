"""From streams to logits, as tasks."""

import numpy as np
from numpy.typing import NDArray

from gpu_worker.native.script import Script, Sizes
from gpu_worker.native.streams import StreamReader
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Matrix, Workspace, multiply_into
from shared.model_config import Qwen4ExpConfig
from shared.native.task import address_of
from shared.native.team import Team

_FIRST_CAPACITY = 16


class Head:
    """The last reader and the output matrix, for the few tokens whose logits are wanted."""

    def __init__(self, weights: Weights, config: Qwen4ExpConfig, matrix: Matrix, prefix: str) -> None:
        """`prefix` is that of the reader's tensors."""
        self._config = config
        self._matrix = matrix
        self._reader = StreamReader(weights, prefix, config, has_gains=False)
        self._build(_FIRST_CAPACITY)

    def _build(self, capacity: int) -> None:
        self._workspace = Workspace(capacity)
        self._streams = self._workspace.floats("streams", self._config.stream_width)
        self._script = Script()
        self._reader.emit(self._script, self._workspace, None)
        # Logits are large and go to whoever asked: each time into memory of their own.
        self._product = multiply_into(
            self._script, self._workspace.plane("x", self._config.hidden), self._matrix
        )

    def __call__(self, team: Team, streams: NDArray[np.float32]) -> NDArray[np.float32]:
        """streams [n, streams, hidden] -> logits [n, vocabulary]."""
        num_rows = len(streams)
        if num_rows > self._workspace.capacity:
            self._build(num_rows)
        self._streams[:num_rows] = streams.reshape(num_rows, -1)
        self._workspace.set_num_tokens(num_rows)
        logits = np.empty((num_rows, self._matrix.num_rows), np.float32)
        self._product["out"] = address_of(logits)
        team.run(self._script.resize(Sizes(num_rows)))
        return logits
