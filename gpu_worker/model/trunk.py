"""The layers of `qwen4exp` in torch operations: the model's definition, for every device torch knows.

Every token carries `num_streams` residual streams. Each layer reads a vector from them, mixes tokens (delta
net or attention), writes back, reads again, mixes experts, writes back. Before one of the layers the n-gram
embedding is added to the streams. A last reader and the output head make the logits.
"""

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch
from gpu_worker.model.hyper_connection import StreamReader
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.model.layer import Layer
from gpu_worker.model.ngram_embedding import NgramEmbedding
from gpu_worker.model.prediction import Prediction
from gpu_worker.model.rotary import Rotary
from shared.model_config import Qwen4ExpConfig


class TorchTrunk:
    """All layers, the embedding and the head, as torch operations on the device; and the prediction block,
    where the model has one."""

    def __init__(
        self, device: Device, config: Qwen4ExpConfig, head_name: str, report: ProgressReport
    ) -> None:
        self._num_streams = config.num_streams
        self._embedding = device.row_table("token_embd.weight")
        self._rotary = Rotary(config.rope_dim, config.rope_base, config.rope_scaling, device.torch_device)
        self._ngram_layer = config.ngram.layer if config.ngram is not None else None
        self._ngram = NgramEmbedding(device, config, config.ngram) if config.ngram is not None else None
        self._layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            self._layers.append(Layer(device, layer, config, self._rotary))
        self._final = StreamReader(device, "output_hc_", config)
        self._head = device.linear(head_name)
        self._prediction = Prediction(device, config, self._rotary) if config.num_prediction_layers else None

    @property
    def has_prediction(self) -> bool:
        """As `gpu_worker.model.interface.Trunk` says, as all that follow."""
        return self._prediction is not None

    @torch.inference_mode()
    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """All layers, and the embedding before them."""
        streams = self._embedding(batch.token_ids)[:, None, :].expand(-1, self._num_streams, -1)
        rotation = self._rotary.at(batch.positions)
        for number, layer in enumerate(self._layers):
            if self._ngram is not None and number == self._ngram_layer:
                assert ngram is not None, "a model with an n-gram layer needs n-gram features"
                streams = self._ngram(streams, ngram.collect(), batch)
            streams = layer(streams, batch, rotation, experts)
        return streams

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return self._head(self._final.read(streams))

    @torch.inference_mode()
    def predict(self, batch: Batch, streams: Tensor, experts: RoutedExperts) -> Tensor:
        """The prediction block, and the embedding before it."""
        assert self._prediction is not None, "the model has no prediction block"
        embedded, rotation = self._embedding(batch.token_ids), self._rotary.at(batch.positions)
        return self._prediction(embedded, streams, batch, rotation, experts)

    @torch.inference_mode()
    def prediction_logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        assert self._prediction is not None, "the model has no prediction block"
        return self._head(self._prediction.read(streams))
