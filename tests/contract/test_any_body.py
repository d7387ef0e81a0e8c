"""Whatever JSON a client sends: an answer or a refusal, never an accident."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stack import Stack

pytestmark = pytest.mark.process

TEXTS = st.text("ab \n<|im_end>\\u{}%\ud800é😀\x00", max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": SCALARS,
            "type": SCALARS,
            "function": st.fixed_dictionaries({}, optional={"name": SCALARS, "arguments": JSON}),
        },
    )
    | JSON,
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": TEXTS
            | JSON
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})),
            "name": JSON,
            "tool_calls": CALLS | JSON,
            "tool_call_id": JSON,
            "reasoning_content": JSON,
            "reasoning": JSON,
        },
    ),
    min_size=1,
    max_size=4,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": JSON,
        "top_p": JSON,
        "seed": JSON,
        "stop": JSON,
        "reasoning_effort": JSON,
        "chat_template_kwargs": st.dictionaries(TEXTS, JSON, max_size=2) | JSON,
        "stream_options": JSON,
        "logit_bias": JSON,
        "metadata": JSON,
        "model": st.just("strata-demo") | JSON,
    },
)


def assert_no_accident(stack: Stack, path: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    answer = stack.request("POST", path, raw)
    assert answer.status in (200, 400, 404), (raw, answer.body)
    if answer.status != 200:
        assert answer.error["message"]


@settings(max_examples=120)
@given(MESSAGES, OPTIONS)
def test_any_chat(stack: Stack, messages: list[Any], options: dict[str, Any]) -> None:
    assert_no_accident(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 1} | options)


@settings(max_examples=60)
@given(TEXTS | JSON | st.lists(st.integers(-1, 5000), max_size=5), OPTIONS)
def test_any_completion(stack: Stack, prompt: Any, options: dict[str, Any]) -> None:
    assert_no_accident(stack, "/v1/completions", {"prompt": prompt, "max_tokens": 1} | options)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "content", "messages", "tokens", "chat_template_kwargs"]), JSON
    )
)
def test_any_tokens(stack: Stack, body: dict[str, Any]) -> None:
    for path in ("/tokenize", "/detokenize"):
        assert_no_accident(stack, path, body)
