"""The official client library against a real stack: what its users rely on."""

import json
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
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
async def async_client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_whole(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=400)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = stack.post("/tokenize", {"messages": HELLO}).json
    assert answer.usage.prompt_tokens == prompt["count"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert 0 <= answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens


def test_turns_of_a_conversation(client: OpenAI) -> None:
    """Each reads what is new: what was said before is there, whoever says it. Another one's salt finds
    nothing."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "You answer questions about countries in a few plain words."},
        {"role": "user", "content": "My name is Ana. What is the capital of France?"},
    ]
    used: list[tuple[int, int]] = []

    def turn(salt: str, said: list[ChatCompletionMessageParam]) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=said, temperature=0, max_tokens=60, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        used.append((answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens))
        return answer.choices[0].message.content or ""

    first = turn("one", messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And the capital of Italy?"},
    ]
    second = turn("one", messages)
    assert turn("one", messages) == second
    edited = [*messages[:3], {"role": "user", "content": "What is my name?"}]
    turn("one", edited)  # type: ignore[arg-type]
    assert turn("two", messages) == second
    (none, _), (follow_up, whole), (again, _), (last_edited, _), (other, _) = used
    assert none == other == 0
    assert whole / 2 < follow_up <= again < whole
    assert last_edited >= follow_up


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=400)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            max_tokens=400,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ]
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, stream=True)
    chunks = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_clients_own_accumulator_takes_the_stream(client: OpenAI) -> None:
    """It checks types and the order of events more strictly than reading chunks does."""
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=20, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content
    assert final.usage is not None


async def test_the_async_client_streams(async_client: AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=20, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    whole = await async_client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=20
    )
    assert "".join(pieces) == whole.choices[0].message.content


async def test_the_async_client_may_leave_a_stream_in_its_middle(
    async_client: AsyncOpenAI, stack: Stack
) -> None:
    stream = await async_client.completions.create(
        model=MODEL, prompt="Once", temperature=2, max_tokens=2000, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    stack.wait_counters(0, 0)


def test_text_completions_whole_and_streamed_agree(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=20)
    stream = client.completions.create(
        model=MODEL,
        prompt="Once upon",
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.object == chunks[0].object == "text_completion"
    assert chunks[-1].usage == whole.usage


def test_a_prompt_may_be_token_ids(client: OpenAI, stack: Stack) -> None:
    token_ids = stack.post("/tokenize", {"prompt": "Once upon"}).json["tokens"]
    by_text = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=8)
    by_ids = client.completions.create(model=MODEL, prompt=token_ids, temperature=0, max_tokens=8)
    in_list = client.completions.create(model=MODEL, prompt=[token_ids], temperature=0, max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text == in_list.choices[0].text
    assert by_text.usage == by_ids.usage == in_list.usage


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    def answer(seed: int) -> str:
        completion = client.completions.create(
            model=MODEL, prompt="Once", temperature=2, seed=seed, max_tokens=24, extra_body={"top_k": 0}
        )
        return completion.choices[0].text

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)


def test_temperature_zero_repeats_an_answer_whatever_the_seed(client: OpenAI) -> None:
    answers = {
        client.completions.create(model=MODEL, prompt="Once", temperature=0, seed=seed, max_tokens=16)
        .choices[0]
        .text
        for seed in (1, 2)
    }
    assert len(answers) == 1


def test_top_k_of_one_is_greedy(client: OpenAI) -> None:
    greedy = client.completions.create(model=MODEL, prompt="Once", temperature=0, max_tokens=16)
    narrow = client.completions.create(
        model=MODEL, prompt="Once", temperature=2, max_tokens=16, extra_body={"top_k": 1}
    )
    assert narrow.choices[0].text == greedy.choices[0].text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=2, seed=3, extra_body={name: 2, "top_k": 0}
    )
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


def test_the_newer_name_of_the_limit_wins(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=2, seed=3, max_tokens=5, max_completion_tokens=1
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_stop_strings_end_an_answer_also_across_token_borders(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once upon", temperature=0, max_tokens=30, stream=True
    )
    pieces = [piece for chunk in stream if (piece := chunk.choices[0].text)]
    text = "".join(pieces)
    stop = pieces[3][-1] + pieces[4][0]
    answer = client.completions.create(
        model=MODEL, prompt="Once upon", temperature=0, max_tokens=30, stop=["never\x00said", stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 30


def test_a_stream_holds_back_what_may_become_a_stop_string(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=30)
    text = whole.choices[0].text
    stop = text[10:14]
    stream = client.completions.create(
        model=MODEL, prompt="Once upon", temperature=0, max_tokens=30, stop=stop, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == text[: text.index(stop)]


def test_a_stop_string_that_nearly_comes_is_delivered(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, max_tokens=12)
    text = whole.choices[0].text
    stream = client.completions.create(
        model=MODEL, prompt="Once upon", temperature=0, max_tokens=12, stop=text[-3:] + "\x00", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL, "other-name"]
    assert client.models.retrieve(MODEL) == models[0]
    assert client.models.retrieve("other-name").owned_by == "strata"


def test_an_alias_is_served(client: OpenAI) -> None:
    answer = client.completions.create(model="other-name", prompt="Once", max_tokens=1)
    assert answer.model == MODEL


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert MODEL in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_wrong_field_is_a_bad_request_that_names_it(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_a_bad_request_with_both_numbers(client: OpenAI, stack: Stack) -> None:
    limit = stack.health()["max_context"]
    prompt = [1] * (limit + 5)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=prompt)
    assert caught.value.code == "context_length_exceeded"
    assert str(limit) in caught.value.message
    assert str(limit + 5) in caught.value.message


def test_an_error_tells_the_request_id_that_is_in_its_header(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.request_id is not None
    assert caught.value.request_id in caught.value.message


def test_an_answer_has_its_request_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
    answer = raw.parse()
    assert raw.headers["x-request-id"] in answer.id


def test_a_conversation_may_have_every_role_and_parts_of_text(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Again"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    assert answer.choices[0].message.role == "assistant"


def test_text_parts_are_joined_as_they_are(client: OpenAI, stack: Stack) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    in_parts = stack.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json
    assert in_parts == stack.post("/tokenize", {"messages": HELLO}).json


@pytest.mark.parametrize("seed", range(3))
def test_wild_text_is_the_same_in_pieces_and_whole(client: OpenAI, seed: int) -> None:
    """At this temperature nearly every token is as likely as any other, pieces of characters among them."""
    wild = {"temperature": 5, "top_p": 1, "seed": seed, "max_tokens": 60, "extra_body": {"top_k": 0}}
    whole = client.completions.create(model=MODEL, prompt="é", **wild)  # type: ignore[call-overload]
    stream = client.completions.create(model=MODEL, prompt="é", stream=True, **wild)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole.choices[0].text
    assert json.loads(json.dumps(pieces)) == pieces
