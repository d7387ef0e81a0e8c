"""One layer in torch operations: reads from the streams, mixes tokens, writes back, and so with experts."""

from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.attention import Attention
from gpu_worker.model.batch import Batch
from gpu_worker.model.delta_net import DeltaNet
from gpu_worker.model.hyper_connection import StreamMixer, write
from gpu_worker.model.interface import RoutedExperts
from gpu_worker.model.moe import MixtureOfExperts
from gpu_worker.model.rotary import Rotary, Rotation
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


class Layer:
    """The parts of one layer, in the order they run."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        prefix = block_prefix(layer)
        self._token_input = StreamMixer(device, f"{prefix}hc_attn_", config)
        self._token_mixer: DeltaNet | Attention = (
            DeltaNet(device, layer, config)
            if config.is_recurrent[layer]
            else Attention(device, layer, config, rotary)
        )
        self._expert_input = StreamMixer(device, f"{prefix}hc_ffn_", config)
        self._experts = MixtureOfExperts(device, layer, config)

    def __call__(self, streams: Tensor, batch: Batch, rotation: Rotation, experts: RoutedExperts) -> Tensor:
        """streams [tokens, streams, hidden] before the layer -> behind it; advances the state of every
        sequence in the batch. `rotation` is that of the batch's tokens."""
        x, gains = self._token_input.read_with_gains(streams)
        streams = write(streams, gains, self._mix_tokens(x, batch, rotation))
        x, gains = self._expert_input.read_with_gains(streams)
        return write(streams, gains, self._experts(x, experts))

    def _mix_tokens(self, x: Tensor, batch: Batch, rotation: Rotation) -> Tensor:
        if isinstance(self._token_mixer, DeltaNet):
            return self._token_mixer(x, batch)
        return self._token_mixer(x, batch, rotation)
