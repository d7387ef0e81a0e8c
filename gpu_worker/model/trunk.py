"""The layers of `qwen4exp` in torch operations: the model's definition, for every device torch knows.

Every token carries `num_streams` residual streams. Each layer reads a vector from them, mixes tokens (delta
net or attention), writes back, reads again, mixes experts, writes back. Before one of the layers the n-gram
embedding is added to the streams. A last reader and the output head make the logits.
"""

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.attention import Attention
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta_net import DeltaNet
from gpu_worker.model.hyper_connection import StreamMixer, StreamReader, write
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.model.moe import MixtureOfExperts
from gpu_worker.model.ngram_embedding import NgramEmbedding
from gpu_worker.model.rotary import Rotary, Rotation
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


class _Layer:
    """The parts of one layer, in the order they run."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        prefix = block_prefix(layer)
        has_ngram = config.ngram is not None and config.ngram.layer == layer
        self.ngram = NgramEmbedding(device, config, config.ngram) if config.ngram and has_ngram else None
        self.token_input = StreamMixer(device, f"{prefix}hc_attn_", config)
        self._token_mixer: DeltaNet | Attention = (
            DeltaNet(device, layer, config)
            if config.is_recurrent[layer]
            else Attention(device, layer, config, rotary)
        )
        self.expert_input = StreamMixer(device, f"{prefix}hc_ffn_", config)
        self.experts = MixtureOfExperts(device, layer, config)

    def mix_tokens(self, x: Tensor, batch: Batch, rotation: Rotation) -> Tensor:
        """By delta net or attention: x [tokens, hidden] -> [tokens, hidden]."""
        if isinstance(self._token_mixer, DeltaNet):
            return self._token_mixer(x, batch)
        return self._token_mixer(x, batch, rotation)


class TorchTrunk:
    """All layers, the embedding and the head, as torch operations on the device."""

    def __init__(
        self, device: Device, config: Qwen4ExpConfig, head_name: str, report: ProgressReport
    ) -> None:
        self._num_streams = config.num_streams
        self._embedding = device.row_table("token_embd.weight")
        self._rotary = Rotary(config.rope_dim, config.rope_base, config.rope_scaling, device.torch_device)
        self._layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            self._layers.append(_Layer(device, layer, config, self._rotary))
        self._final = StreamReader(device, "output_hc_", config)
        self._head = device.linear(head_name)

    @torch.inference_mode()
    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """As `gpu_worker.model.interface.Trunk` says."""
        streams = self._embedding(batch.token_ids)[:, None, :].expand(-1, self._num_streams, -1)
        rotation = self._rotary.at(batch.positions)
        for layer in self._layers:
            if layer.ngram is not None:
                assert ngram is not None, "a model with an n-gram layer needs n-gram features"
                streams = layer.ngram(streams, ngram.collect(), batch)
            x, gains = layer.token_input.read_with_gains(streams)
            streams = write(streams, gains, layer.mix_tokens(x, batch, rotation))
            x, gains = layer.expert_input.read_with_gains(streams)
            streams = write(streams, gains, layer.experts(x, experts))
        return streams

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return self._head(self._final.read(streams))
