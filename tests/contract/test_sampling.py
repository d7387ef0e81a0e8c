"""Sampling parameters as the official client sends them, against a real stack."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support.stack import Stack

pytestmark = pytest.mark.process

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
MODEL = "strata-demo"


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def dash(stack: Stack) -> int:
    """A token that is a dash."""
    (token_id,) = stack.post("/tokenize", {"prompt": "-"}).json["tokens"]
    return int(token_id)


def complete(client: OpenAI, prompt: str = "Once upon", **fields: Any) -> Any:
    """A greedy completion unless the fields say otherwise."""
    own = {name: fields.pop(name) for name in list(fields) if name in EXTENSIONS}
    return client.completions.create(
        model=MODEL, prompt=prompt, **({"temperature": 0, "max_tokens": 12} | fields), extra_body=own
    )


EXTENSIONS = {"ignore_eos", "min_tokens", "stop_token_ids", "repetition_penalty", "typical_p", "top_k"}


def test_n_answers_of_a_chat(client: OpenAI) -> None:
    """Each is drawn for itself; the prompt is counted once."""
    wild: dict[str, Any] = {"temperature": 5, "top_p": 1, "max_tokens": 6, "extra_body": {"top_k": 0}}
    several = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=40, **wild)
    single = client.chat.completions.create(model=MODEL, messages=HELLO, seed=40, **wild)
    assert len({choice.message.content for choice in several.choices}) == 3
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage is not None
    assert single.usage is not None
    assert several.usage.prompt_tokens == single.usage.prompt_tokens
    assert 6 < several.usage.completion_tokens <= 3 * 6


def test_n_answers_of_a_stream(client: OpenAI, stack: Stack) -> None:
    """At temperature 0 they are all the same."""
    whole = complete(client).choices[0].text
    texts, ends = ["", "", ""], []
    for chunk in complete(client, stream=True, n=3):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [whole] * 3
    assert sorted(ends) == [0, 1, 2]
    stack.wait_counters(0, 0)


def test_the_clients_own_accumulator_takes_several_answers_with_logprobs(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, temperature=0, n=2, logprobs=True, top_logprobs=2
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert len(final.choices) == 2
    for choice in final.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    """One for each token, whole and streamed; greedy takes the first of the likeliest, whose sum is at most
    one; the bytes are those of the text."""
    wants: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **wants)
    (choice,) = whole.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert whole.usage is not None
    assert len(content) == whole.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 4
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0
    said = b"".join(bytes(entry.bytes or []) for entry in content[:-1])
    assert said.decode() == choice.message.content
    assert content[-1].token.startswith("<|")
    streamed, text = [], ""
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **wants):
        (part,) = chunk.choices
        entries = part.logprobs.content or [] if part.logprobs is not None else []
        text += part.delta.content or ""
        streamed += entries
        assert text.encode() == b"".join(bytes(entry.bytes or []) for entry in streamed[: len(content) - 1])
    assert streamed == content


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    whole = complete(client, logprobs=3)
    (choice,) = whole.choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text.index(logprobs.tokens[0]), len(logprobs.tokens)] == [0, 12]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert (len(top), top[token], max(top.values())) == (3, logprob, logprob)
    tokens, offsets = [], []
    for chunk in complete(client, logprobs=3, stream=True, stop="\x00"):
        part = chunk.choices[0].logprobs
        if part is not None:
            tokens += part.tokens
            offsets += part.text_offset
    assert (tokens, offsets) == (logprobs.tokens, logprobs.text_offset)
    only_chosen = complete(client, logprobs=0).choices[0].logprobs
    assert (only_chosen.token_logprobs, only_chosen.top_logprobs) == (logprobs.token_logprobs, None)
    assert complete(client).choices[0].logprobs is None


def test_logprobs_are_those_of_the_model_whatever_is_drawn(client: OpenAI) -> None:
    plain = complete(client, logprobs=1, max_tokens=1).choices[0].logprobs
    drawn = complete(client, logprobs=1, max_tokens=1, temperature=3, presence_penalty=1).choices[0].logprobs
    assert plain.tokens[0] in drawn.top_logprobs[0]
    assert drawn.top_logprobs[0][plain.tokens[0]] == pytest.approx(plain.token_logprobs[0], abs=1e-4)


def test_a_stop_token_ends_an_answer_and_is_not_shown(client: OpenAI, stack: Stack) -> None:
    text = complete(client).choices[0].text
    token_ids = stack.post("/tokenize", {"prompt": text}).json["tokens"]
    stop = token_ids[4]
    answer = complete(client, stop_token_ids=[stop], logprobs=0)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert text.startswith(choice.text)
    assert len(choice.text) < len(text)
    shown = "".join(choice.logprobs.tokens[:-1])
    assert shown == choice.text
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens
    later = complete(client, stop_token_ids=[stop], min_tokens=8)
    assert later.usage.completion_tokens >= 8


def test_a_stop_string_is_named(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    (choice,) = complete(client, stop=["\x00", text[3:6]]).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", text[3:6])
    (choice,) = complete(client).choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_an_answer_that_ignores_the_end_goes_on(client: OpenAI) -> None:
    ended = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=400)
    assert ended.usage is not None
    length = ended.usage.completion_tokens
    assert ended.choices[0].finish_reason == "stop"
    assert getattr(ended.choices[0], "stop_reason", "") is None
    longer = length + 20
    on = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=longer, extra_body={"ignore_eos": True}
    )
    assert on.usage is not None
    assert (on.usage.completion_tokens, on.choices[0].finish_reason) == (longer, "length")
    assert (on.choices[0].message.content or "").startswith(ended.choices[0].message.content or "?")


def test_an_answer_has_its_least_number_of_tokens(client: OpenAI) -> None:
    ended = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=400)
    assert ended.usage is not None
    least = ended.usage.completion_tokens + 10
    longer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=400, extra_body={"min_tokens": least}
    )
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= least


def test_a_bias_forces_a_token_and_bans_one(client: OpenAI, stack: Stack, dash: int) -> None:
    assert complete(client, logit_bias={str(dash): 100}).choices[0].text == "-" * 12
    usual = complete(client, max_tokens=1).choices[0].text
    (token_id,) = stack.post("/tokenize", {"prompt": usual}).json["tokens"]
    banned = {str(token_id): -100}
    assert complete(client, max_tokens=1, logit_bias=banned).choices[0].text != usual


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 3}], ids=str
)
def test_penalties_turn_an_answer_elsewhere(client: OpenAI, penalty: dict[str, Any]) -> None:
    """Drawn by the same seed, hot, so that the weakest of them counts too."""

    def text(seed: int, **fields: Any) -> str:
        wild = {"temperature": 5, "top_p": 1, "top_k": 0, "seed": seed, "max_tokens": 40}
        return str(complete(client, **wild, ignore_eos=True, **fields).choices[0].text)

    assert text(1) == text(1)
    assert any(text(seed, **penalty) != text(seed) for seed in range(10))


def test_typical_p_is_taken(client: OpenAI) -> None:
    answer = complete(client, temperature=1, seed=3, typical_p=0.5, top_k=0)
    assert answer.usage.completion_tokens == 12


def test_a_ruled_line_is_an_answer_and_one_token_for_ever_is_not(client: OpenAI, dash: int) -> None:
    bias = {str(dash): 100}
    (line,) = complete(client, max_tokens=80, logit_bias=bias).choices
    assert (line.text, line.finish_reason, line.stop_reason) == ("-" * 80, "length", None)
    answer = complete(client, max_tokens=400, logit_bias=bias)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", "repetition_detected")
    assert choice.text == "-" * 256
    assert answer.usage.completion_tokens == 256
    exempt = complete(client, max_tokens=400, logit_bias=bias, ignore_eos=True)
    assert exempt.usage.completion_tokens == 400
    assert exempt.choices[0].stop_reason is None
