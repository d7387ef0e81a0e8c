"""The forward pass on the CPU: every layer is a few programs of tasks (`layer`), between them the hand-over
of experts; all layers together are a few native calls (`layer_stack`).

Formulas, and what state means, are in `gpu_worker.model`; state lives in `gpu_worker.state`, and both ways of
computing a step leave the same there.
"""

import torch
from torch import Tensor

from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.native.embedding import Embedding
from gpu_worker.native.head import Head
from gpu_worker.native.layer import Layer
from gpu_worker.native.layer_stack import LayerStack
from gpu_worker.native.prediction import Prediction
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.weights import Weights
from shared.model_config import Qwen4ExpConfig
from shared.native.team import Team


class NativeTrunk:
    """All layers, from embedded tokens to logits; and the prediction block, where the model has one."""

    def __init__(
        self, weights: Weights, team: Team, config: Qwen4ExpConfig, head_name: str, report: ProgressReport
    ) -> None:
        self._team = team
        self._embedding = Embedding(weights, config)
        rotation = RotationTable(config.rope_dim, config.rope_base, config.rope_scaling)
        layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            layers.append(Layer(weights, layer, config, rotation))
        report("compiling what layers do", 1.0)
        matrix = weights.matrix(head_name)
        self._head = Head(weights, config, matrix, "output_hc_")
        self._stack = LayerStack(team, config, self._embedding, layers, rotation)
        self._prediction = (
            Prediction(weights, team, config, rotation, matrix) if config.num_prediction_layers else None
        )

    @property
    def has_prediction(self) -> bool:
        """As `gpu_worker.model.interface.Trunk` says, as all that follow."""
        return self._prediction is not None

    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """All layers, and the embedding before them."""
        self._stack.reserve(batch.num_tokens)
        self._embedding.token_ids[: batch.num_tokens] = batch.token_ids.numpy()
        return self._stack.run(batch, experts, ngram)

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return torch.from_numpy(self._head(self._team, streams.numpy()))

    def predict(self, batch: Batch, streams: Tensor, experts: RoutedExperts) -> Tensor:
        """The prediction block, and the embedding before it."""
        assert self._prediction is not None, "the model has no prediction block"
        return self._prediction(batch, streams, experts)

    def prediction_logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        assert self._prediction is not None, "the model has no prediction block"
        return self._prediction.logits(streams)
