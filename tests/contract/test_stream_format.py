"""Streams byte by byte: what clients that parse events by themselves rely on."""

import json
from typing import Any

import pytest

from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from tests.support.stack import Stack

pytestmark = pytest.mark.process

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def payloads(body: bytes) -> list[str]:
    """The data of every event of a stream; fails for anything else in it but comments."""
    text = body.decode("utf-8")
    assert text.endswith("\n\n")
    # On a busy machine an answer may take long enough for one.
    blocks = [block for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(": ")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    return [block.removeprefix("data: ") for block in blocks]


def chunks_of(stack: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = stack.post(path, body | {"stream": True})
    assert answer.status == 200, answer.body
    events = payloads(answer.body)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_headers_keep_proxies_from_holding_the_stream_back(stack: Stack) -> None:
    answer = stack.post(CHAT, {"messages": HELLO, "max_tokens": 1, "stream": True})
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert answer.headers["x-request-id"]


def test_a_chat_stream_is_role_then_text_then_reason(stack: Stack) -> None:
    body = {"messages": HELLO, "temperature": 2, "seed": 5, "top_k": 0, "max_tokens": 4}
    first, *middle, last = chunks_of(stack, CHAT, body)
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    for chunk in middle:
        (choice,) = chunk["choices"]
        assert list(choice["delta"]) == ["content"]
        assert choice["delta"]["content"]
        assert choice["finish_reason"] is None
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    common = {name: first[name] for name in ("id", "object", "created", "model")}
    assert common["object"] == "chat.completion.chunk"
    assert common["id"].startswith("chatcmpl-")
    for chunk in (*middle, last):
        assert {name: chunk[name] for name in common} == common
        assert "usage" not in chunk


def test_with_include_usage_it_comes_last_and_alone(stack: Stack) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *others, usage = chunks_of(stack, CHAT, body)
    assert all(chunk["usage"] is None for chunk in others)
    assert usage["choices"] == []
    assert set(usage["usage"]) == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
    }


def test_a_text_stream_has_text_in_every_choice(stack: Stack) -> None:
    *pieces, last = chunks_of(
        stack, COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 5, "stop": "\x00"}
    )
    assert all(chunk["object"] == "text_completion" for chunk in (*pieces, last))
    assert all(chunk["choices"][0]["text"] for chunk in pieces)
    assert last["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


def test_counts_are_true(stack: Stack) -> None:
    """Every token of this answer is visible text, so pieces and tokens can be counted against each other."""
    prompt = "Once upon a time"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "stream_options": {"include_usage": True}}
    *pieces, last, usage_chunk = chunks_of(stack, COMPLETIONS, body)
    usage, timings = usage_chunk["usage"], last["timings"]
    assert usage["prompt_tokens"] == stack.post("/tokenize", {"prompt": prompt}).json["count"]
    # A step that verifies drafts gives several at once.
    assert usage["completion_tokens"] == 12 >= len(pieces)
    assert timings["predicted_n"] == 12
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"]
    text = "".join(chunk["choices"][0]["text"] for chunk in pieces)
    assert stack.post("/tokenize", {"prompt": text}).json["count"] <= 12


def test_timings_are_of_this_request(stack: Stack) -> None:
    answer = stack.post(COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}).json
    timings = answer["timings"]
    assert 0 < timings["prompt_ms"] < 30_000
    assert 0 < timings["predicted_ms"] < 30_000
    assert timings["predicted_per_second"] == pytest.approx(8e3 / timings["predicted_ms"], rel=1e-3)
    assert timings["prompt_per_token_ms"] == pytest.approx(
        timings["prompt_ms"] / timings["prompt_n"], rel=0.01
    )
    waits = ("ngram_wait_ms", "expert_wait_ms", "transfer_wait_ms", "device_wait_ms")
    for name in ("queue_ms", "tokenize_ms", *waits):
        assert timings[name] >= 0


def test_routes_are_all_there_are(stack: Stack) -> None:
    """Whatever way they went: of every token that was computed, in every layer, as many as a token uses; of
    drafts in vain too, and of the prediction block, which is a layer more."""
    answer = stack.post(COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}).json
    timings = answer["timings"]
    with GGUFModel(DEMO_MODEL_PATH) as file:
        config = read_model_config(file)
    num_computed = timings["prompt_n"] + timings["predicted_n"] - 1
    routes = timings["expert_routes"].values()
    num_routes = num_computed * config.num_layers * config.num_experts_used
    found = sum(way["n"] for way in routes)
    assert found % config.num_experts_used == 0
    assert num_routes <= found <= 6 * num_routes
    assert sum(way["share"] for way in routes) == pytest.approx(1, abs=1e-5)
    assert timings["expert_bytes_n"]["ram"] > 0


def test_an_answer_that_stops_counts_its_last_token(stack: Stack) -> None:
    """The end-of-text token is generated, and paid for, though nobody sees it."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 400}
    *pieces, last = chunks_of(stack, CHAT, body)
    assert last["choices"][0]["finish_reason"] == "stop"
    visible = [chunk for chunk in pieces if chunk["choices"][0]["delta"].get("content")]
    assert last["timings"]["predicted_n"] >= len(visible) + 1


def test_characters_are_never_split(stack: Stack) -> None:
    """Pieces of characters are held back until they are whole, or given up as U+FFFD at the end."""
    wild = {"prompt": "ßé日本語😀", "temperature": 5, "top_p": 1, "top_k": 0, "max_tokens": 100}
    found = ""
    # What is drawn depends on the last bits of products, and so on the CPU; some of it is never ASCII.
    for seed in range(10):
        # Of its own, so that both read the whole prompt: what is gone on from differs in the last bits too.
        answer = stack.post(COMPLETIONS, wild | {"seed": seed, "stream": True, "cache_salt": f"a{seed}"})
        text = "".join(
            json.loads(event)["choices"][0]["text"] for event in payloads(answer.body) if event != "[DONE]"
        )
        whole = stack.post(COMPLETIONS, wild | {"seed": seed, "cache_salt": f"b{seed}"}).json
        assert text == whole["choices"][0]["text"]
        found += text
    assert any(ord(character) > 127 for character in found), "the samples have nothing to split"


def test_what_is_left_of_the_context_bounds_the_answer(stack: Stack) -> None:
    """Without max_tokens an answer may take all the room there is, and no more."""
    limit = stack.health()["max_context"]
    body = {"prompt": [5] * (limit - 2), "temperature": 5, "top_k": 0, "seed": 1}
    answer = stack.post(COMPLETIONS, body).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == limit
