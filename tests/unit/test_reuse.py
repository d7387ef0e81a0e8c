"""Requests that go on from what others have computed: the engine, with a real model of a megabyte."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.in_process import InProcessModel
from shared.messages import AbortRequest, RequestFinished, RequestTimings
from tests.support.running_engine import Answer, RunningEngine, running_engine
from tests.support.tiny_model import tiny_model

RANDOM = [int(token_id) for token_id in np.random.default_rng(0).integers(0, 256, 400)]
SYSTEM, USER, OTHER_USER, NEXT_USER = RANDOM[:70], RANDOM[70:110], RANDOM[110:150], RANDOM[150:200]
LONG = RANDOM[200:]
NUM_NEW = 30

Alone = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model().write(tmp_path_factory.mktemp("reuse") / "tiny.gguf")


@pytest.fixture(scope="module")
def alone(path: Path) -> Alone:
    """What the model says greedily to a prompt that it reads from its begin."""
    return InProcessModel(path).greedy


@pytest.fixture
def running(path: Path) -> Iterator[RunningEngine]:
    with running_engine(path, conversation_cache_bytes=64 << 20) as running:
        yield running


def timings_of(answer: Answer) -> RequestTimings:
    assert isinstance(answer.end, RequestFinished), answer.end
    return answer.end.timings


def ask(
    running: RunningEngine, alone: Alone, name: str, prompt: list[int], boundaries: tuple[int, ...] = ()
) -> tuple[list[int], RequestTimings]:
    """An answer, which is what it would be without anything kept, and how it came about."""
    running.ask(name, prompt, NUM_NEW, boundaries=list(boundaries))
    answer = running.answer(name)
    assert answer.token_ids == alone(prompt, NUM_NEW)
    return answer.token_ids, timings_of(answer)


def test_turns_of_a_conversation(running: RunningEngine, alone: Alone) -> None:
    """A follow-up reads what is new; so does one with another last message, another conversation with the
    same system prompt, and an exact repeat."""
    first = SYSTEM + USER
    at = (len(SYSTEM), len(first) - 2)
    said, timings = ask(running, alone, "first", first, at)
    assert (timings.num_reused, timings.reuse_note) == (0, "nothing is kept yet")
    assert timings.ngram_rows > 0

    second = first + said + NEXT_USER
    _, timings = ask(running, alone, "follow-up", second, (*at, len(first + said)))
    # The last token that was said has not been computed.
    assert timings.num_reused == len(first) + NUM_NEW - 1
    num_computed = len(second) - timings.num_reused + NUM_NEW - 1
    assert timings.ngram_rows % num_computed == 0

    _, timings = ask(running, alone, "edited", first + said + OTHER_USER, (*at, len(first + said)))
    assert timings.num_reused == len(first) + NUM_NEW - 1
    _, timings = ask(running, alone, "again", first, at)
    assert timings.num_reused == len(first) - 2
    _, timings = ask(running, alone, "other", SYSTEM + OTHER_USER, (len(SYSTEM),))
    assert timings.num_reused == len(SYSTEM)
    assert timings.reuse_note == ""


def test_nothing_leaks(running: RunningEngine, alone: Alone) -> None:
    """Conversations that share a beginning and part, at the same time and one after the other."""
    rng = np.random.default_rng(1)
    conversations = [SYSTEM + USER, SYSTEM + OTHER_USER, SYSTEM + USER[:20] + NEXT_USER, LONG[:]]
    for turn in range(4):
        for number, conversation in enumerate(conversations):
            running.ask(
                f"{turn}-{number}", conversation, NUM_NEW, boundaries=[len(SYSTEM), len(conversation) - 3]
            )
        for number, conversation in enumerate(conversations):
            said = running.answer(f"{turn}-{number}").token_ids
            assert said == alone(conversation, NUM_NEW)
            conversation += said + rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
        assert turn == 0 or timings_of(running.answer(f"{turn}-0")).num_reused > 100


def test_a_prompt_without_known_messages(running: RunningEngine, alone: Alone) -> None:
    """The same one again reads its last token; in chunks of any size."""
    ask(running, alone, "first", LONG)
    _, timings = ask(running, alone, "again", LONG)
    assert timings.num_reused == len(LONG) - 1


def test_the_same_prompt_several_times_at_once(path: Path, alone: Alone) -> None:
    """It is read once; so is what several prompts begin with, where a message ends there. Who has something
    of its own to read does not wait."""
    with running_engine(path, parallel=6, conversation_cache_bytes=64 << 20) as running:
        prompts = {
            **{f"same-{number}": (LONG, ()) for number in range(3)},
            "other": (RANDOM[100:190], ()),
        }
        for name, (prompt, at) in prompts.items():
            running.ask(name, prompt, NUM_NEW, boundaries=list(at))
        reused = []
        for name, (prompt, _) in prompts.items():
            answer = running.answer(name)
            assert answer.token_ids == alone(prompt, NUM_NEW)
            reused.append(timings_of(answer).num_reused)
        assert reused == [0, len(LONG) - 1, len(LONG) - 1, 0]

        system = RANDOM[:150]
        agents = [system + RANDOM[200 + 20 * number : 220 + 30 * number] for number in range(4)]
        for number, prompt in enumerate(agents):
            running.ask(f"agent-{number}", prompt, NUM_NEW, boundaries=[len(system)])
        for number, prompt in enumerate(agents):
            answer = running.answer(f"agent-{number}")
            assert answer.token_ids == alone(prompt, NUM_NEW)
            assert timings_of(answer).num_reused == (len(system) if number else 0)


def test_whoever_is_waited_for_leaves(path: Path, alone: Alone) -> None:
    """The next one reads it all, then."""
    with running_engine(path, conversation_cache_bytes=64 << 20) as running:
        running.gate.clear()
        for name in ("a", "b", "c"):
            running.ask(name, LONG, NUM_NEW)
        running.engine.submit(AbortRequest(request_id="a"))
        running.gate.set()
        for name in ("b", "c"):
            assert running.answer(name).token_ids == alone(LONG, NUM_NEW)


def test_an_answer_that_was_stopped(running: RunningEngine, alone: Alone) -> None:
    """What was computed for it is there for whoever goes on."""
    running.ask("a", LONG, 100_000)
    said = running.answer("a", until=lambda answer: len(answer.token_ids) >= 20).token_ids[:20]
    running.engine.submit(AbortRequest(request_id="a"))
    assert running.answer("a").end is not None
    _, timings = ask(running, alone, "b", LONG + said + USER)
    assert timings.num_reused >= len(LONG) - 1


def test_logits_are_computed_for_all_positions(running: RunningEngine, tmp_path: Path) -> None:
    """Whatever is kept; and nothing is kept of such requests."""
    running.ask("a", LONG, 4)
    running.answer("a")
    running.wait_idle()
    num_kept = len(running.conversations)
    (tmp_path / "logits").touch()
    running.ask("b", LONG, 0, logits_path=str(tmp_path / "logits"))
    timings = timings_of(running.answer("b"))
    assert (timings.num_reused, timings.reuse_note) == (0, "")
    assert len(np.fromfile(tmp_path / "logits", np.float32)) % len(LONG) == 0
    running.wait_idle()
    assert len(running.conversations) == num_kept


def test_clients_with_salts(running: RunningEngine, alone: Alone) -> None:
    """Each has its own."""
    for salt, expected in (("a", 0), ("b", 0), ("a", len(LONG) - 1)):
        running.ask(f"{salt}-{expected}", LONG, 4, cache_salt=salt)
        answer = running.answer(f"{salt}-{expected}")
        assert answer.token_ids == alone(LONG, 4)
        assert timings_of(answer).num_reused == expected


def test_memory_of_conversations(path: Path, alone: Alone) -> None:
    """It is bounded, and is that of no sequence that is over."""
    with running_engine(path, conversation_cache_bytes=300 << 10) as running:
        pages = running.model.pages
        for number in range(12):
            prompt = RANDOM[number * 10 : number * 10 + 100]
            ask(running, alone, f"{number}", prompt)
            running.wait_idle()
            assert running.conversations.num_bytes <= 300 << 10
            assert pages.num_pages * pages.page_bytes <= running.conversations.num_bytes
        gauges = running.engine.gauges()
        assert gauges["conversation_cache_bytes"] == running.conversations.num_bytes
        assert gauges["conversation_cache_evictions_total"] > 0


@pytest.mark.parametrize("spec", [0, 3])
def test_conversations_survive_a_restart(tmp_path: Path, spec: int) -> None:
    """On the disk: what was in memory at the end, and what had to leave it before."""
    path = tiny_model(has_prediction=True).write(tmp_path / "tiny.gguf")
    alone = InProcessModel(path).greedy
    settings: dict[str, Any] = {"conversation_folder": tmp_path / "kept", "spec": spec}
    prompts = [RANDOM[number * 20 : number * 20 + 150] for number in range(6)]
    with running_engine(path, conversation_cache_bytes=150 << 10, **settings) as running:
        for number, prompt in enumerate(prompts):
            ask(running, alone, f"{number}", prompt)
    with running_engine(path, conversation_cache_bytes=64 << 20, **settings) as running:
        said = [alone(prompt, NUM_NEW) for prompt in prompts]
        for number, (prompt, answer) in enumerate(zip(prompts, said, strict=True)):
            running.ask(f"{number}", prompt + answer + USER, NUM_NEW)
        for number, (prompt, answer) in enumerate(zip(prompts, said, strict=True)):
            found = running.answer(f"{number}")
            assert found.token_ids == alone(prompt + answer + USER, NUM_NEW)
            assert timings_of(found).num_reused >= len(prompt)


def test_a_conversation_that_is_too_large_to_come_back(tmp_path: Path) -> None:
    """With less memory than it needs after a restart, it is read again, once; so are others beside it."""
    path = tiny_model().write(tmp_path / "tiny.gguf")
    alone = InProcessModel(path).greedy
    settings: dict[str, Any] = {"conversation_folder": tmp_path / "kept"}
    with running_engine(path, conversation_cache_bytes=64 << 20, **settings) as running:
        ask(running, alone, "large", RANDOM)
    for num_bytes in (150 << 10, 1000):
        with running_engine(path, conversation_cache_bytes=num_bytes, parallel=1, **settings) as running:
            _, timings = ask(running, alone, "again", [*RANDOM, 1, 2, 3])
            assert timings.num_reused == 0
            ask(running, alone, "other", SYSTEM)
