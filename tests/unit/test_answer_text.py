"""Tokens to pieces: stop strings to the token, and log-probabilities that keep to their tokens' text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer_text import AnswerText, Piece
from gateway.tokenizer import Tokenizer
from shared.messages import GenerateRequest, Sampling, TokenChunk, TokenLogprobs
from tests.support.gateway_parts import small_tokenizer

STOP_TOKEN = ord("!")
TOKENIZER = small_tokenizer()


def answer_text(*stop_strings: str, min_tokens: int = 0, tokenizer: Tokenizer = TOKENIZER) -> AnswerText:
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=[1],
        max_new_tokens=50,
        eos_token_ids=[tokenizer.eos_token_id],
        stop_token_ids=[STOP_TOKEN],
        sampling=Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, min_tokens=min_tokens),
    )
    return AnswerText(request, tokenizer, stop_strings)


def chunk(token_ids: list[int], has_logprobs: bool = True) -> TokenChunk:
    """Every token's log-probability tells which it is."""
    logprobs = [TokenLogprobs(logprob=-float(token_id)) for token_id in token_ids] if has_logprobs else []
    return TokenChunk(request_id="a", token_ids=token_ids, logprobs=logprobs)


def told(piece: Piece) -> tuple[str, list[int]]:
    assert [entry.logprobs.logprob for entry in piece.entries] == [-e.token_id for e in piece.entries]
    return piece.text, [entry.token_id for entry in piece.entries]


def test_tokens_go_out_with_their_text() -> None:
    text = answer_text()
    assert told(text.feed(chunk([ord("a"), ord("b")]))) == ("ab", [ord("a"), ord("b")])
    assert not text.flush()


def test_parts_of_a_character_go_out_with_it() -> None:
    text = answer_text()
    first, second = "é".encode()
    assert told(text.feed(chunk([ord("a"), first]))) == ("a", [ord("a")])
    piece = text.feed(chunk([second, ord("b")]))
    assert told(piece) == ("éb", [first, second, ord("b")])
    assert [entry.text_offset for entry in piece.entries] == [1, 1, 2]


def test_what_may_become_a_stop_string_holds_its_tokens_back() -> None:
    text = answer_text("END")
    assert told(text.feed(chunk(list(b"xEN")))) == ("x", [ord("x")])
    assert told(text.feed(chunk(list(b"o")))) == ("ENo", list(b"ENo"))


def test_tokens_of_a_stop_string_count_and_what_follows_does_not() -> None:
    text = answer_text("END")
    assert told(text.feed(chunk(list(b"aENDbc")))) == ("a", list(b"aEND"))
    assert (text.stop_string, text.num_tokens) == ("END", 4)


@pytest.mark.parametrize("last", [STOP_TOKEN, TOKENIZER.eos_token_id, TOKENIZER.num_tokens + 5])
def test_tokens_without_text_come_at_the_end(last: int) -> None:
    text = answer_text()
    assert told(text.feed(chunk([ord("a")]))) == ("a", [ord("a")])
    assert not text.feed(chunk([last]))
    assert told(text.flush()) == ("", [last])
    assert text.num_tokens == 2


def test_a_character_that_is_cut_off_takes_its_tokens_along() -> None:
    text = answer_text()
    assert not text.feed(chunk(list("😀".encode()[:3])))
    assert told(text.flush()) == ("\ufffd", list("😀".encode()[:3]))


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    """What was said before counts for nothing; then they are looked for as ever."""
    text = answer_text("ab", min_tokens=3)
    assert told(text.feed(chunk(list(b"abab"), has_logprobs=False))) == ("abab", [])
    assert text.stop_string is None
    assert told(text.feed(chunk(list(b"xab"), has_logprobs=False))) == ("x", [])
    assert (text.stop_string, text.num_tokens) == ("ab", 7)


@given(
    st.lists(st.lists(st.sampled_from([*b"abE", *"é😀".encode(), STOP_TOKEN, 0xFF, 5000]), max_size=4)),
    st.sampled_from([(), ("ab",), ("aE", "é"), ("bab",)]),
)
def test_however_tokens_are_portioned_out(portions: list[list[int]], stop_strings: tuple[str, ...]) -> None:
    """The same text, one entry for each token that counts, in order; offsets as they are in the text."""
    flat = [token_id for portion in portions for token_id in portion]
    outcomes = []
    for pieces in (portions, [flat], [[token_id] for token_id in flat]):
        text, said, entries = answer_text(*stop_strings), "", []
        for token_ids in pieces:
            piece = text.feed(chunk(token_ids))
            said, entries = said + piece.text, entries + piece.entries
            if text.stop_string is not None:
                break
        else:
            piece = text.flush()
            said, entries = said + piece.text, entries + piece.entries
        assert [entry.token_id for entry in entries] == flat[: text.num_tokens]
        offsets = [entry.text_offset for entry in entries]
        assert offsets == sorted(offsets)
        for entry in entries:
            if entry.token_id in [*b"abE"] and entry.text_offset < len(said):
                assert chr(entry.token_id) == said[entry.text_offset] or said[entry.text_offset] == "\ufffd"
        outcomes.append((said, entries, text.stop_string, text.num_tokens))
    assert outcomes[0] == outcomes[1] == outcomes[2]
