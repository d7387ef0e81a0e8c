"""Rotary position embedding of the first dimensions of a head, in the halves layout.

Angles are computed in float32 as the reference implementation does, so that long contexts agree with it.

Scaling of positions is that of YaRN (Peng et al. 2023, "Efficient Context Window Extension of Large Language
Models") as transformers and llama.cpp compute it: the ramp rises by the number of the pair, and its borders
are whole pairs. Where the two differ, for a trained length of a few tokens or one in which every pair turns
often, this is llama.cpp's.
"""

import math

import torch
from torch import Tensor

from shared.rope_scaling import RopeScaling, ScalingType

# As wide as a ramp without width is taken for, so that nothing is divided by 0.
_NARROWEST_RAMP = 0.001


class Rotation:
    """The rotations that belong to some tokens, made once for all layers and heads: `cos` and `sin` are
    [tokens, 1, half of the rotary dimensions]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads, head_dim], rotated; dimensions beyond the rotary ones pass through."""
        half = self.cos.shape[-1]
        first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin, rest], -1
        )

    def rows(self, rows: slice) -> "Rotation":
        """The rotations of some of the tokens."""
        return Rotation(self.cos[rows], self.sin[rows])


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """What each pair of `dim` rotary dimensions turns by from one position to the next, in radians: float32
    [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / base**exponents
    match scaling.type:
        case ScalingType.NONE:
            return frequencies
        case ScalingType.LINEAR:
            return frequencies / scaling.factor
        case ScalingType.YARN:
            stretched = _stretched_share(dim, base, scaling)
            return frequencies * (1 - stretched) + frequencies / scaling.factor * stretched


def _stretched_share(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """0 for pairs that turn fast, 1 for those that turn slowly, rising by the number of the pair between:
    float32 [dim / 2]."""
    first = max(math.floor(_pair_that_turns(scaling.beta_fast, dim, base, scaling.original_context)), 0)
    last = min(math.ceil(_pair_that_turns(scaling.beta_slow, dim, base, scaling.original_context)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    return ((pairs - first) / max(last - first, _NARROWEST_RAMP)).clamp(0, 1)


def _pair_that_turns(times: float, dim: int, base: float, num_tokens: int) -> float:
    """The pair, with a fraction, whose angle goes round so many times within so many tokens."""
    return dim * math.log(num_tokens / (2 * math.pi * times)) / (2 * math.log(base))


class Rotary:
    """The rotations of one model. Cosines and sines are multiplied by the scaling's attention factor, so that
    every score of rotated queries and keys, the indexer's too, is multiplied by its square."""

    def __init__(self, dim: int, base: float, scaling: RopeScaling, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(dim, base, scaling).to(device)
        self._attention_factor = scaling.attention_factor

    def at(self, positions: Tensor) -> Rotation:
        """The rotations of tokens at `positions` [tokens]."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1:
            cos *= self._attention_factor
            sin *= self._attention_factor
        return Rotation(cos, sin)
