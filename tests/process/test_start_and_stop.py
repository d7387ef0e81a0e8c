"""Starting and stopping a stack, in every way a person or a machine may: nothing is left of it."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.stack import (
    DONE,
    NEVER,
    START_TIMEOUT_S,
    Stack,
    events,
    first_text,
    measured,
    stack_files,
    strata_command,
    streaming_body,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture
def unstarted() -> Iterator[Stack]:
    with stack_files() as stack:
        yield stack


def test_ctrl_c_in_a_terminal_is_for_the_supervisor_alone(unstarted: Stack) -> None:
    """The terminal sends it to its whole foreground group, during start-up too; then no child may die of it
    with a traceback."""
    unstarted.serve()
    wait_for(lambda: "gpu_worker." in unstarted.log, START_TIMEOUT_S, "the first word of a child")
    os.killpg(unstarted.supervisor.pid, signal.SIGINT)
    assert unstarted.supervisor.wait(10) == 0
    unstarted.assert_nothing_left()
    assert "Traceback" not in unstarted.log


@pytest.mark.parametrize("word", ["loading", "gpu_worker.device.choose"])
def test_stopping_while_it_loads_is_quick(unstarted: Stack, word: str) -> None:
    """There is nothing to drain, however long loading would still take."""
    unstarted.serve()
    wait_for(lambda: word in unstarted.log, START_TIMEOUT_S, word)
    began = time.monotonic()
    assert unstarted.stop(signal.SIGINT) == 0
    took = time.monotonic() - began
    measured(f"SIGINT at {word!r} to the end", took)
    assert took < 5
    unstarted.assert_nothing_left()
    assert "Traceback" not in unstarted.log


def test_an_interrupt_before_anything_is_started(unstarted: Stack) -> None:
    """While the command still imports its modules."""
    process = unstarted.serve()
    wait_for(lambda: _has_python_started(process.pid), START_TIMEOUT_S, "the interpreter")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) in (0, 130, -signal.SIGINT)
    unstarted.assert_nothing_left()


def _has_python_started(pid: int) -> bool:
    """Whether it has got as far as to load libraries of ours."""
    with open(f"/proc/{pid}/maps") as maps:
        return "_multiarray_umath" in maps.read()


async def test_a_drain_lets_answers_finish_and_takes_no_new_ones(unstarted: Stack) -> None:
    unstarted.serve(*NEVER, "--parallel", "1")
    unstarted.wait_served()
    url = f"{unstarted.url}/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=streaming_body(max_tokens=150)) as running,
        session.post(url, json=streaming_body(max_tokens=5)) as waiting,
    ):
        stream = events(running)
        await first_text(stream)
        unstarted.wait_counters(1, 1)
        unstarted.supervisor.send_signal(signal.SIGTERM)
        wait_for(lambda: unstarted.health()["status"] == "draining", 5, "the drain")
        refused = unstarted.post("/v1/completions", {"prompt": "Once"})
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) >= 1
        assert unstarted.request("GET", "/readyz").status == 503
        assert unstarted.request("GET", "/livez").status == 200
        for answer in (stream, events(waiting)):
            *_, end, last = [event async for event in answer]
            assert last == DONE
            assert end["choices"][0]["finish_reason"] == "length"
    assert unstarted.supervisor.wait(10) == 0
    unstarted.assert_nothing_left()


async def test_a_drain_that_takes_too_long_ends_answers_with_an_error(unstarted: Stack) -> None:
    """The one that runs, the one that waits for its turn, and one that has not sent a byte."""
    unstarted.serve(*NEVER, "--parallel", "1", "--drain-timeout-s", "1")
    unstarted.wait_served()
    url = f"{unstarted.url}/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=streaming_body()) as running,
        session.post(url, json=streaming_body()) as waiting,
    ):
        stream = events(running)
        await first_text(stream)
        whole = session.post(url, json=streaming_body(stream=False))
        unstarted.wait_counters(1, 1)
        asking = asyncio.ensure_future(whole.__aenter__())
        await asyncio.to_thread(unstarted.wait_counters, 1, 2)
        began = time.monotonic()
        unstarted.supervisor.send_signal(signal.SIGTERM)
        for answer in (stream, events(waiting)):
            *_, failure, last = [event async for event in answer]
            assert last == DONE
            assert failure["error"]["code"] == "draining"
        response = await asking
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "draining"
        response.close()
        assert 0.9 < time.monotonic() - began < 4
    assert unstarted.supervisor.wait(10) == 0
    unstarted.assert_nothing_left()
    assert "an unexpected error" not in unstarted.log


async def test_killing_the_supervisor_ends_the_stack(unstarted: Stack) -> None:
    """Nobody is left to clean up but the processes themselves."""
    unstarted.serve(*NEVER)
    unstarted.wait_served()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{unstarted.url}/v1/completions", json=streaming_body()) as response,
    ):
        stream = events(response)
        await first_text(stream)
        unstarted.supervisor.kill()
        began = time.monotonic()
        *_, failure, last = [event async for event in stream]
        assert last == DONE
        assert failure["error"]["code"] in ("draining", "worker_failed")
        measured("kill of the supervisor to the error event", time.monotonic() - began)
        assert time.monotonic() - began < 2
    unstarted.assert_nothing_left(timeout_s=10)
    measured("kill of the supervisor to the last of its stack", time.monotonic() - began)


def test_killing_the_supervisor_while_it_loads_ends_the_stack(unstarted: Stack) -> None:
    unstarted.serve()
    wait_for(lambda: "gpu_worker." in unstarted.log, START_TIMEOUT_S, "the first word of a child")
    unstarted.supervisor.kill()
    unstarted.assert_nothing_left(timeout_s=20)


KILLED_WITH_A_SEGMENT = """
import os
from shared.arena import Segment, SegmentLayout
Segment.create("left", "00000000", SegmentLayout({"a": ("u1", (10,))}))
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_stack_left_is_swept_by_the_next(
    unstarted: Stack, request: pytest.FixtureRequest
) -> None:
    """Where every process was killed at once, nobody could clean up."""
    segment = Path("/dev/shm/strata-left-00000000")
    request.addfinalizer(lambda: segment.unlink(missing_ok=True))
    subprocess.run([sys.executable, "-c", KILLED_WITH_A_SEGMENT], check=False)
    assert segment.exists()
    directory = unstarted.root / "strata" / "1-dead"
    directory.mkdir(parents=True)
    (directory / "gateway.lock").write_text("00000000")
    (directory / "gateway.sock").touch()
    unstarted.serve(environment={"XDG_RUNTIME_DIR": str(unstarted.root)})
    wait_for(lambda: "settings:" in unstarted.log, START_TIMEOUT_S, "the first word of a child")
    assert not segment.exists()
    assert not directory.exists()
    assert unstarted.stop(signal.SIGINT) == 0
    unstarted.assert_nothing_left()


def test_a_process_that_will_not_stay_up_ends_the_stack(unstarted: Stack) -> None:
    """Here it is killed each time it was started; restarting it for ever would help nobody."""
    unstarted.serve()
    killed: set[int] = set()
    deadline = time.monotonic() + START_TIMEOUT_S
    while unstarted.supervisor.poll() is None:
        assert time.monotonic() < deadline
        pid = unstarted.started_pid("stager")
        if pid is not None and pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.01)
    assert unstarted.supervisor.returncode == 2
    assert len(killed) == 6
    assert "strata: the stager ended 6 times within 60 s" in unstarted.log
    unstarted.assert_nothing_left()


def test_two_stacks_do_not_meet(stack: Stack, endless_stack: Stack) -> None:
    """Neither sees the other's workers, nor their loss."""
    assert stack.url != endless_stack.url
    pids = [
        {process["pid"] for process in each.health()["processes"].values()} for each in (stack, endless_stack)
    ]
    assert not pids[0] & pids[1]
    before = stack.health()
    losses = endless_stack.health()["processes"]["stager"]["losses"]
    endless_stack.send("stager", signal.SIGKILL)
    wait_for(lambda: endless_stack.health()["processes"]["stager"]["losses"] > losses, 10, "the loss")
    endless_stack.wait_ready()
    after = stack.health()
    assert after["loaded"]
    for role, process in after["processes"].items():
        assert process["incarnation"] == before["processes"][role]["incarnation"]
        assert process.get("losses", 0) == 0


async def test_ctrl_c_on_a_terminal_once_and_again(unstarted: Stack) -> None:
    """Progress is rewritten in place, the greeting stands alone; the first Ctrl-C waits for answers, the
    second does not."""
    process, ours = _serve_on_terminal(unstarted)
    try:
        seen = _read_until(ours, "curl ")
        assert "\r" in seen
        assert "%" in seen
        assert "\r\x1b[K" in seen.split("is served at")[0]
        address = re.search(r"is served at (\S+)", seen)
        assert address is not None
        unstarted.url = address[1]
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{unstarted.url}/v1/completions", json=streaming_body()) as response,
        ):
            stream = events(response)
            await first_text(stream)
            os.write(ours, b"\x03")
            _read_until(ours, "stopping; again to stop at once")
            wait_for(lambda: unstarted.health()["status"] == "draining", 5, "the drain")
            await first_text(stream)
            began = time.monotonic()
            os.write(ours, b"\x03")
            assert process.wait(10) == 0
            measured("second Ctrl-C to the end", time.monotonic() - began)
            assert time.monotonic() - began < 3
            with pytest.raises(aiohttp.ClientError):
                [event async for event in stream]
    finally:
        os.close(ours)
    unstarted.assert_nothing_left()


def _serve_on_terminal(stack: Stack) -> tuple["subprocess.Popen[bytes]", int]:
    """`strata serve` on a pseudo-terminal, and our end of that."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [strata_command(), "serve", "--port", "0", "--run-dir", str(stack.run_dir), *NEVER],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # Makes the pseudo-terminal the controlling one, so that Ctrl-C typed into it is a signal.
        preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
    )
    stack.processes.append(process)
    os.close(theirs)
    return process, ours


def _read_until(descriptor: int, word: str) -> str:
    """What a terminal shows up to this word."""
    seen = ""
    while word not in seen:
        seen += os.read(descriptor, 4096).decode("utf-8", "replace")
    return seen
