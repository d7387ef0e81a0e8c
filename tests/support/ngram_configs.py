"""Small n-gram embeddings of every shape."""

from shared.model_config import NgramConfig

EOS = 5


def ngram_config(
    ngram_size: int = 3,
    heads_per_ngram: int = 2,
    *,
    multipliers: tuple[int, ...] = (23703573157769, 20109073645365, 8052911324071, 6700417),
    eos: int = EOS,
) -> NgramConfig:
    """A hash with primes from a list, and offsets as files have them."""
    primes = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)
    sizes = primes[: (ngram_size - 1) * heads_per_ngram]
    return NgramConfig(
        layer=1,
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        conv_kernel=4,
        eos_token_id=eos,
        multipliers=multipliers[:ngram_size],
        head_vocab_sizes=sizes,
        head_offsets=tuple(sum(sizes[:head]) for head in range(len(sizes))),
        row_width=32,
    )
