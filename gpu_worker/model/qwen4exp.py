"""The forward pass of `qwen4exp`: from token ids to logits.

Every token carries `num_streams` residual streams. Each layer reads a vector from them, mixes tokens (delta
net or attention), writes back, reads again, mixes experts, writes back. Before one of the layers the n-gram
embedding is added to the streams. A last reader and the output head make the logits.
"""

from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.attention import Attention
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta_net import DeltaNet
from gpu_worker.model.hyper_connection import StreamMixer, StreamReader, write
from gpu_worker.model.moe import MixtureOfExperts, RoutedExperts
from gpu_worker.model.ngram_embedding import NgramEmbedding
from gpu_worker.model.rotary import Rotary, Rotation
from gpu_worker.state.sequence_state import SequenceState
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


class NgramFeatures(Protocol):
    """Whoever gathers the n-gram features of the step's tokens."""

    def collect(self) -> Tensor:
        """Waits for the features of the step, in the order of its tokens: [tokens, feature width]."""


class ProgressReport(Protocol):
    """Told how far loading is."""

    def __call__(self, activity: str, progress: float) -> None: ...


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


class Qwen4Exp:
    """The model on one device."""

    def __init__(
        self, device: Device, config: Qwen4ExpConfig, *, has_own_head: bool, report: ProgressReport
    ) -> None:
        """`has_own_head`: whether the file has an output matrix; the embedding serves as one otherwise."""
        self.config = config
        self._device = device
        self._embedding = device.row_table("token_embd.weight")
        self._rotary = Rotary(config.rope_dim, config.rope_base, device.torch_device)
        self._layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            self._layers.append(_Layer(device, layer, config, self._rotary))
        self._final = StreamReader(device, "output_hc_", config)
        self._head = device.linear("output.weight" if has_own_head else "token_embd.weight")

    def new_state(self) -> SequenceState:
        """The state of a sequence that has not begun."""
        return SequenceState(self.config, self._device.torch_device)

    @torch.inference_mode()
    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """Computes the batch and advances its sequences by it: streams [tokens, streams, hidden]."""
        self._device.begin_step(batch.num_tokens)
        streams = self._embedding(batch.token_ids)[:, None, :].expand(-1, self.config.num_streams, -1)
        rotation = self._rotary.at(batch.positions)
        for layer in self._layers:
            if layer.ngram is not None:
                assert ngram is not None, "a model with an n-gram layer needs n-gram features"
                streams = layer.ngram(streams, ngram.collect(), batch)
            x, gains = layer.token_input.read_with_gains(streams)
            streams = write(streams, gains, layer.mix_tokens(x, batch, rotation))
            x, gains = layer.expert_input.read_with_gains(streams)
            streams = write(streams, gains, layer.experts(x, experts))
        for span in batch.spans:
            span.state.position += span.num_tokens
        return streams

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return self._head(self._final.read(streams))
