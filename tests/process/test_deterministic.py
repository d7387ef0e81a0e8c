"""With `--deterministic` equal requests give equal bytes, whatever is kept, drafted, or computed beside."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.stack import Stack, serving
from tools.demo_model.topics import TOPICS, topic_prompts

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
# Every logit counts at that temperature: what differs in a bit, differs in a token sooner or later.
WILD = {"temperature": 3.0, "top_p": 1, "top_k": 0, "max_tokens": 60, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain() -> Iterator[Stack]:
    """Keeps nothing, drafts nothing."""
    with serving("--deterministic", "--spec", "0", "--conversation-cache-mib", "0") as stack:
        yield stack


@pytest.fixture(scope="module")
def busy() -> Iterator[Stack]:
    """All there is."""
    with serving("--deterministic", "--parallel", "8", "--prefill", "64") as stack:
        yield stack


def conversations() -> list[list[dict[str, str]]]:
    """Of a few questions each, with one system prompt."""
    system = {"role": "system", "content": "You answer in a few plain words. " * 12}
    found = []
    for topic in TOPICS:
        asked = [prompt.question for prompt in itertools.islice(topic_prompts(topic, 1), 3)]
        found.append([system, *({"role": "user", "content": question} for question in asked)])
    return found


def turns(stack: Stack, questions: list[dict[str, str]], **changes: Any) -> list[str]:
    """What is answered, one question after the other."""
    messages, said = questions[:1], []
    for question in questions[1:]:
        messages = [*messages, question]
        answer = stack.post(CHAT, WILD | changes | {"messages": messages}).json
        said.append(answer["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_whatever_runs_beside_and_whatever_is_kept(plain: Stack, busy: Stack) -> None:
    """Eight conversations at a time in windows of drafts, with chunks of prompts among them, twice. Each is
    as if it were alone on a server that keeps nothing and drafts nothing."""
    talks = conversations()
    expected = [turns(plain, talk) for talk in talks]
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda talk: turns(busy, talk), [*talks, *talks]))
        assert got == [*expected, *expected]
    assert busy.post(CHAT, WILD | {"messages": talks[0][:2]}).json["timings"]["cache_n"] > 0
