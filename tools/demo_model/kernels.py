"""Pieces that several layers share, and the switch that compiles the element-wise ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MOST_SHAPES = 32
"""Of one kernel: a batch has one of several sequence lengths, and each is compiled for itself."""


class _Kernel(Generic[Parameters, Result]):
    """A function that runs as written until kernels are compiled."""

    is_compiling = False

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        self._function = function
        self._compiled: Callable[Parameters, Result] | None = None

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not _Kernel.is_compiling:
            return self._function(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=False)
        return self._compiled(*args, **kwargs)


def kernel(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Marks an element-wise function, which is worth compiling."""
    return _Kernel(function)


def compile_kernels() -> None:
    """Compiles the marked functions from now on: about twice the speed, after a minute of compiling."""
    torch._dynamo.config.recompile_limit = _MOST_SHAPES
    _Kernel.is_compiling = True


@contextmanager
def uncompiled() -> Iterator[None]:
    """For passes over many different shapes, which would each be compiled."""
    was_compiling, _Kernel.is_compiling = _Kernel.is_compiling, False
    try:
        yield
    finally:
        _Kernel.is_compiling = was_compiling


def unit_rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x` over the root of its mean square along the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class ZeroCentredNorm(nn.Module):
    """RMS norm whose stored weight is the factor minus one; `forward` norms the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return unit_rms(x) * (1 + self.weight)


def causal_convolution(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise over the past of `[B, S, channels]`; `weight` is `[channels, 1, taps]`, oldest first."""
    length, num_taps = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, (num_taps - 1) * dilation, 0))
    taps = [
        padded[:, tap * dilation : tap * dilation + length] * weight[:, 0, tap] for tap in range(num_taps)
    ]
    return torch.stack(taps).sum(0)
