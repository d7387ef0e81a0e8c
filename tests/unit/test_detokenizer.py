"""Streaming tokens to text."""

import pytest

from gateway.detokenizer import Detokenizer, detokenize
from gateway.tokenizer import Tokenizer
from tests.support.vocabulary import small_vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(small_vocabulary(), "small.gguf")


def test_characters_are_not_split(tokenizer: Tokenizer) -> None:
    """A client must never see half a character: the bytes wait for the rest."""
    stream = Detokenizer(tokenizer)
    assert [stream.feed([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""


def test_text_before_an_incomplete_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    """Only the incomplete character waits."""
    stream = Detokenizer(tokenizer)
    assert stream.feed(b"ab\xe4\xbd") == "ab"
    assert stream.feed([0xA0]) == "你"


def test_a_truncated_character_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    """A length limit may end the text anywhere."""
    stream = Detokenizer(tokenizer)
    assert stream.feed(b"a\xf0\x9f\x98") == "a"
    assert stream.flush() == "\ufffd"


def test_invalid_bytes_become_replacements(tokenizer: Tokenizer) -> None:
    """A model can produce any bytes; the stream goes on after them."""
    stream = Detokenizer(tokenizer)
    assert stream.feed([0xFF]) == "\ufffd"
    assert stream.feed([0xE4]) == ""
    assert stream.feed([ord("a")]) == "\ufffda"


def test_control_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    """The end of a turn is not text, a think tag is."""
    ids = tokenizer.encode("<think>he</think>hello<|im_end|>")
    assert detokenize(tokenizer, ids) == "<think>he</think>hello"


def test_control_tokens_can_be_shown(tokenizer: Tokenizer) -> None:
    """For a client that wants to see what its ids are."""
    text = "<|im_start|>he<|im_end|>"
    assert detokenize(tokenizer, tokenizer.encode(text), show_control=True) == text


def test_unused_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    """The logits are wider than the vocabulary in use."""
    assert detokenize(tokenizer, [tokenizer.num_tokens - 1]) == ""


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    """They come from clients of /detokenize."""
    with pytest.raises(IndexError, match="outside the vocabulary"):
        detokenize(tokenizer, [tokenizer.num_tokens])
