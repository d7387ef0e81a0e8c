"""Rows of the n-gram table that come from a disk: what is read, for whom, and what a bad disk does."""

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import NEVER, Stack, serving, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# Rows of tokens can be counted where none is drafted, and all are computed.
DIRECT = ("--ple-io", "direct", "--ple-cache-mib", "16", "--temperature", "0", *NEVER)
DIRECT += ("--spec", "0", "--conversation-cache-mib", "0")
ROWS_PER_TOKEN = 8
"""Rows of a token in the demo model."""


def random_ids(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def ask(stack: Stack, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
    answer = stack.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})
    assert answer.status == 200, answer.body
    timings: dict[str, Any] = answer.json["timings"]
    return timings


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with serving(*DIRECT) as running:
        yield running


def test_what_is_read_adds_up(stack: Stack) -> None:
    """Bytes of all requests together are what the kernel has read for the stager: prompts that were staged,
    steps that read for themselves, two at a time. A warm repeat reads nothing, and gives the same answer."""
    ask(stack, random_ids(5, seed=9))
    before = stack.kernel_read_bytes("stager")
    total = 0
    for seed, num_tokens in ((1, 700), (2, 3), (3, 64)):
        timings = ask(stack, random_ids(num_tokens, seed))
        total += timings["disk_bytes_n"]
        assert timings["ngram_n"] == (num_tokens + 7) * ROWS_PER_TOKEN
        assert timings["ngram_hits_n"] <= timings["ngram_n"]
        assert sum(reads["bytes_n"] for reads in timings["disk"]) == timings["disk_bytes_n"] > 0
        assert {reads["file"] for reads in timings["disk"]} == {"strata-demo.gguf"}
    assert total == stack.kernel_read_bytes("stager") - before
    again = ask(stack, random_ids(700, seed=1))
    assert again["disk_bytes_n"] == 0
    assert again["ngram_hits_n"] == again["ngram_n"]
    assert total == stack.kernel_read_bytes("stager") - before


def test_what_the_stager_says(stack: Stack) -> None:
    """The way it reads, the probe's numbers, and its counts."""
    stager = stack.request("GET", "/v1/status").json["processes"]["stager"]
    capabilities = stager["capabilities"]
    assert capabilities["ple_io"] == "direct"
    assert capabilities["ple_probe_direct_1"] > 0
    assert capabilities["ple_probe_direct_64"] > 0
    assert capabilities["ple_cache_rows"] > 100_000

    def has_read() -> bool:
        """As of the last heartbeat."""
        gauges = stack.request("GET", "/v1/status").json["processes"]["stager"]["gauges"]
        return bool(gauges["ngram_reads"] > 0)

    wait_for(has_read, 5, "a heartbeat after reads")
    assert re.search(
        r"n-gram rows \(0\.00 GB in strata-demo\.gguf\) by direct, \d+ rows in the cache", stack.log
    )


def test_a_bad_disk_costs_the_requests_that_need_it() -> None:
    """Reads that fail end their requests with an error that names the file; the others go on, nothing is
    restarted, and what could not be read is read again later."""
    with serving(*DIRECT, "--io-fail-every", "40") as stack:
        incarnations = {role: found["incarnation"] for role, found in stack.health()["processes"].items()}
        outcomes = []
        for seed in range(6):
            answer = stack.post("/v1/completions", {"prompt": random_ids(400, seed), "max_tokens": 1})
            outcomes.append(answer.status)
            if answer.status != 200:
                assert answer.error["code"] == "disk_error"
                assert answer.error["message"].startswith(
                    "rows of the n-gram table could not be read from strata-demo.gguf: Input/output error; "
                    "check the disk (dmesg)"
                )
        assert 503 in outcomes
        # What failed requests have read is in the account too.
        total = stack.told_read_bytes()
        assert total > 0

        def is_what_the_stager_says() -> bool:
            stager = stack.request("GET", "/v1/status").json["processes"]["stager"]
            return bool(stager["gauges"]["ngram_read_bytes"] == total)

        wait_for(is_what_the_stager_says, 5, "a heartbeat with the same bytes")

        def is_served() -> bool:
            answer = stack.post("/v1/completions", {"prompt": random_ids(400, seed=0), "max_tokens": 1})
            return answer.status == 200

        wait_for(is_served, 20, "an answer with rows that could be read")
        now = {role: found["incarnation"] for role, found in stack.health()["processes"].items()}
        assert now == incarnations
