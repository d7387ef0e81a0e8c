"""The causal convolution over each channel that delta nets and the n-gram embedding share."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.state.sequence_state import num_kept


def load_kernel(stored: Tensor) -> Tensor:
    """A stored kernel [channels, taps], oldest tap first, as [taps, channels]."""
    return stored.t().contiguous()


def convolve(
    inputs: Tensor,
    earlier: Tensor,
    num_pending: int,
    kernel: Tensor,
    dilation: int = 1,
    snapshots: Sequence[tuple[int, Tensor]] = (),
) -> Tensor:
    """inputs [tokens, channels], kernel [taps, channels] -> the convolution, followed by SiLU, of the same
    shape as the inputs.

    `earlier` [at least num_pending + reach, channels], with reach = (taps - 1) * dilation, are the inputs
    before: the last reach of those up to the pending tokens. Afterwards they are those before the tokens that
    are pending now, and these. Each of the `snapshots` gets what they were before the token of that number.
    """
    num_tokens, reach = len(inputs), (len(kernel) - 1) * dilation
    history = torch.cat([earlier[num_pending : num_pending + reach], inputs])
    total = history[:num_tokens] * kernel[0]
    for tap in range(1, len(kernel)):
        start = tap * dilation
        total.addcmul_(history[start : start + num_tokens], kernel[tap])
    for number, rows in snapshots:
        rows.copy_(history[number + reach - len(rows) : number + reach])
    kept = reach + num_kept(num_tokens)
    earlier[:kept] = history[len(history) - kept :]
    return functional.silu(total)
