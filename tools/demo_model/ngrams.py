"""The constants of the n-gram hash: multipliers, table sizes, offsets.

They follow from the config alone, by the rules of transformers' `Qwen4ExpTextNGramEmbedding`; the GGUF
file stores the results, so that a reader needs none of this.
"""

from dataclasses import dataclass
from math import isqrt

from tools.demo_model.config import DemoConfig

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class NgramHash:
    """How token ids become rows of the n-gram table."""

    multipliers: tuple[int, ...]
    """One odd 63-bit factor for each position of the n-gram, the current token first."""
    head_vocab_sizes: tuple[int, ...]
    """Consecutive primes: the number of rows of each head."""
    head_offsets: tuple[int, ...]
    """First row of each head."""
    num_rows: int
    """Rows of the whole table, padded."""


def ngram_hash(config: DemoConfig) -> NgramHash:
    """The constants of the only n-gram layer of `config`."""
    half_bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    multipliers = tuple(
        2 * (_splitmix64(config.seed + _GAMMA * (position + 1)) % half_bound) + 1
        for position in range(config.ngram_size)
    )
    sizes: list[int] = []
    candidate = config.ngram_vocab_size_base
    while len(sizes) < config.num_ngram_heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    offsets = tuple(sum(sizes[:head]) for head in range(len(sizes)))
    divisor = config.make_ngram_vocab_size_divisible_by
    return NgramHash(multipliers, tuple(sizes), offsets, -(-sum(sizes) // divisor) * divisor)


def _splitmix64(value: int) -> int:
    """The mixing function of Vigna's SplitMix64."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, isqrt(value) + 1))
