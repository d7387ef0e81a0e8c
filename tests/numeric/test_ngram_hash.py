"""From token ids to rows of the n-gram table, against the definition in Python's unbounded integers."""

from functools import reduce
from operator import xor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model_config import NgramConfig
from stager.ngram_hash import NgramHash, windows_of

EOS = 248_044
# Constants of the size that the published model has; the last is the largest that a file may have here.
MULTIPLIERS = (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071, 37_143_089_710_271)
SIZES = (20_000_003, 20_000_023, 20_000_033, 20_000_047, 20_000_059, 20_000_063)


def config(ngram_size: int) -> NgramConfig:
    num_heads = 2 * (ngram_size - 1)
    sizes = SIZES[:num_heads]
    return NgramConfig(
        layer=1,
        ngram_size=ngram_size,
        heads_per_ngram=2,
        conv_kernel=4,
        eos_token_id=EOS,
        multipliers=MULTIPLIERS[:ngram_size],
        head_vocab_sizes=sizes,
        head_offsets=tuple(sum(sizes[:head]) for head in range(num_heads)),
        row_width=32,
    )


def rows_by_definition(token_ids: list[int], place: int, ngram: NgramConfig) -> list[int]:
    ids = [token_ids[place]]
    is_cut = False
    for back in range(1, ngram.ngram_size):
        source = place - back
        is_cut = is_cut or source < 0 or token_ids[source] == EOS
        ids.append(EOS if is_cut else token_ids[source])
    rows = []
    for order in range(2, ngram.ngram_size + 1):
        mixed = reduce(xor, (ids[n] * ngram.multipliers[n] for n in range(order)))
        heads = range((order - 2) * 2, (order - 1) * 2)
        rows += [mixed % ngram.head_vocab_sizes[head] + ngram.head_offsets[head] for head in heads]
    return rows


@settings(deadline=None)
@given(
    token_ids=st.lists(
        st.one_of(st.integers(0, 248_319), st.sampled_from([0, EOS, EOS, 248_319])), min_size=1, max_size=12
    ),
    ngram_size=st.integers(2, 4),
)
def test_rows(token_ids: list[int], ngram_size: int) -> None:
    """Ends of text anywhere, the smallest and the largest ids, any length from one token on."""
    ngram = config(ngram_size)
    rows = NgramHash(ngram).rows(windows_of(np.array(token_ids, np.int32), ngram_size))
    assert rows.dtype == np.int64
    assert rows.tolist() == [rows_by_definition(token_ids, place, ngram) for place in range(len(token_ids))]


@pytest.mark.parametrize("ngram_size", [2, 3, 4])
def test_an_end_of_text_cuts_for_those_after_it(ngram_size: int) -> None:
    """The token itself still sees what was before it; the next ones see nothing beyond it."""
    hashed = NgramHash(config(ngram_size))

    def rows(*token_ids: int) -> list[int]:
        last: list[int] = hashed.rows(windows_of(np.array(token_ids, np.int32), ngram_size))[-1].tolist()
        return last

    assert rows(1, 2, 3, EOS) != rows(4, 5, 6, EOS)
    assert rows(1, 2, EOS, 9) == rows(4, 5, EOS, 9) == rows(9)
