"""Endpoints beside the answers: health, version, models, metrics, tokens, logits."""

import re
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stack import ROLES, WORKERS, Stack

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_health_tells_of_every_process(stack: Stack) -> None:
    health = stack.health()
    assert (health["status"], health["loaded"], health["model"]) == ("ok", True, "strata-demo")
    assert health["progress"] == {"fraction": 1.0, "activity": "serving"}
    assert (health["running"], health["waiting"]) == (0, 0)
    assert set(health["processes"]) == set(ROLES)
    for role, process in health["processes"].items():
        assert process["state"] == "ready"
        assert re.fullmatch("[0-9a-f]{8}", process["incarnation"])
        assert process["resident_memory_bytes"] > 2**20
        if role in WORKERS:
            assert 0 <= process["heartbeat_age_s"] < 5
            assert process["losses"] == 0
    assert len({process["pid"] for process in health["processes"].values()}) == 4


def test_status_tells_more_of_every_process(stack: Stack) -> None:
    status = stack.request("GET", "/v1/status").json
    assert (status["status"], status["loaded"], status["model"]) == ("ok", True, "strata-demo")
    assert status["requests"] == []
    assert set(status["processes"]) == set(ROLES)
    for role, process in status["processes"].items():
        assert process["gauges"]["cpu_seconds"] > 0
        assert ("capabilities" in process) == (role in WORKERS)
    assert status["processes"]["gpu_worker"]["capabilities"]["max_context"] == 600
    assert status["processes"]["gpu_worker"]["gauges"]["expert_cache_slots"] == 0


def test_probes(stack: Stack) -> None:
    assert stack.request("GET", "/livez").json == {"status": "ok"}
    assert stack.request("GET", "/readyz").json == {"status": "ok"}
    assert stack.request("GET", "/version").json == {"version": version("strata-inference")}


def test_a_model_says_how_long_its_context_is(stack: Stack) -> None:
    listed = stack.request("GET", "/v1/models").json
    assert listed["object"] == "list"
    for model in listed["data"]:
        assert (model["object"], model["root"], model["max_model_len"]) == ("model", "strata-demo", 600)
        assert abs(model["created"] - time.time()) < 3600
        assert stack.request("GET", f"/v1/models/{model['id']}").json == model


@pytest.mark.parametrize("given", ["mine-1", "a" * 64, "A.b:c_d-e"])
def test_a_clients_request_id_is_kept_and_made_unique(stack: Stack, given: str) -> None:
    seen = {
        stack.request("GET", "/livez", headers={"x-request-id": given}).headers["x-request-id"] for _ in "ab"
    }
    assert len(seen) == 2
    assert all(request_id.startswith(f"{given}-") for request_id in seen)


@pytest.mark.parametrize("given", ["a b", "a" * 65, "ü", "a/b", ""])
def test_a_request_id_that_would_not_do_is_replaced(stack: Stack, given: str) -> None:
    headers = {"x-request-id": given.encode("latin-1").decode("latin-1")}
    answer = stack.request("GET", "/livez", headers=headers)
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


# Metrics.


def samples(stack: Stack) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of /metrics by name and labels, the model's name left out."""
    answer = stack.request("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode("utf-8")):
        for sample in family.samples:
            labels = frozenset((name, value) for name, value in sample.labels.items() if name != "model_name")
            assert (sample.name, labels) not in found
            found[sample.name, labels] = sample.value
    return found


def grown(before: dict[Any, float], after: dict[Any, float], name: str, **labels: str) -> float:
    key = (name, frozenset(labels.items()))
    return after.get(key, 0) - before.get(key, 0)


def test_metrics_count_what_was_asked_and_answered(stack: Stack) -> None:
    before = samples(stack)
    stopped = stack.post(CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 400}).json
    begun = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 3}
    cut = [stack.post(COMPLETIONS, begun).json for _ in "ab"]
    refusals = [
        stack.post(CHAT, {"messages": []}),
        stack.post(CHAT, {"messages": HELLO, "model": "none"}),
        stack.post(COMPLETIONS, {"prompt": [1] * 1000}),
        stack.post(CHAT, {"messages": HELLO, "tools": [{}]}),
        stack.post(CHAT, {"messages": HELLO, "max_tokens": 1, "surely_unknown": 1}),
    ]
    assert [answer.status for answer in refusals] == [400, 404, 400, 400, 200]
    after = samples(stack)
    answers = [stopped, *cut, refusals[-1].json]
    usages = [answer["usage"] for answer in answers]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", *["length"] * 3]
    assert grown(before, after, "strata_request_success_total", finished_reason="stop") == 1
    assert grown(before, after, "strata_request_success_total", finished_reason="length") == 3
    for code in ("invalid_request", "model_not_found", "context_length_exceeded", "unsupported_parameter"):
        assert grown(before, after, "strata_request_failure_total", code=code) == 1
    assert grown(before, after, "strata_request_ignored_fields_total") == 1
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    output_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert grown(before, after, "strata_prompt_tokens_total") == prompt_tokens
    assert grown(before, after, "strata_generation_tokens_total") == output_tokens
    assert grown(before, after, "strata_time_to_first_token_seconds_count") == 4
    assert grown(before, after, "strata_e2e_request_latency_seconds_count") == 4
    assert grown(before, after, "strata_inter_token_latency_seconds_count") == output_tokens - 4
    waits = ("ngram_wait", "expert_wait", "transfer_wait", "device_wait")
    for stage in ("queue", "tokenize", "prefill", "decode", *waits):
        assert grown(before, after, "strata_stage_seconds_count", stage=stage) == 4
    ends = [usage["completion_tokens"] for usage in usages]
    assert min(ends) == 1


def test_metrics_tell_of_every_process(stack: Stack) -> None:
    found = samples(stack)
    for role in ROLES:
        states = {
            dict(labels)["state"]: value
            for (name, labels), value in found.items()
            if name == "strata_process_state" and dict(labels)["process"] == role
        }
        assert states["ready"] == sum(states.values()) == 1
        for gauge in ("resident_memory_bytes", "cpu_seconds", "major_faults"):
            assert (f"strata_process_{gauge}", frozenset({("process", role)})) in found
    for role in WORKERS:
        assert found["strata_process_losses", frozenset({("process", role)})] == 0
        assert found["strata_heartbeat_age_seconds", frozenset({("process", role)})] < 5
    assert found["strata_num_requests_running", frozenset()] == 0
    assert found["strata_num_requests_waiting", frozenset()] == 0


# Tokens.


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello",
        " leading and trailing ",
        "Grüße 日本語 😀👩‍👩‍👧",
        "a\r\n\tb\x00c",
        "<|im_start|>user<think>",
        "x" * 5000,
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.parametrize("parse_special", [True, False])
def test_tokens_of_a_text_give_the_text_back(stack: Stack, text: str, parse_special: bool) -> None:
    body = {"prompt": text, "parse_special": parse_special, "add_special_tokens": False}
    tokenized = stack.post("/tokenize", body).json
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 600
    back = stack.post("/detokenize", {"tokens": tokenized["tokens"]}).json
    assert back == {"prompt": text, "text": text}


def test_both_names_of_the_text_work(stack: Stack) -> None:
    assert (
        stack.post("/tokenize", {"content": "Hello"}).json
        == stack.post("/tokenize", {"prompt": "Hello"}).json
    )
    both = stack.post("/tokenize", {"content": "Hello", "prompt": "Goodbye"})
    assert (both.status, both.error["param"]) == (400, "prompt")


def test_a_chat_is_tokenized_as_it_is_answered(stack: Stack) -> None:
    counted = stack.post("/tokenize", {"messages": HELLO}).json
    answer = stack.post(CHAT, {"messages": HELLO, "max_tokens": 1}).json
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    without = stack.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json
    assert counted["tokens"][: without["count"]] == without["tokens"]
    text = stack.post("/detokenize", {"tokens": counted["tokens"]}).json["text"]
    beginning = stack.post("/detokenize", {"tokens": without["tokens"]}).json["text"]
    assert "Hello" in beginning
    assert text.startswith(beginning)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "none"}, "model"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokens_that_cannot_be(stack: Stack, path: str, body: dict[str, Any], param: str) -> None:
    answer = stack.post(path, body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param


# Logits.


def test_logits_have_a_row_for_every_token(stack: Stack) -> None:
    token_ids = stack.post("/tokenize", {"prompt": "Once upon a time"}).json["tokens"]
    answer = stack.post("/v1/logits", {"prompt_token_ids": token_ids})
    shape = [int(extent) for extent in answer.headers["x-logits-shape"].split(",")]
    logits = np.frombuffer(answer.body, "<f4").reshape(shape)
    assert len(logits) == len(token_ids)
    assert np.isfinite(logits).all()
    greedy = stack.post(COMPLETIONS, {"prompt": token_ids, "temperature": 0, "max_tokens": 1}).json
    expected = stack.post("/detokenize", {"tokens": [int(logits[-1].argmax())]}).json["text"]
    assert greedy["choices"][0]["text"] == expected


def test_logits_of_nothing_are_refused(stack: Stack) -> None:
    assert stack.post("/v1/logits", {"prompt_token_ids": []}).error["param"] == "prompt_token_ids"
    assert stack.post("/v1/logits", {"prompt_token_ids": [10**9]}).status == 400
    assert (
        stack.post("/v1/logits", {"prompt_token_ids": [1] * 601}).error["code"] == "context_length_exceeded"
    )
    # No answer is to follow, so the whole context is for the prompt.
    answer = stack.post("/v1/logits", {"prompt_token_ids": [1] * 600})
    assert answer.headers["x-logits-shape"].startswith("600,")
