"""The tokenizer on a vocabulary small enough to know by heart."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import gateway.tokenizer
from gateway.detokenizer import detokenize
from gateway.tokenizer import Tokenizer, TokenizerError, TooManyTokensError
from tests.support.vocabulary import small_vocabulary, spell


def build(**changes: object) -> Tokenizer:
    """The small vocabulary with some keys of `tokenizer.ggml` changed, or removed where None."""
    return Tokenizer.from_metadata(changed(small_vocabulary(), **changes), "small.gguf")


def changed(metadata: Mapping[str, object], **changes: object) -> dict[str, object]:
    result = dict(metadata)
    for key, value in changes.items():
        if value is None:
            del result[f"tokenizer.ggml.{key}"]
        else:
            result[f"tokenizer.ggml.{key}"] = value
    return result


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build()


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in token_ids]


def test_merges_are_applied(tokenizer: Tokenizer) -> None:
    """By rank, which is their order in the file: "he" comes before " h", so " hello" has no token " he"."""
    assert pieces(tokenizer, tokenizer.encode("hello hello h")) == [b"hello", b" ", b"hello", b" h"]


def test_special_tokens_become_their_ids(tokenizer: Tokenizer) -> None:
    """Both kinds, with the text around them encoded as usual."""
    ids = tokenizer.encode("hello<|im_end|>\n<think>he")
    assert pieces(tokenizer, ids) == [b"hello", b"<|im_end|>", b"\n", b"<think>", b"he"]
    assert ids[1] == tokenizer.special_token("<|im_end|>")


def test_special_tokens_as_plain_text(tokenizer: Tokenizer) -> None:
    """Without parsing neither control nor user-defined tokens may come out."""
    ids = tokenizer.encode("<|im_end|><think>", parse_special=False)
    assert ids == [ord(character) for character in "<|im_end|><think>"]


def test_the_longest_of_nested_special_tokens_wins() -> None:
    """`<tts_text_bos>` against `<tts_text_bos_single>`: order in the file must not matter."""
    metadata = small_vocabulary(control=("<a>", "<a><b>", "<end>"), user_defined=("<b>",))
    tokenizer = Tokenizer.from_metadata(metadata, "nested.gguf")
    assert pieces(tokenizer, tokenizer.encode("<a><b><b><a>")) == [b"<a><b>", b"<b>", b"<a>"]


def test_text_is_not_normalised(tokenizer: Tokenizer) -> None:
    """llama.cpp does not compose characters, and the published files were tested with it."""
    text = "e\u0301 \u00e9 \u212b"
    assert detokenize(tokenizer, tokenizer.encode(text)) == text


def test_digits_are_single(tokenizer: Tokenizer) -> None:
    """A token is never shared by two digits: the split pattern is in effect."""
    metadata = small_vocabulary(words=("12",))
    split = Tokenizer.from_metadata(metadata, "digits.gguf")
    assert pieces(split, split.encode("12")) == [b"1", b"2"]


def test_combining_marks_stay_with_letters_in_qwen35_only() -> None:
    """The one difference of the two patterns."""
    word = "e\u0301"
    first, second = word.encode()[1:2], word.encode()[2:]
    for pre, expected in (("qwen35", 1), ("qwen2", 3)):
        metadata = small_vocabulary(words=(), pre=pre)
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        num_bytes = 256
        added = [spell(b"e" + first), spell(word.encode())]
        metadata = changed(
            metadata,
            tokens=[*tokens[:num_bytes], *added, *tokens[num_bytes:]],
            token_type=[*[1] * (num_bytes + len(added)), 3, 3, 3, 4, 4, 4, 4, 5, 5],
            merges=[f"e {spell(first)}", f"{spell(b'e' + first)} {spell(second)}"],
        )
        tokenizer = Tokenizer.from_metadata(metadata, "marks.gguf")
        assert len(tokenizer.encode(word)) == expected, pre


def test_lone_surrogates_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    """JSON can carry them; the library below takes only what has a UTF-8 form."""
    assert tokenizer.encode("\ud800x") == tokenizer.encode("\ufffdx")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")


def test_zero_byte_and_empty_text(tokenizer: Tokenizer) -> None:
    """Nothing treats text as a C string."""
    assert tokenizer.encode("") == []
    assert pieces(tokenizer, tokenizer.encode("\0he")) == [b"\0", b"he"]


def test_endless_whitespace_is_cut(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past ten million blanks in a row the regex library inside `tokenizers` panics, with an exception that
    `except Exception` lets through. Here with the limit lowered, since ten million take a while."""
    monkeypatch.setattr(gateway.tokenizer, "_MAX_WHITESPACE_RUN", 10)
    assert [len(part) for part in gateway.tokenizer._within_run_limit("a" + " " * 25 + "b" * 30)] == [
        11,
        10,
        35,
    ]
    text = "x  y" + " " * 35 + "z" + " " * 10
    assert detokenize(tokenizer, tokenizer.encode(text)) == text


def test_token_bytes(tokenizer: Tokenizer) -> None:
    """One of each kind."""
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(tokenizer.num_tokens - 1) == b""
    think = tokenizer.special_token("<think>")
    assert think is not None
    assert tokenizer.token_bytes(think) == b"<think>"
    assert not tokenizer.is_control(think)
    assert tokenizer.is_control(tokenizer.eos_token_id)


@pytest.mark.parametrize("token_id", [-1, 1_000_000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    """A negative id must not count from the end, as it would in a Python list."""
    with pytest.raises(IndexError, match="outside the vocabulary"):
        tokenizer.token_bytes(token_id)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        tokenizer.is_control(token_id)


def test_end_tokens(tokenizer: Tokenizer) -> None:
    """Qwen's two, though the file names only one."""
    assert tokenizer.eos_token_ids == {
        tokenizer.special_token("<|im_end|>"),
        tokenizer.special_token("<|endoftext|>"),
    }


def test_end_tokens_named_by_other_keys() -> None:
    """A file may name an end of turn and an end of message beside the end of sequence."""
    tokenizer = build(eos_token_id=5, eot_token_id=6, eom_token_id=np.uint32(7))
    assert tokenizer.eos_token_id == 5
    assert tokenizer.eos_token_ids >= {5, 6, 7}


def test_a_user_defined_end_token_does_not_end(tokenizer: Tokenizer) -> None:
    """Only a control token of that name stops: the others are text the model says."""
    metadata = small_vocabulary(control=("<stop>",), user_defined=("<|im_end|>",))
    tokenizer = Tokenizer.from_metadata(metadata, "odd.gguf")
    assert tokenizer.eos_token_ids == {tokenizer.special_token("<stop>")}


def test_bos_is_added_where_the_file_asks() -> None:
    """And not twice: chat templates often write it themselves."""
    tokenizer = build(add_bos_token=True, bos_token_id=3)
    assert tokenizer.with_bos([1, 2]) == [3, 1, 2]
    assert tokenizer.with_bos([3, 1]) == [3, 1]
    assert build().with_bos([1, 2]) == [1, 2]


def test_numpy_arrays_are_taken() -> None:
    """A GGUF reader hands numeric arrays out as numpy arrays."""
    kinds = np.array(small_vocabulary()["tokenizer.ggml.token_type"], dtype=np.int32)
    assert build(token_type=kinds, eos_token_id=np.int64(256)).eos_token_id == 256


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "llama"}, "model is 'llama'; 'gpt2' is supported"),
        ({"model": None}, "model is missing"),
        ({"pre": "llama-bpe"}, "pre is 'llama-bpe'; 'qwen2' and 'qwen35' are supported"),
        ({"pre": 5}, "pre is 5; a string is expected"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a"]}, "token_type is '.* entries'; tokenizer.ggml.tokens has 1"),
        ({"tokens": "abc"}, "tokens is 'abc'; an array is expected"),
        ({"tokens": [1]}, "tokens is 1; a string is expected at position 0"),
        ({"tokens": []}, "tokens is .*; it must not be empty"),
        ({"merges": ["ab"]}, "merges is 'ab'; two parts"),
        ({"merges": ["x y"]}, "merges does not fit the normal tokens"),
        ({"merges": None}, "merges is missing"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"eos_token_id": 10_000}, "eos_token_id is 10000; a token id from 0 to"),
        ({"eos_token_id": -1}, "eos_token_id is -1; a token id from 0 to"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; a token id is expected"),
        ({"bos_token_id": True}, "bos_token_id is True; a token id"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is True; it needs"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; a boolean"),
    ],
)
def test_unsupported_files_are_refused(changes: dict[str, object], expected: str) -> None:
    """The error names file, key and value, and what would do."""
    with pytest.raises(TokenizerError, match=rf"small\.gguf: tokenizer\.ggml\.{expected}"):
        build(**changes)


def test_unknown_token_kinds_are_refused() -> None:
    """Kind 6, a raw byte, belongs to another kind of vocabulary."""
    kinds = small_vocabulary()["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    with pytest.raises(TokenizerError, match=r"token_type is 6; that is token 0; supported are 1 \(normal\)"):
        build(token_type=[6, *kinds[1:]])


@pytest.mark.parametrize(
    ("token_id", "text", "expected"),
    [
        (0, "aa", "no normal token for byte 0x00"),
        (0, "b", "'b' twice, as 0 and 98"),
        (0, "\u4e00", "lacks '\u4e00'"),
        (-3, "<think>", "special tokens .* share it"),
        (-3, "", "needs a text"),
    ],
)
def test_contradicting_tokens_are_refused(token_id: int, text: str, expected: str) -> None:
    """Each would otherwise show as wrong ids much later."""
    tokens = small_vocabulary()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[token_id] = text
    with pytest.raises(TokenizerError, match=rf"small\.gguf: tokenizer\.ggml\.tokens .*{expected}"):
        build(tokens=tokens)


def test_merges_cannot_make_control_tokens() -> None:
    """Plain text must not turn into structure by way of BPE."""
    metadata = small_vocabulary(words=(), control=("<|", "<e>"))
    with pytest.raises(TokenizerError, match="merges does not fit"):
        Tokenizer.from_metadata(metadata | {"tokenizer.ggml.merges": ["< |"]}, "small.gguf")


def test_a_limit_ends_the_work_early(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limit all ids come; beyond it, what is left of the text is not looked at."""
    monkeypatch.setattr(gateway.tokenizer, "_PART_LENGTH", 100)
    text = "he. " * 1000
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids
    with pytest.raises(TooManyTokensError, match=f"more than {len(ids) - 1} tokens"):
        tokenizer.encode(text, max_tokens=len(ids) - 1)
    parts = tokenizer._encode_plain(text)
    num_looked_at = 0

    def counted() -> Iterator[str]:
        nonlocal num_looked_at
        for piece in ("he. " * 25, *["he. "] * 1000):
            num_looked_at += 1
            yield piece

    assert len(list(parts)) > 30
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_pieces(counted(), max_tokens=60)
    assert num_looked_at < 20
