"""The four processes without a supervisor, as containers run them: one directory, any order, each restarted
by hand. What `serve` does for them, nobody does here."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.demo_model import DEMO_MODEL_PATH
from tests.support.stack import (
    ROLES,
    START_TIMEOUT_S,
    WORKERS,
    Stack,
    stack_files,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

GATEWAY = ("--port", "0")


@pytest.fixture
def unstarted() -> Iterator[Stack]:
    with stack_files() as stack:
        yield stack


def start(stack: Stack, role: str) -> int:
    """Starts the process of a role and returns its pid."""
    return stack.start_alone(role, *(GATEWAY if role == "gateway" else ())).pid


def serves(stack: Stack) -> bool:
    stack.wait_listening()
    stack.wait_ready(START_TIMEOUT_S)
    return stack.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status == 200


def stop(stack: Stack, pid: int, number: signal.Signals = signal.SIGTERM) -> int:
    """Ends one process and returns its exit code."""
    (process,) = (process for process in stack.processes if process.pid == pid)
    process.send_signal(number)
    return process.wait(START_TIMEOUT_S)


def test_any_order_any_restart_any_end(unstarted: Stack) -> None:
    """One stack through all of it, since starting one takes seconds."""
    # The gateway last: those who need it wait for it.
    pids = {role: start(unstarted, role) for role in ("stager", "cpu_worker", "gpu_worker", "gateway")}
    assert serves(unstarted)
    health = unstarted.health()
    assert {role: process["pid"] for role, process in health["processes"].items()} == pids

    # Each of them restarted by hand, some gently, some not.
    for role, number in zip(
        ROLES, (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=True
    ):
        assert stop(unstarted, pids[role], number) == (0 if number == signal.SIGTERM else -number)
        if role in WORKERS:
            wait_for(lambda: not unstarted.health()["loaded"], 10, f"the loss of the {role}")
            refused = unstarted.post("/v1/completions", {"prompt": "Once"})
            assert (refused.status, refused.error["code"]) == (503, "model_loading")
            assert unstarted.health()["status"] == "recovering"
        else:
            unstarted.url = ""
        pids[role] = start(unstarted, role)
        assert serves(unstarted)
        makers = {name[-8:] for name in unstarted.segments()}
        assert makers == {unstarted.health()["processes"]["gpu_worker"]["incarnation"]}

    # The end in an order in which nobody finds those he needs.
    for role in ("cpu_worker", "gateway", "stager", "gpu_worker"):
        assert stop(unstarted, pids[role]) == 0
    unstarted.assert_nothing_left()
    assert "Traceback" not in unstarted.log


def test_a_gateway_that_waits_for_its_workers_says_so(unstarted: Stack) -> None:
    pid = start(unstarted, "gateway")
    unstarted.wait_listening()
    wait_for(lambda: unstarted.health()["processes"]["gateway"]["state"] == "ready", 20, "the tokenizer")
    health = unstarted.health()
    assert (health["status"], health["loaded"], health["max_context"]) == ("loading", False, None)
    assert health["progress"] == {"fraction": 0.0, "activity": "gpu_worker: starting"}
    assert unstarted.request("GET", "/readyz").status == 503
    assert unstarted.request("GET", "/livez").status == 200
    refused = unstarted.post("/v1/completions", {"prompt": "Once"})
    assert (refused.status, refused.error["code"]) == (503, "model_loading")
    assert refused.error["type"] == "service_unavailable_error"
    assert int(refused.headers["Retry-After"]) >= 1
    assert unstarted.post("/tokenize", {"prompt": "a"}).json["max_model_len"] is None
    assert unstarted.request("GET", "/v1/models").json["data"][0]["max_model_len"] is None
    assert stop(unstarted, pid) == 0
    unstarted.assert_nothing_left()


def test_a_role_is_played_once(unstarted: Stack) -> None:
    first = start(unstarted, "stager")
    wait_for(lambda: (unstarted.run_dir / "stager.lock").exists(), START_TIMEOUT_S, "the lock")
    wait_for(lambda: "settings:" in unstarted.log, START_TIMEOUT_S, "the first one")
    second = unstarted.start_alone("stager")
    assert second.wait(START_TIMEOUT_S) == 2
    assert "a stager is already running there" in unstarted.log
    assert stop(unstarted, first, signal.SIGINT) == 0
    unstarted.assert_nothing_left()


def test_stopping_one_that_waits_for_the_others(unstarted: Stack) -> None:
    pids = [start(unstarted, role) for role in ("cpu_worker", "stager")]
    wait_for(lambda: unstarted.log.count("settings:") == 2, START_TIMEOUT_S, "both")
    for pid in pids:
        assert stop(unstarted, pid) == 0
    unstarted.assert_nothing_left()
    assert "Traceback" not in unstarted.log


def test_another_model_is_refused(unstarted: Stack, tmp_path: Path) -> None:
    """All processes must compute with the same weights."""
    other = tmp_path / "other.gguf"
    other.write_bytes(DEMO_MODEL_PATH.read_bytes() + bytes(4096))
    gateway = start(unstarted, "gateway")
    worker = unstarted.start_alone("stager", "--model", str(other))
    assert worker.wait(START_TIMEOUT_S) == 2
    assert (
        "the stager has another model file than the gateway; give all processes one --model" in unstarted.log
    )
    unstarted.wait_listening()
    assert unstarted.health()["processes"]["stager"]["state"] == "absent"
    assert stop(unstarted, gateway) == 0
    unstarted.assert_nothing_left()


def test_another_version_is_refused(unstarted: Stack) -> None:
    """A container that was not rebuilt."""
    gateway = start(unstarted, "gateway")
    newer = "\n".join(
        [
            "import shared.link.client, shared.messages",
            "shared.link.client.PROTOCOL_VERSION = shared.messages.PROTOCOL_VERSION = 10_000",
            "from stager.__main__ import main",
            "main()",
        ]
    )
    environment = {"STRATA_RUN_DIR": str(unstarted.run_dir), "STRATA_LOG_LEVEL": "info"}
    worker = unstarted.launch(sys.executable, "-c", newer, environment=environment)
    assert worker.wait(START_TIMEOUT_S) == 2
    assert "protocol 10000 of the stager is not" in unstarted.log
    assert "run one version of Strata" in unstarted.log
    assert stop(unstarted, gateway) == 0
    unstarted.assert_nothing_left()


def test_a_process_started_alone_does_not_follow_a_supervisor(unstarted: Stack) -> None:
    """It has none, so the end of whoever started it is nothing to it."""
    script = f"exec {sys.executable} -m stager & echo $!"
    environment = {"STRATA_RUN_DIR": str(unstarted.run_dir), "STRATA_LOG_LEVEL": "info"}
    assert unstarted.launch("sh", "-c", script, environment=environment).wait(10) == 0
    wait_for(lambda: "settings:" in unstarted.log, START_TIMEOUT_S, "the stager")
    (pid,) = unstarted.living_pids()
    os.kill(pid, signal.SIGTERM)
    unstarted.assert_nothing_left(timeout_s=10)
