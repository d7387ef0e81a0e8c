"""Text in and out of tokens, for any text and any way of cutting it."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gateway.tokenizer
from gateway.chat_template import ChatTemplate
from gateway.detokenizer import Detokenizer, detokenize
from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from tests.support.vocabulary import small_vocabulary

# Machines that run tests are busy: the time of one example says nothing.
untimed = settings(deadline=None, print_blob=True)


@cache
def tokenizer(pre: str = "qwen35") -> Tokenizer:
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<|x|>y")
    metadata = small_vocabulary(control=control) | {"tokenizer.ggml.pre": pre}
    return Tokenizer.from_metadata(metadata, "small.gguf")


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, tokenizer())


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


any_text = st.text(st.characters(exclude_categories=["Cs"]))
special_fragments = st.sampled_from(
    [
        *("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|x|>y", "<s>"),
        *(
            "<",
            "</",
            "<|",
            "<|im",
            "_end|>",
            "|>",
            ">",
            "|",
            "|im_end|",
            "im_end",
            "think",
            "/think",
            "s",
            "x",
        ),
        *(" ", "\n", "hello", "é", "\u2801", "\ue000", "<|im_<|im_end|>end|>"),
    ]
)
client_text = st.lists(special_fragments | any_text, max_size=6).map("".join)


@untimed
@given(st.lists(st.integers(0, 270), max_size=40), st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_decoding_does_not_depend_on_the_cuts(
    token_ids: list[int], cuts: list[int], show_control: bool
) -> None:
    """Also for ids that are no valid text: a model can produce any sequence."""
    stream = Detokenizer(tokenizer(), show_control)
    borders = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    text = "".join(stream.feed(token_ids[start:end]) for start, end in pairwise(borders))
    text += stream.flush()
    raw = b"".join(
        tokenizer().token_bytes(token_id)
        for token_id in token_ids
        if show_control or not tokenizer().is_control(token_id)
    )
    assert text == raw.decode("utf-8", "replace")


@untimed
@given(client_text, st.booleans())
def test_encoding_loses_nothing(text: str, parse_special: bool) -> None:
    """The bytes of the ids are the bytes of the text, special tokens in it or not."""
    token_ids = tokenizer().encode(text, parse_special)
    assert detokenize(tokenizer(), token_ids, show_control=True) == text


@untimed
@given(client_text, st.integers(1, 8))
def test_special_tokens_are_found_wherever_parts_end(text: str, part_length: int) -> None:
    whole = tokenizer().split_special(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.tokenizer, "_PART_LENGTH", part_length)
        assert tokenizer().split_special(text) == whole


BORDERS = st.text(st.sampled_from("ab1 .,'s\n\r\té\u0301中の。、Ж½_-"), max_size=60)


@untimed
@given(BORDERS, st.sampled_from(["qwen2", "qwen35"]), st.integers(1, 8))
def test_parts_of_a_long_text_end_where_pieces_do(text: str, pre: str, part_length: int) -> None:
    """Cut into parts or not, the pieces that are merged are the same."""
    whole = tokenizer(pre)._bpe.pre_tokenizer.pre_tokenize_str(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway.tokenizer, "_PART_LENGTH", part_length)
        parts = list(gateway.tokenizer._parts(text))
    assert "".join(parts) == text
    pieces = [piece for part in parts for piece in tokenizer(pre)._bpe.pre_tokenizer.pre_tokenize_str(part)]
    assert [piece for piece, _ in pieces] == [piece for piece, _ in whole]


@untimed
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_match_as_find_does(text: str, stops: list[str], cuts: list[int]) -> None:
    """Against `str.find` on the whole text, with an alphabet in which everything overlaps."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    end, _, expected = min(found, default=(len(text), 0, None))
    matcher = StopStrings(stops)
    emitted = ""
    for piece in pieces_of(text, cuts):
        more, stop = matcher.feed(piece)
        emitted += more
        if stop is not None:
            break
    else:
        more, stop = matcher.flush()
        emitted += more
    assert (emitted, stop) == (text[:end], expected)


@untimed
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stop_strings_hold_back_only_what_may_match(text: str, stops: list[str]) -> None:
    """What is held back begins a stop string: a stream is not delayed for nothing."""
    matcher = StopStrings(stops)
    emitted = ""
    for position, character in enumerate(text, 1):
        more, stop = matcher.feed(character)
        emitted += more
        if stop is not None:
            break
        held = text[len(emitted) : position]
        assert not held or any(stop.startswith(held) for stop in stops)


@untimed
@given(client_text)
def test_client_text_is_encoded_as_text(text: str) -> None:
    """Between the template's tokens stands exactly what plain encoding gives, whatever the text."""
    special = tokenizer().special_token
    prompt = template("<|im_start|>{{ messages[0].content }}<|im_end|>").encode_chat(
        [{"role": "user", "content": text}]
    )
    assert prompt.token_ids == [
        special("<|im_start|>"),
        *tokenizer().encode(text, parse_special=False),
        special("<|im_end|>"),
    ]


@untimed
@given(
    client_text,
    client_text,
    st.sampled_from(
        [
            "{{ a }}{{ b }}",
            "{{ a }}>{{ b }}",
            "<{{ a }}>{{ b }}</{{ a }}>",
            "<function={{ a }}><{{ b }}>",
            "<|{{ a }}|>{{ b }}|>",
            "{{ [a, {b: a}] | tojson }}",
            "{{ a | trim }}{{ b.split('<') | join('<') }}",
            "{{ a[1:] }}{{ b[:-1] }}",
            "{{ (a ~ '|' ~ b).split('</think>') | join }}",
        ]
    ),
)
def test_client_text_and_template_make_no_special_token_together(a: str, b: str, source: str) -> None:
    """No part of these templates is a special token, so none may come out."""
    prompt = template(source).encode_chat([], template_kwargs={"a": a, "b": b})
    assert not set(prompt.token_ids) & set(tokenizer().special_tokens.values())


@untimed
@given(client_text)
def test_rendered_text_is_what_was_sent(text: str) -> None:
    """The disguise comes off completely."""
    assert template("{{ messages[0].content }}|").render([{"role": "user", "content": text}]) == text + "|"
