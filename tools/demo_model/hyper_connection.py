"""Hyper-connections: several residual streams instead of one, read and written with learned strengths.

Shapes: T tokens, C streams, H hidden size. The residual is `[T, C, H]`; a block reads and writes `[T, H]`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import ZeroCentredNorm, kernel, unit_rms


@kernel
def _mix_streams(
    residual: Tensor, norm: Tensor, down: Tensor, up: Tensor, inject: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One `[T, H]` input from the `[T, C, H]` residual, and how strongly each stream takes the answer."""
    num_tokens, num_streams, width = residual.shape
    normed = (unit_rms(residual) * (1 + norm.view(num_streams, width))).view(num_tokens, -1)
    squeezed = F.silu(F.linear(normed, down) / num_streams)
    gates = torch.sigmoid(F.linear(squeezed, up))
    mixed = (gates * normed).view(num_tokens, num_streams, width).mean(1)
    if inject is None:
        return mixed, None
    return mixed, 2 * torch.sigmoid(F.linear(normed, inject) / num_streams)


@kernel
def _write_streams(residual: Tensor, output: Tensor, strength: Tensor) -> Tensor:
    return residual + output.unsqueeze(1) * strength.unsqueeze(2)


class HyperConnection(nn.Module):
    """Reads a block's input from the residual streams, and writes its output back to them."""

    def __init__(self, config: DemoConfig, has_inject: bool = True) -> None:
        super().__init__()
        width = config.stream_width
        self.hc_norm = ZeroCentredNorm(width)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False)
        self.block_inject_weight = nn.Linear(width, config.hc_count, bias=False) if has_inject else None

    def _mix(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        inject = None if self.block_inject_weight is None else self.block_inject_weight.weight
        mixed, strength = _mix_streams(
            residual,
            self.hc_norm.weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            inject,
        )
        return mixed, strength

    def read(self, residual: Tensor) -> Tensor:
        """`[T, C, H]` to `[T, H]`, where nothing is written back."""
        return self._mix(residual)[0]

    def around(self, block: Callable[[Tensor], Tensor], residual: Tensor) -> Tensor:
        """The residual after `block` has read from it and written to it."""
        mixed, strength = self._mix(residual)
        assert strength is not None, "this mixer only reads"
        return _write_streams(residual, block(mixed), strength)
