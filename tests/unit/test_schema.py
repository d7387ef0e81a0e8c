"""Request bodies: what their fields mean, and what is wrong with them in the client's own terms."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import schema
from gateway.api.schema import ChatRequest, CompletionRequest, GenerationFields, refuse_unsupported
from shared.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "a"}]


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": MESSAGES} | fields, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
    ],
)
def test_the_limit_of_an_answer(fields: dict[str, int], limit: int | None) -> None:
    assert chat(**fields).token_limit == limit


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, []), ([], []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ("ab", ["ab"])]
)
def test_stop_strings_are_a_list(stop: Any, strings: list[str]) -> None:
    assert chat(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(None, False), ({}, False), ({"include_usage": None}, False), ({"include_usage": True}, True)],
)
def test_usage_comes_where_it_was_asked_for(options: Any, wanted: bool) -> None:
    assert chat(stream_options=options).wants_usage_chunk is wanted


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_everything_unsupported_is_a_field_and_has_harmless_values_of_its_type(
    kind: type[GenerationFields],
) -> None:
    """A name that is misspelt in the table would refuse nothing."""
    required = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "a"}
    for name, harmless in kind.unsupported_unless.items():
        assert name in kind.__struct_fields__
        for value in (None, *harmless):
            refuse_unsupported(msgspec.convert(required | {name: value}, kind))


def test_a_refusal_says_what_to_send_instead() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"tools is not supported .* leave it out, or send \[\]$"
    ) as caught:
        refuse_unsupported(chat(tools=[{}]))
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(InvalidRequestError, match=r"leave it out$"):
        refuse_unsupported(chat(structured_outputs={}))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "required"),
        ({"messages": [{}]}, "messages[0].role", "required"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{}]}]},
            "messages[1].content[0].type",
            "required",
        ),
        ({"messages": MESSAGES, "top_k": "a"}, "top_k", "int"),
    ],
)
def test_the_field_is_named_as_the_client_wrote_it(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        schema._checked(body, ChatRequest)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert words in str(caught.value)


TEXTS = st.text("ab\ud800😀", max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "other"])


@given(st.dictionaries(NAMES, JSON, max_size=6), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_object_is_a_body_or_is_refused_with_words(
    body: dict[str, Any], kind: type[GenerationFields]
) -> None:
    """Nothing else comes out of the check, whatever a client sends."""
    try:
        request = schema._checked(body, kind)
        refuse_unsupported(request)
    except InvalidRequestError as error:
        message = str(error)
    else:
        assert all(isinstance(stop, str) for stop in request.stop_strings)
        message = "accepted"
    assert message
