"""Drafts in the engine: they change when tokens come, never which, nor the state that is left."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.text_model import load_text_model
from gpu_worker.speculation.payoff import Payoff
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.messages import RequestFinished, RequestTimings, Sampling
from tests.support.running_engine import GREEDY, Answer, RunningEngine, running_engine
from tests.support.tiny_model import tiny_model
from tools.demo_model.topics import TOPICS, topic_prompts

RANDOM = [int(token_id) for token_id in np.random.default_rng(0).integers(0, 256, 200)]
# What comes again and again has something to look up; the model's own drafts are random ones.
REPEATING = RANDOM[:12] * 6
NUM_NEW = 40

DRAFTS = [
    {"spec": 4},
    {"spec": 7, "suffix_draft": True},
    {"spec": 1, "suffix_draft": True},
    {"spec": 3, "spec_min_p": 0.9},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(has_prediction=True).write(tmp_path_factory.mktemp("spec") / "tiny.gguf")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there may be, whether or not that pays."""
    monkeypatch.setattr(Payoff, "how_many", lambda self, source, num_sequences, most: most)
    monkeypatch.setattr(Payoff, "is_worth", lambda self, source, most: True)


def timings_of(answer: Answer) -> RequestTimings:
    assert isinstance(answer.end, RequestFinished), answer.end
    return answer.end.timings


def answers(
    path: Path, prompts: list[list[int]], sampling: Sampling, *ends: int, **settings: Any
) -> list[Answer]:
    """One after the other, up to a token that ends them."""
    with running_engine(path, **settings) as running:
        for number, prompt in enumerate(prompts):
            running.ask(f"{number}", prompt, NUM_NEW, sampling=sampling, eos_token_ids=list(ends))
            running.answer(f"{number}")
        return [running.answer(f"{number}") for number in range(len(prompts))]


@pytest.mark.parametrize("settings", DRAFTS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens(path: Path, settings: dict[str, Any], temperature: float) -> None:
    """Greedy or drawn, with every source of drafts; a seed gives what it gives without."""
    sampling = Sampling(temperature=temperature, top_k=0, top_p=0.95, min_p=0.0, seed=11)
    prompts = [RANDOM[:30], REPEATING, RANDOM[100:103]]
    expected = answers(path, prompts, sampling)
    got = answers(path, prompts, sampling, **settings)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    for answer in got:
        timings = timings_of(answer)
        assert timings.num_windows <= NUM_NEW
        num_accepted = sum(counts.num_accepted for counts in timings.drafts)
        assert timings.num_windows + num_accepted == NUM_NEW
        assert {counts.source for counts in timings.drafts} <= {"prediction", "suffix"}
        assert all(0 <= counts.num_accepted <= counts.num_drafted for counts in timings.drafts)
    assert all(not timings_of(answer).drafts for answer in expected)


def test_what_was_drafted_is_told(path: Path) -> None:
    """By source; a text that repeats itself is looked up, once the prediction block has proved unsure."""
    again = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logit_bias=[(7, 100.0)])
    (answer,) = answers(path, [REPEATING], again, spec=4, suffix_draft=True, spec_min_p=1.0)
    assert answer.token_ids == NUM_NEW * [7]
    drafts = {counts.source: counts for counts in timings_of(answer).drafts}
    assert drafts["suffix"].num_drafted == drafts["suffix"].num_accepted > NUM_NEW // 4
    assert timings_of(answer).num_windows < NUM_NEW - 10


def test_many_sequences_at_once(path: Path) -> None:
    """Windows of several sequences and a prompt in one step, sequences that end within a window."""
    prompts = [RANDOM[at : at + 9 + at // 3] for at in range(0, 60, 5)]
    lengths = [3 + 5 * (number % 4) for number in range(len(prompts))]
    with running_engine(path) as running:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            running.ask(f"{number}", prompt, length)
        expected = [running.answer(f"{number}").token_ids for number in range(len(prompts))]
    with running_engine(path, spec=5, suffix_draft=True) as running:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            running.ask(f"{number}", prompt, length)
        got = [running.answer(f"{number}").token_ids for number in range(len(prompts))]
    assert got == expected


def test_the_end_of_text_within_a_window(path: Path) -> None:
    """Nothing comes after it, however much was drafted."""
    (expected,) = answers(path, [REPEATING], GREEDY)
    last = next(n for n in range(5, NUM_NEW) if expected.token_ids[n] not in expected.token_ids[:n])
    with running_engine(path, spec=7, suffix_draft=True) as running:
        running.ask("a", REPEATING, NUM_NEW, eos_token_ids=[expected.token_ids[last]])
        answer = running.answer("a")
    assert answer.token_ids == expected.token_ids[: last + 1]
    assert isinstance(answer.end, RequestFinished)
    assert answer.end.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model(path: Path) -> None:
    """Of accepted drafts too."""
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_top_logprobs=2)
    found = []
    for settings in ({}, {"spec": 5, "suffix_draft": True}):
        with running_engine(path, **settings) as running:
            running.ask("a", REPEATING, NUM_NEW, sampling=sampling)
            found.append(running.answer("a"))
    plain, drafted = found
    assert plain.token_ids == drafted.token_ids
    assert len(plain.logprobs) == len(drafted.logprobs) == NUM_NEW
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top_token_ids == theirs.top_token_ids


@pytest.mark.parametrize("spec", [0, 4])
def test_conversations_with_drafts(path: Path, spec: int) -> None:
    """What is kept can be gone on from, by whoever drafts: in the same way as by one who has read it all."""
    with running_engine(path, conversation_cache_bytes=64 << 20, spec=spec, suffix_draft=True) as running:
        for settings in ((), (50,), (20, 60)):
            prompt = RANDOM[:80]
            for turn in range(4):
                name = f"{settings}-{turn}"
                running.ask(name, prompt, NUM_NEW, boundaries=list(settings))
                answer = running.answer(name)
                (alone,) = answers(path, [prompt], GREEDY)
                assert answer.token_ids == alone.token_ids
                assert turn == 0 or timings_of(answer).num_reused >= 80
                prompt = prompt + answer.token_ids + RANDOM[turn * 9 : turn * 9 + 5]


# The demo model, whose prediction block is trained.


@pytest.fixture(scope="module")
def demo_prompts() -> list[list[int]]:
    """A hundred questions."""
    text = load_text_model(GGUFModel(DEMO_MODEL_PATH))
    prompts = itertools.chain.from_iterable(itertools.islice(topic_prompts(topic, 5), 25) for topic in TOPICS)
    return [text.tokenizer.encode(prompt.text()) for prompt in prompts]


def test_a_hundred_questions(demo_prompts: list[list[int]]) -> None:
    """Greedy answers are identical with and without drafts, most of which are right."""
    settings = {"natively": True, "prefill": 512}
    ends = load_text_model(GGUFModel(DEMO_MODEL_PATH)).tokenizer.eos_token_ids
    expected = answers(DEMO_MODEL_PATH, demo_prompts, GREEDY, *ends, **settings)
    got = answers(DEMO_MODEL_PATH, demo_prompts, GREEDY, *ends, spec=4, spec_min_p=0.5, **settings)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    counts = [counts for answer in got for counts in timings_of(answer).drafts]
    assert sum(c.num_accepted for c in counts) > 0.5 * sum(c.num_drafted for c in counts) > 500


def drawn(running: RunningEngine, prompt: list[int], seeds: range) -> Iterator[tuple[int, ...]]:
    """The first tokens of an answer, for each seed."""
    for seed in seeds:
        sampling = Sampling(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        running.ask(f"{seed}", prompt, 3, sampling=sampling)
        yield tuple(running.answer(f"{seed}").token_ids)


def test_the_distribution_is_exact(demo_prompts: list[list[int]]) -> None:
    """At temperature 3, of answers drawn with drafts and others drawn without: no test tells which is
    which, neither by the second token nor by the third."""
    settings: dict[str, Any] = {"natively": True, "prefill": 512}
    prompt, number = demo_prompts[1], 1500
    with running_engine(DEMO_MODEL_PATH, **settings) as running:
        plain = list(drawn(running, prompt, range(number)))
    with running_engine(DEMO_MODEL_PATH, spec=2, **settings) as running:
        drafted = list(drawn(running, prompt, range(number, 2 * number)))
        assert sum(c.num_accepted for c in timings_of(running.answer(f"{number}")).drafts) >= 0
    for place in (1, 2):
        sides = [Counter(said[: place + 1] for said in side) for side in (plain, drafted)]
        common = [key for key, count in (sides[0] + sides[1]).items() if count >= 20]
        table = np.array([[*(side[key] for key in common), 0] for side in sides])
        table[:, -1] = number - table.sum(1)
        # Pearson's statistic: its mean is the number of columns less one, its variance twice that.
        expected = table.sum(0) / 2
        statistic = float(((table - expected) ** 2 / np.maximum(expected, 1)).sum())
        freedom = table.shape[1] - 1
        assert freedom > 1
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_drafts_that_do_not_pay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is right, few tokens are drafted in the end."""
    monkeypatch.undo()
    with running_engine(path, spec=4) as running:
        for number in range(12):
            running.ask(f"{number}", RANDOM[number : number + 20], 100)
            running.answer(f"{number}")
        first, last = timings_of(running.answer("0")), timings_of(running.answer("11"))
        assert sum(c.num_drafted for c in first.drafts) > 0
        assert sum(c.num_drafted for c in last.drafts) < 40
