"""The benchmark of the expert cache: what it talks about, and that what it counts is what happens."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import expert_cache
from benchmarks.expert_cache import AVERAGED, Cache, Plan, measure_round, recovery
from benchmarks.slices import write_slice
from benchmarks.topics import NUM_TOPICS, changes, largest_step, script, source_of
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.placement.trace import TraceReader
from tests.support.tiny_slice import TINY_SLICE

NUM_SLOTS = TINY_SLICE.num_hidden_layers * TINY_SLICE.num_experts // 2


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    path = tmp_path / "slice.gguf"
    write_slice(path, TINY_SLICE, "q4_k", 0, lambda *_: None)
    return Cache(path, NUM_SLOTS, 1, tmp_path)


def test_each_topic_follows_each_other_once() -> None:
    """Or a change that is easy would count more than others."""
    topics = changes(NUM_TOPICS * (NUM_TOPICS - 1))
    assert len(set(pairwise(topics))) == NUM_TOPICS * (NUM_TOPICS - 1)
    assert all(before != after for before, after in pairwise(changes(40)))
    assert changes(3) == topics[:4]


def test_everyone_is_given_the_same(cache: Cache) -> None:
    """The same for a seed, as many windows as were asked for, and a topic that comes again goes on."""
    for path in (DEMO_MODEL_PATH, cache.path):
        with GGUFModel(path) as model:
            source = source_of(model)
            stretches = script(source, [0, 1, 0], 3, 50)
            assert stretches == script(source, [0, 1, 0], 3, 50)
            assert stretches != script(source, [0, 1, 0], 4, 50)
        assert [part.topic for part in stretches] == [0, 1, 0]
        assert [part.num_windows for part in stretches] == [50, 50, 50]
        assert stretches[0].conversations != stretches[2].conversations
        prompts = [talk.prompt for part in stretches for talk in part.conversations]
        assert largest_step(stretches) == max(map(len, prompts))


def test_words_of_one_topic_are_no_other_s(cache: Cache) -> None:
    """Else a change of topic would be none."""
    with GGUFModel(cache.path) as model:
        stretches = script(source_of(model), range(NUM_TOPICS), 0, 100)
    words = [
        {token for talk in part.conversations for token in talk.prompt + talk.answer} for part in stretches
    ]
    assert sum(map(len, words)) == len(set().union(*words))


def test_recovery() -> None:
    """The mean over the changes counts, and what came before the first one does not."""
    rates = np.full((3, 80), 0.8)
    rates[0] = 0.1
    rates[1, :20], rates[2, :20] = 0.3, 0.5
    # 8 windows of which one is of 0.4 have a mean of 0.75, and that is too far.
    assert recovery(rates) == 20 + AVERAGED
    rates[:, :20] = 0.79
    assert recovery(rates) == AVERAGED


def test_slots_that_stay_are_replayed_exactly(cache: Cache) -> None:
    """Where nothing depends on time, the engine and the replay have to agree on every route."""
    with GGUFModel(cache.path) as model:
        stretches = script(source_of(model), [0, 1], 0, 40)
    learned = cache.learn(stretches[:1], "first")
    trace = cache.directory / "static.trace"
    outcome = cache.outcome("static", learned, stretches, trace=trace)
    assert outcome.rates.shape == outcome.seconds.shape == (2, 40)
    assert outcome.num_swaps == 0
    assert 0 < outcome.hit_rate < 1
    assert cache.replayed("static", learned, trace) == pytest.approx(outcome.hit_rate)
    with TraceReader(trace) as reader:
        steps = list(reader)
    num_prompts = sum(len(part.conversations) for part in stretches)
    assert sum(step.num_prefill_tokens > 0 for step in steps) == num_prompts
    assert len(steps) == num_prompts + 80
    num_pairs = 2 * NUM_SLOTS
    assert cache.hindsight(trace, num_pairs) == 1
    assert outcome.hit_rate <= cache.hindsight(trace, NUM_SLOTS) < 1


def test_a_round(cache: Cache) -> None:
    """All claims, each from the runs that its name says."""
    plan = Plan(rounds=1, num_changes=2, num_windows=24)
    with GGUFModel(cache.path) as model:
        claims, found = measure_round(cache, source_of(model), plan, 0)
    for name, outcome in found.items():
        assert claims[f"{name}_hit_rate"] == outcome.hit_rate
        assert (outcome.num_swaps > 0) == (name in ("adaptive", "lru"))
    assert claims["hit_rate_gain"] == claims["adaptive_hit_rate"] - claims["static_hit_rate"]
    assert claims["hit_rate_gain_over_mixed"] == claims["adaptive_hit_rate"] - claims["static_mixed_hit_rate"]
    assert max(claims[f"static{kind}_hit_rate"] for kind in ("", "_mixed", "_uniform")) <= (
        claims["hindsight_hit_rate"] + 1e-9
    )
    assert AVERAGED <= claims["recovery_windows"] <= 24
    # Few windows, and loads that take how long they take.
    assert claims["replay_difference"] < 0.2


def test_the_command(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims on standard output, and all of it in the file."""
    flags = [
        "--quick",
        "--changes",
        "1",
        "--windows",
        "16",
        "--slots",
        "50%",
        "--json",
        str(tmp_path / "r.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["expert_cache", "--model", str(cache.path), *flags])
    assert expert_cache.main() == 0
    stored = json.loads((tmp_path / "r.json").read_text())
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.out.splitlines()] == list(stored["claims"])
    assert stored["settings"]["num_slots"] == NUM_SLOTS
    assert "adaptive" in shown.err
    assert "the device is played by RAM" in shown.err
