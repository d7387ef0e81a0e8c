"""The causal convolution over each channel that delta nets and the n-gram embedding share."""

import torch
from torch import Tensor
from torch.nn import functional


def load_kernel(stored: Tensor) -> Tensor:
    """A stored kernel [channels, taps], oldest tap first, as [taps, channels]."""
    return stored.t().contiguous()


def convolve(inputs: Tensor, earlier: Tensor, kernel: Tensor, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """inputs [tokens, channels] after `earlier` [(taps - 1) * dilation, channels], kernel [taps, channels] ->
    the convolution followed by SiLU [tokens, channels], and what is `earlier` for the next tokens.
    """
    num_tokens, reach = len(inputs), len(earlier)
    history = torch.cat([earlier, inputs])
    total = history[:num_tokens] * kernel[0]
    for tap in range(1, len(kernel)):
        start = tap * dilation
        total.addcmul_(history[start : start + num_tokens], kernel[tap])
    # A copy, so that the next state does not keep the whole history in memory.
    return functional.silu(total), history[len(history) - reach :].clone()
