"""A stack whose experts do not fit: the answers of one where they do, through losses of the processes that
hold and fill the pool, and nothing left behind."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, serving, stack_files, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# Of the demo model: a third of its experts.
BUDGET = ("--ram-budget", "0.004")


def answer(stack: Stack) -> str:
    """A prompt that needs most experts of each layer, and some tokens one by one."""
    prompt = "What is a pelican? Which animals live in the sea, and what do they eat? " * 3
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
    got = stack.post("/v1/completions", body)
    assert got.status == 200, got.body
    text: str = got.json["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected() -> str:
    """What a stack says that maps its experts."""
    with serving("--experts", "mapped") as stack:
        text = answer(stack)
        assert "experts=mapped" in stack.log
    return text


@pytest.fixture
def stack() -> Iterator[Stack]:
    with serving(*BUDGET) as stack:
        yield stack


def pools(stack: Stack) -> list[str]:
    """The segments that hold a pool of experts."""
    return [name for name in stack.segments() if name.startswith("strata-experts-")]


def test_a_pool_gives_the_same_answers(stack: Stack, expected: str) -> None:
    """Before and after the stager, and then the cpu_worker, were killed: each makes room for the next."""
    worker = stack.health()["processes"]["cpu_worker"]
    assert (worker["experts"], worker["expert_pool_gib"]) == ("pool", 0.0)
    assert worker["expert_places"] > 0
    assert answer(stack) == expected
    assert answer(stack) == expected
    for role in ("stager", "cpu_worker"):
        pid = stack.send(role, signal.SIGKILL)
        wait_for(
            lambda pid=pid, role=role: stack.health()["processes"][role].get("pid") != pid, 10, "its loss"
        )
        stack.wait_ready()
        assert answer(stack) == expected
        wait_for(lambda: len(pools(stack)) == 1, 5, "one pool")
    stack.assert_only_living_remain()


def test_resident_experts_that_do_not_fit() -> None:
    """Refused at start, by what they need and what there is; no process is left."""
    with stack_files() as stack:
        stack.serve("--experts", "resident", *BUDGET)
        assert stack.supervisor.wait(60) == 2
        assert "--experts resident: all experts are 0.0" in stack.log
        assert "can be had for them (--ram-budget 0.004)" in stack.log
        stack.assert_nothing_left()
