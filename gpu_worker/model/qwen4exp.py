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
from gpu_worker.model.rotary import Rotary
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
    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        prefix = block_prefix(layer)
        self.token_input = StreamMixer(device, f"{prefix}hc_attn_", config)
        self.token_mixer: DeltaNet | Attention = (
            DeltaNet(device, layer, config)
            if config.is_recurrent[layer]
            else Attention(device, layer, config, rotary)
        )
        self.expert_input = StreamMixer(device, f"{prefix}hc_ffn_", config)
        self.experts = MixtureOfExperts(device, layer, config)


class Qwen4Exp:
    """The model on one device."""

    def __init__(
        self, device: Device, config: Qwen4ExpConfig, *, has_own_head: bool, report: ProgressReport
    ) -> None:
        """`has_own_head`: whether the file has an output matrix; the embedding serves as one otherwise."""
        self.config = config
        self._device = device
        self._embedding = device.row_table("token_embd.weight")
        rotary = Rotary(config.rope_dim, config.rope_base, device.torch_device)
        self._ngram = NgramEmbedding(device, config, config.ngram) if config.ngram is not None else None
        self._layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            self._layers.append(_Layer(device, layer, config, rotary))
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
        for number, layer in enumerate(self._layers):
            if (
                self._ngram is not None
                and self.config.ngram is not None
                and number == self.config.ngram.layer
            ):
                assert ngram is not None
                streams = self._ngram(streams, ngram.collect(), batch)
            x, gains = layer.token_input.read_with_gains(streams)
            streams = write(streams, gains, layer.token_mixer(x, batch))
            x, gains = layer.expert_input.read_with_gains(streams)
            streams = write(streams, gains, layer.experts(x, experts))
        for span in batch.spans:
            span.state.position += span.num_tokens
        return streams

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return self._head(self._final.read(streams))
