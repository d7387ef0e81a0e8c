"""The mixture of experts of one layer: routing here, routed experts elsewhere, the shared expert here.

The routed experts are handed over first and collected last, so the shared expert is computed meanwhile.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Device
from gpu_worker.model.interface import RoutedExperts
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


class MixtureOfExperts:
    """Router and shared expert of one layer."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig) -> None:
        prefix = block_prefix(layer)
        self._layer = layer
        self._num_used = config.num_experts_used
        self._weights_scale = config.expert_weights_scale
        self._router = device.linear(f"{prefix}ffn_gate_inp.weight")
        self._shared_gate = device.tensor(f"{prefix}ffn_gate_inp_shexp.weight").flatten()
        self._gate = device.linear(f"{prefix}ffn_gate_shexp.weight")
        self._up = device.linear(f"{prefix}ffn_up_shexp.weight")
        self._down = device.linear(f"{prefix}ffn_down_shexp.weight")

    def __call__(self, x: Tensor, experts: RoutedExperts) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        chosen = self._router(x).topk(self._num_used, dim=-1)
        # Renormalising the chosen probabilities of a softmax is a softmax over the chosen logits.
        weights = chosen.values.softmax(-1) * self._weights_scale
        ticket = experts.submit(self._layer, x, chosen.indices, weights)
        shared_output = self._down(functional.silu(self._gate(x)) * self._up(x))
        gate = torch.sigmoid(x @ self._shared_gate)
        return torch.addcmul(experts.collect(ticket), gate[:, None], shared_output)
