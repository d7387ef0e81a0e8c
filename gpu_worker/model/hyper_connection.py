"""Hyper-connections: how a block reads from the residual streams and writes back to them.

The residual of a token is `num_streams` vectors. A block reads one vector, a gated mean of the normalised
streams, and its output is added to every stream with a gain of its own.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Device
from shared.model_config import Qwen4ExpConfig


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


class StreamReader:
    """Reads a block's input from the streams."""

    def __init__(self, device: Device, prefix: str, config: Qwen4ExpConfig) -> None:
        self._num_streams = config.num_streams
        self._epsilon = config.rms_epsilon
        self._norm = device.tensor(f"{prefix}norm.weight").view(config.num_streams, config.hidden)
        self._down = device.linear(f"{prefix}down.weight")
        self._up = device.linear(f"{prefix}up.weight")

    def normalise(self, streams: Tensor) -> Tensor:
        """Each stream by its own mean square: [tokens, streams, hidden]."""
        return rms_norm(streams, self._norm, self._epsilon)

    def mix(self, normalised: Tensor) -> Tensor:
        """The gated mean of the normalised streams: [tokens, hidden]."""
        flat = normalised.flatten(1)
        gates = torch.sigmoid(self._up(functional.silu(self._down(flat) / self._num_streams)))
        return (gates.view_as(normalised) * normalised).mean(1)

    def read(self, streams: Tensor) -> Tensor:
        """streams [tokens, streams, hidden] -> [tokens, hidden]."""
        return self.mix(self.normalise(streams))


class StreamMixer(StreamReader):
    """Reads a block's input, and the gains with which its output is written."""

    def __init__(self, device: Device, prefix: str, config: Qwen4ExpConfig) -> None:
        super().__init__(device, prefix, config)
        self._inject = device.linear(f"{prefix}inject.weight")

    def read_with_gains(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The input [tokens, hidden] and the gains [tokens, streams], both from the streams as they are."""
        normalised = self.normalise(streams)
        gains = 2 * torch.sigmoid(self._inject(normalised.flatten(1)) / self._num_streams)
        return self.mix(normalised), gains


def write(streams: Tensor, gains: Tensor, output: Tensor) -> Tensor:
    """streams + gains * output, the output [tokens, hidden] going to every stream."""
    return streams + gains[:, :, None] * output[:, None, :]
