"""The prediction block (MTP, "nextn"): from the streams behind the trunk's last layer at a position p, and
the token at p + 1, what the token at p + 2 is read from.

    e    = rms_norm(embedding of the token)
    h_c  = rms_norm(stream c)
    x'_c = projection of [e, h_c]                the same matrix for every stream
    x'   = one attention layer with experts of its own, applied to x'

Embedding and head are the trunk's, the reader before the head is the block's own. To predict further, its own
streams x' take the place of the trunk's. It keeps keys and values of its own, one position for each pair of
streams and token; a pair has the position p of its streams.
"""

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch
from gpu_worker.model.hyper_connection import StreamReader, rms_norm
from gpu_worker.model.interface import RoutedExperts
from gpu_worker.model.layer import Layer
from gpu_worker.model.rotary import Rotary, Rotation
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


def prediction_prefix(config: Qwen4ExpConfig) -> str:
    """The prefix of the tensors that only the prediction block has."""
    return f"{block_prefix(config.num_layers)}nextn."


class Prediction:
    """The block between embedding and head."""

    def __init__(self, device: Device, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        prefix = prediction_prefix(config)
        self._epsilon = config.rms_epsilon
        self._token_norm = device.tensor(f"{prefix}enorm.weight")
        self._stream_norm = device.tensor(f"{prefix}hnorm.weight").view(config.num_streams, config.hidden)
        self._join = device.linear(f"{prefix}eh_proj.weight")
        self._layer = Layer(device, config.num_layers, config, rotary)
        self._final = StreamReader(device, f"{prefix}hc_head_", config)

    def __call__(
        self, embedded: Tensor, streams: Tensor, batch: Batch, rotation: Rotation, experts: RoutedExperts
    ) -> Tensor:
        """embedded [tokens, hidden], of the tokens that come next, and streams [tokens, streams, hidden] ->
        streams of the same shape; advances the block's state of every sequence in the batch, which is one
        for prediction."""
        tokens = rms_norm(embedded, self._token_norm, self._epsilon)[:, None, :].expand_as(streams)
        hidden = rms_norm(streams, self._stream_norm, self._epsilon)
        joined = self._join(torch.cat([tokens, hidden], -1).flatten(0, 1)).view_as(streams)
        return self._layer(joined, batch, rotation, experts)

    def read(self, streams: Tensor) -> Tensor:
        """What the head is applied to: streams [n, streams, hidden] -> [n, hidden]."""
        return self._final.read(streams)
