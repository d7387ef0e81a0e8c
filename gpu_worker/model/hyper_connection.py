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
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension; `weight` may have more dimensions."""
    return functional.rms_norm(x, x.shape[-1:], eps=epsilon) * weight


class StreamReader:
    """Reads a block's input from the streams."""

    def __init__(self, device: Device, prefix: str, config: Qwen4ExpConfig) -> None:
        self._num_streams = config.num_streams
        self._epsilon = config.rms_epsilon
        self._norm = device.tensor(f"{prefix}norm.weight").view(config.num_streams, config.hidden)
        self._down = device.linear(f"{prefix}down.weight")
        self._up = device.linear(f"{prefix}up.weight")

    def read(self, streams: Tensor) -> Tensor:
        """streams [tokens, streams, hidden] -> [tokens, hidden]."""
        return self._mix(*self._normalise(streams))

    def _normalise(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Each stream by its own mean square [tokens, streams, hidden], and what the projections take: all
        of them side by side, divided by their number [tokens, streams * hidden]."""
        normalised = rms_norm(streams, self._norm, self._epsilon)
        return normalised, normalised.flatten(1) / self._num_streams

    def _mix(self, normalised: Tensor, flat: Tensor) -> Tensor:
        """The gated mean of the normalised streams: [tokens, hidden]."""
        gates = torch.sigmoid(self._up(functional.silu(self._down(flat))))
        return (gates.view_as(normalised) * normalised).mean(1)


class StreamMixer(StreamReader):
    """Reads a block's input, and the gains with which its output is written."""

    def __init__(self, device: Device, prefix: str, config: Qwen4ExpConfig) -> None:
        super().__init__(device, prefix, config)
        self._inject = device.linear(f"{prefix}inject.weight")

    def read_with_gains(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The input [tokens, hidden] and the gains [tokens, streams], both from the streams as they are."""
        normalised, flat = self._normalise(streams)
        return self._mix(normalised, flat), 2 * torch.sigmoid(self._inject(flat))


def write(streams: Tensor, gains: Tensor, output: Tensor) -> Tensor:
    """streams + gains * output, the output [tokens, hidden] going to every stream."""
    return torch.addcmul(streams, gains[:, :, None], output[:, None, :])
