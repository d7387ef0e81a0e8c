"""The benchmark of generation on the real stack, as small as it can be."""

import os

import pytest

from benchmarks.contenders import Strata
from benchmarks.parallel import ask_at_once
from benchmarks.report import Report
from benchmarks.speculation import SpeculationPlan, measure_speculation
from benchmarks.undisturbed import Bench, running
from shared.demo_model import DEMO_MODEL_PATH


def test_speculation_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Both stacks answer the same questions, and what is claimed can be computed of what they say."""
    report = Report("generation", {})
    bench = Bench(os.sched_getaffinity(0), 0.0, report)
    plan = SpeculationPlan(rounds=1, per_topic=2, warm_up_rounds=0)
    assert measure_speculation(bench, DEMO_MODEL_PATH, [], plan) == 0
    assert report.claims["speculation_ratio"] > 0
    assert 0 <= report.claims["accepted_per_window"] <= 4
    (only,) = report.details["speculation"]
    assert only["plain"]["num_decoded"] == only["drafting"]["num_decoded"] > 8
    assert only["plain"]["num_drafted"] == 0
    capsys.readouterr()


def test_requests_are_sent_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other they would share no reads of experts."""
    server = Strata(DEMO_MODEL_PATH, os.sched_getaffinity(0), 512, ["--spec", "0", "--parallel", "2"])
    with running(server):
        first, second = ask_at_once(server, [[301, 302, 303], [401, 402]], 400)
    assert first.num_tokens == second.num_tokens == 400
    ends = [answer.asked_at + answer.arrived_s[-1] for answer in (first, second)]
    assert max(first.asked_at, second.asked_at) < min(ends)
    capsys.readouterr()
