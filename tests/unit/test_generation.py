"""From token ids to an answer: text, its end, its counts."""

from collections.abc import Sequence
from contextlib import aclosing

import pytest

from gateway.generation import Generation
from gateway.tokenizer import Tokenizer
from shared.errors import GenerationError
from shared.messages import FromConnecting, GenerateRequest, PrefillProgress, Sampling, TokenChunk
from tests.support.gateway_parts import failed, finished, gateway, small_tokenizer

GREEDY = Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0)


def request(tokenizer: Tokenizer) -> GenerateRequest:
    return GenerateRequest(
        request_id="a",
        prompt_token_ids=[1],
        max_new_tokens=50,
        eos_token_ids=[tokenizer.eos_token_id],
        sampling=GREEDY,
    )


async def read(
    messages: Sequence[FromConnecting], stop_strings: Sequence[str] = ()
) -> tuple[list[str], Generation, list[str]]:
    """The pieces of an answer, what is known of it afterwards, and which requests were aborted."""
    tokenizer = small_tokenizer()
    generation = Generation(request(tokenizer), tokenizer, stop_strings)
    async with (
        gateway() as running,
        running.engine.open(request(tokenizer), lambda: None) as answers,
        aclosing(generation.pieces(answers)) as parts,
    ):
        for message in messages:
            running.say(message)
        pieces = [piece.text async for piece in parts]
        return pieces, generation, running.workers.aborted


def chunks(*token_ids: int) -> list[FromConnecting]:
    return [TokenChunk(request_id="a", token_ids=[token_id]) for token_id in token_ids]


async def test_text_comes_token_by_token() -> None:
    progress = PrefillProgress(request_id="a", num_prefilled=1, num_prompt_tokens=1)
    pieces, generation, _ = await read([progress, *chunks(*b"abc"), finished("a", "length", 3)])
    assert pieces == ["a", "b", "c"]
    outcome = generation.outcome
    assert (outcome.finish_reason, outcome.stop_reason, outcome.num_output_tokens) == ("length", None, 3)
    assert generation.first_token_at is not None
    assert len(generation.gaps_s) == 2


async def test_several_tokens_in_a_message_count_each() -> None:
    message = TokenChunk(request_id="a", token_ids=list(b"abc"))
    pieces, generation, _ = await read([message, finished("a", "length", 3)])
    assert pieces == ["abc"]
    assert generation.outcome.num_output_tokens == 3


async def test_the_end_token_counts_and_does_not_show() -> None:
    eos = small_tokenizer().eos_token_id
    pieces, generation, _ = await read([*chunks(ord("a"), eos), finished("a", "stop", 2)])
    assert pieces == ["a"]
    assert generation.outcome.num_output_tokens == 2
    assert generation.outcome.finish_reason == "stop"


async def test_an_answer_of_nothing() -> None:
    pieces, generation, _ = await read([finished("a", "length", 0)])
    assert pieces == []
    assert generation.first_token_at is None
    assert generation.outcome.num_output_tokens == 0


async def test_ids_without_text_are_passed_over() -> None:
    """The model may have rows for more ids than the vocabulary names."""
    num_known = small_tokenizer().num_tokens
    ids = (ord("a"), num_known, num_known + 1000, ord("b"))
    pieces, generation, _ = await read([*chunks(*ids), finished("a", "length", 4)])
    assert "".join(pieces) == "ab"
    assert generation.outcome.num_output_tokens == 4


async def test_a_character_waits_for_its_last_byte() -> None:
    pieces, _, _ = await read([*chunks(*"é😀".encode()), finished("a", "length", 6)])
    assert pieces == ["é", "😀"]


async def test_a_character_that_is_cut_off_is_replaced() -> None:
    pieces, _, _ = await read([*chunks(*"a😀".encode()[:-1]), finished("a", "length", 4)])
    assert pieces == ["a", "\ufffd"]


async def test_a_stop_string_ends_it_and_stops_the_worker() -> None:
    """The tokens that came meanwhile are neither shown nor counted."""
    words = [*chunks(*b"one END two"), finished("a", "abort", 11)]
    pieces, generation, aborted = await read(words, ["END"])
    assert "".join(pieces) == "one "
    assert aborted == ["a"]
    outcome = generation.outcome
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", "END")
    assert outcome.num_output_tokens == len("one END")


async def test_a_stop_string_may_begin_in_one_token_and_end_in_another() -> None:
    message = [
        TokenChunk(request_id="a", token_ids=list(b"ab<")),
        TokenChunk(request_id="a", token_ids=list(b">cd")),
    ]
    pieces, generation, _ = await read([*message, finished("a", "abort", 6)], ["<>"])
    assert "".join(pieces) == "ab"
    assert generation.outcome.stop_reason == "<>"


async def test_what_was_held_back_comes_at_the_end() -> None:
    pieces, generation, _ = await read([*chunks(*b"abEN"), finished("a", "length", 4)], ["END"])
    assert "".join(pieces) == "abEN"
    assert generation.outcome.finish_reason == "length"


async def test_a_stop_string_that_waited_for_an_outer_one_counts_at_the_end() -> None:
    """ "b" is found, but "abc" may still come, which starts first."""
    pieces, generation, aborted = await read([*chunks(*b"xab"), finished("a", "length", 3)], ["abc", "b"])
    assert "".join(pieces) == "xa"
    assert (generation.outcome.finish_reason, generation.outcome.stop_reason) == ("stop", "b")
    assert aborted == []


async def test_a_failure_comes_after_the_text_before_it() -> None:
    tokenizer = small_tokenizer()
    generation = Generation(request(tokenizer), tokenizer, [])
    async with gateway() as running, running.engine.open(request(tokenizer), lambda: None) as answers:
        for message in (*chunks(*b"ab"), failed("a")):
            running.say(message)
        text = generation.pieces(answers)
        assert [(await anext(text)).text, (await anext(text)).text] == ["a", "b"]
        with pytest.raises(GenerationError, match="it broke"):
            await anext(text)
