"""A stack whose experts do not fit: the answers of one where they do, through losses of the processes that
hold and fill the pool, and nothing left behind."""

import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from tests.support.stack import Answer, Stack, serving, stack_files, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# Of the demo model: a third of its experts.
BUDGET = ("--ram-budget", "0.005")


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


@pytest.fixture(scope="module")
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


def test_every_route_and_every_byte_is_accounted_for(stack: Stack) -> None:
    """Routes by way are all routes, those of drafts and of the prediction block with them, and bytes by file
    all that the kernel has read for the stager."""
    with GGUFModel(DEMO_MODEL_PATH) as model:
        config = read_model_config(model)
    rng = random.Random(0)
    for num_tokens, num_new in ((60, 4), (1, 8), (300, 1)):
        before = stack.kernel_read_bytes("stager")
        prompt = [rng.randrange(1000) for _ in range(num_tokens)]
        answered = stack.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": num_new, "temperature": 0}
        ).json
        timings, usage = answered["timings"], answered["usage"]
        # The last token is chosen, and not computed any more.
        num_computed = num_tokens + usage["completion_tokens"] - 1
        routes = timings["expert_routes"]
        num_routes = sum(way["n"] for way in routes.values())
        assert num_routes % config.num_experts_used == 0
        assert num_routes >= num_computed * config.num_layers * config.num_experts_used
        assert sum(way["share"] for way in routes.values()) == pytest.approx(1, abs=1e-5)
        assert routes["disk"]["n"] > 0
        assert timings["disk_bytes_n"] == stack.kernel_read_bytes("stager") - before


def test_bad_experts_end_only_answers_that_need_them() -> None:
    """Of four that are computed together on a disk that fails now and then. Whoever is answered is answered
    as always, whoever is not is told which expert and why; what was read for both is accounted for."""
    bodies = [
        {"prompt": f"A {noun} is used to", "max_tokens": 6, "temperature": 0}
        for noun in ("spoon", "ladder", "pen", "boat")
    ]

    def all_at_once(stack: Stack) -> list[Answer]:
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(lambda body: stack.post("/v1/completions", body), bodies))

    with serving("--experts", "mapped") as stack:
        expected = [answered.json["choices"][0]["text"] for answered in all_at_once(stack)]
    with serving(*BUDGET, "--io-fail-every", "100") as stack:
        num_failed = num_answered = 0
        before = stack.kernel_read_bytes("stager")
        while num_failed == 0 or num_answered == 0:
            for answered, text in zip(all_at_once(stack), expected, strict=True):
                if answered.status == 200:
                    num_answered += 1
                    assert answered.json["choices"][0]["text"] == text
                else:
                    num_failed += 1
                    assert (answered.status, answered.error["code"]) == (503, "disk_error")
                    words = r"expert \d+ of layer \d could not be read from strata-demo.gguf: Input/output"
                    assert re.match(words, answered.error["message"])
        num_bytes = stack.told_read_bytes()
        # A read that was made to fail was read all the same.
        assert num_bytes <= stack.kernel_read_bytes("stager") - before <= 1.05 * num_bytes


def test_resident_experts_that_do_not_fit() -> None:
    """Refused at start, by what they need and what there is; no process is left."""
    with stack_files() as stack:
        stack.serve("--experts", "resident", *BUDGET)
        assert stack.supervisor.wait(60) == 2
        assert "--experts resident: all experts are 1" in stack.log
        assert " MiB, and 5 MiB can be had for them (--ram-budget 0.005)" in stack.log
        stack.assert_nothing_left()
