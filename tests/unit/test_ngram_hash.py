"""The n-gram hash against a second one, written down number by number from the rules of the format."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model_config import NgramConfig
from stager.ngram_hash import NgramHash, windows_of
from tests.support.ngram_configs import EOS, ngram_config


def rows_by_the_rules(token_ids: list[int], position: int, config: NgramConfig) -> list[int]:
    """The rows of one token, with Python's integers and nothing clever.

    u_0 is the token's own id. u_s is the id s places before it, but end-of-text where that is before the
    start of the sequence or where any of the ids 1 to s places before is end-of-text. z_n is the exclusive or
    of u_0 m_0 to u_(n-1) m_(n-1); head j of order n takes z_n modulo its size, plus its offset.
    """
    u = [token_ids[position]]
    for s in range(1, config.ngram_size):
        is_before_start = position - s < 0
        is_cut = any(token_ids[position - t] == config.eos_token_id for t in range(1, s + 1) if position >= t)
        u.append(config.eos_token_id if is_before_start or is_cut else token_ids[position - s])
    rows = []
    for n in range(2, config.ngram_size + 1):
        z = 0
        for s in range(n):
            z ^= u[s] * config.multipliers[s]
        for j in range(config.heads_per_ngram):
            head = (n - 2) * config.heads_per_ngram + j
            rows.append(z % config.head_vocab_sizes[head] + config.head_offsets[head])
    return rows


def check(token_ids: list[int], config: NgramConfig) -> None:
    windows = windows_of(np.array(token_ids, np.int32), config.ngram_size)
    rows = NgramHash(config).rows(windows)
    assert rows.dtype == np.int64
    assert rows.tolist() == [rows_by_the_rules(token_ids, p, config) for p in range(len(token_ids))]


@pytest.mark.parametrize("ngram_size", [2, 3, 4])
def test_every_placing_of_the_end_of_text(ngram_size: int) -> None:
    """Every pattern of end-of-text and other ids in six tokens: at the start, in a row, at every distance
    before a token, as the token itself, which cuts nothing."""
    config = ngram_config(ngram_size)
    for pattern in product([EOS, None], repeat=6):
        check([7 + place if token is None else token for place, token in enumerate(pattern)], config)


@settings(deadline=None, print_blob=True)
@given(
    st.lists(st.integers(0, 270_000) | st.just(EOS), max_size=40),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, (2**63 - 1) // 270_000), min_size=4, max_size=4),
)
def test_any_text(
    token_ids: list[int], ngram_size: int, heads_per_ngram: int, multipliers: list[int]
) -> None:
    """Any ids of a real vocabulary, and multipliers up to the limit that the reader of the metadata sets:
    products of 63 bits are exact."""
    check(token_ids, ngram_config(ngram_size, heads_per_ngram, multipliers=tuple(multipliers)))


def test_numbers_of_the_real_model() -> None:
    """Multipliers, sizes and the end of text of the published model, whose products need more than a float:
    the first token of a text, so that both ids before it are the end of text."""
    config = NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=1,
        conv_kernel=4,
        eos_token_id=248044,
        multipliers=(23703573157769, 20109073645365, 8052911324071),
        head_vocab_sizes=(20000003, 20000023),
        head_offsets=(0, 20000003),
        row_width=160,
    )
    pair = (248319 * 23703573157769) ^ (248044 * 20109073645365)
    triple = pair ^ (248044 * 8052911324071)
    rows = NgramHash(config).rows(np.array([[248319, -1, -1]], np.int32))
    assert rows.tolist() == [[pair % 20000003, triple % 20000023 + 20000003]]
    check([248319, 0, 1, 248044, 17, 248318], config)


def test_windows_of_a_step() -> None:
    """A token computed alone has the rows it has within its sequence: the gpu_worker sends windows, the
    gateway's hints are whole prompts."""
    config = ngram_config()
    token_ids = [9, 8, EOS, 7, 6]
    whole = NgramHash(config).rows(windows_of(np.array(token_ids, np.int32), 3))
    for position in range(len(token_ids)):
        window = [token_ids[position - s] if position >= s else -1 for s in range(3)]
        assert NgramHash(config).rows(np.array([window], np.int32)).tolist() == [whole[position].tolist()]


def test_windows() -> None:
    """The token's own id first, then the ids before it; nothing before the start; and no text at all."""
    assert windows_of(np.array([4, 5], np.int32), 3).tolist() == [[4, -1, -1], [5, 4, -1]]
    assert windows_of(np.array([], np.int32), 3).shape == (0, 3)
    check([], ngram_config())
