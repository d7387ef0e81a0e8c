"""The n-gram embedding (PLE): features of the last few token ids, mixed into the streams before one block.

The features, rows of a table too large for any memory, are gathered by the stager; here they are projected,
gated by how well they match each stream, and passed through a dilated convolution.
"""

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.convolution import convolve, load_kernel
from gpu_worker.model.hyper_connection import rms_norm
from shared.model_config import NgramConfig, Qwen4ExpConfig
from shared.tensor_catalog import block_prefix

# Below this the gate's argument has no defined slope; the reference clamps there.
MIN_MATCH = 1e-6


class NgramEmbedding:
    """The n-gram module of one block."""

    def __init__(self, device: Device, config: Qwen4ExpConfig, ngram: NgramConfig) -> None:
        prefix = f"{block_prefix(ngram.layer)}ple_"
        self._config = config
        self._ngram = ngram
        self._key = device.linear(f"{prefix}key.weight")
        self._value = device.linear(f"{prefix}value.weight")
        self._key_norm, self._query_norm, self._conv_norm = (
            device.tensor(f"{prefix}norm_{which}.weight").view(config.num_streams, config.hidden)
            for which in ("key", "query", "conv")
        )
        self._kernel = load_kernel(device.tensor(f"{prefix}conv1d.weight"))

    def __call__(self, streams: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """streams [tokens, streams, hidden], features [tokens, feature width] -> new streams; advances the
        convolution's history of every sequence in the batch."""
        config = self._config
        key = rms_norm(self._key(features).view_as(streams), self._key_norm, config.rms_epsilon)
        query = rms_norm(streams, self._query_norm, config.rms_epsilon)
        match = (key * query).sum(-1) * config.hidden**-0.5
        gate = torch.sigmoid(match.sign() * match.abs().clamp_min(MIN_MATCH).sqrt())
        gated = gate[:, :, None] * self._value(features)[:, None, :]
        conv_inputs = rms_norm(gated, self._conv_norm, config.rms_epsilon).flatten(1)
        convolved = torch.cat(
            [self._convolve(conv_inputs[span.start : span.stop], span) for span in batch.spans]
        )
        return streams + gated + convolved.view_as(streams)

    def _convolve(self, inputs: Tensor, span: Span) -> Tensor:
        """The convolution of one sequence, whose taps are one n-gram apart: [tokens, width]."""
        state = span.state
        assert state.ngram_inputs is not None
        snapshots = [
            (number, snapshot.ngram_inputs)
            for number, snapshot in zip(span.cuts, span.snapshots, strict=True)
            if snapshot.ngram_inputs is not None
        ]
        dilation = self._ngram.ngram_size
        return convolve(inputs, state.ngram_inputs, state.num_pending, self._kernel, dilation, snapshots)
