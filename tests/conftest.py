"""Stacks that several tests share, and the logs of stacks in the reports of tests that fail."""

import os
import signal
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from tests.support import stack as support
from tests.support.stack import NEVER, Stack, serving

# As in the gpu_worker, and before anything imports torch: threads that spin at the end of every operation are
# what slows a busy machine down most.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with Ctrl-C ignored, and that is inherited: the stacks of tests
# are interrupted by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile(
    "strata", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("strata")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A stack on the demo model, for tests that leave it as they found it."""
    with serving("--aliases", "other-name", "--logits-endpoint", "--max-context", "600") as running:
        yield running


@pytest.fixture(scope="session")
def endless_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose answers last until max_tokens: two places, and a queue for two.

    Its settings come from a file, from variables and from flags, each overriding the one before. Its name
    makes every event of a stream large, so that the buffers on the way to a client are soon full.
    """
    file = tmp_path_factory.mktemp("settings") / "strata.toml"
    file.write_text('parallel = 1\nqueue_size = 2\nmodel_name = "of the file"\naliases = ["a", "b"]\n')
    variables = {"STRATA_CONFIG": str(file), "STRATA_PARALLEL": "2", "STRATA_MODEL_NAME": "of the variable"}
    variables["STRATA_PARALEL"] = "3"
    flags = [*NEVER, "--model-name", "of-the-flag" * 60]
    flags += ["--keepalive-interval-s", "0.2", "--prefill", "64", "--watchdog-s", "3"]
    with serving(*flags, environment=variables) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what the processes wrote to the report of a failing test."""
    report = yield
    if report.failed:
        for running in support.started:
            report.sections.append((f"log of the stack in {running.root}", running.log_tail))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the times that tests measured."""
    if support.measurements:
        terminalreporter.section("measured")
        for name, seconds in support.measurements:
            terminalreporter.write_line(f"{seconds:8.3f} s  {name}")
