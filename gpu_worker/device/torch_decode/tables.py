"""The codebooks of `shared.quants.codebooks` on a device, brought there once."""

import functools

import torch
from torch import Tensor

from shared.quants import codebooks


@functools.cache
def table(name: str, device: torch.device) -> Tensor:
    """The table of that name, float32 in its own shape."""
    with torch.inference_mode(False):
        return torch.tensor(getattr(codebooks, name), dtype=torch.float32, device=device)
