"""The commands beside `serve`, as a user types them: chat, inspect, logits, and their mistakes."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.in_process import InProcessModel
from shared.config import GpuWorkerConfig
from shared.demo_model import DEMO_MODEL_PATH
from tests.support.stack import START_TIMEOUT_S, Stack, stack_files, strata_command, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `strata` to its end with this standard input."""
    return subprocess.run(
        [strata_command(), *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


# chat


def test_chat_through_a_pipe_prints_only_the_answers(stack: Stack) -> None:
    # As the base URL of other clients is written.
    url = f"{stack.url}/v1/"
    ended = run("chat", "--url", url, "--temperature", "0", "--max-tokens", "6", given="Hello\n\n/help\n")
    hello = [{"role": "user", "content": "Hello"}]
    answer = stack.post("/v1/chat/completions", {"messages": hello, "temperature": 0, "max_tokens": 6}).json
    assert (ended.returncode, ended.stderr) == (0, "")
    first, help_line = ended.stdout.splitlines()
    assert first == answer["choices"][0]["message"]["content"]
    assert help_line.startswith("/new")


def test_chat_remembers_forgets_and_takes_back(stack: Stack) -> None:
    """Its requests are those of the conversation: each line's answer is the server's to the same messages."""

    def answer(*texts: str) -> str:
        roles = ["system", *["user", "assistant"] * 2]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"messages": messages, "temperature": 0, "max_tokens": 5}
        content: str = stack.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        return content

    flags = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "5")
    given = "Hello\nWhy?\n/undo\nAnd?\n/new\nHello\n/exit\nnever said\n"
    ended = run("chat", "--url", stack.url, *flags, given=given)
    assert (ended.returncode, ended.stderr) == (0, "")
    hello = answer("Be brief.", "Hello")
    expected = [
        hello,
        answer("Be brief.", "Hello", hello, "Why?"),
        answer("Be brief.", "Hello", hello, "And?"),
        hello,
    ]
    assert ended.stdout == "".join(f"{text}\n" for text in expected)


def test_chat_tells_what_the_server_objects_to(stack: Stack) -> None:
    ended = run("chat", "--url", stack.url, "--temperature", "9", given="Hello\n")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("strata: temperature: ")


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("http://127.0.0.1:9", 1, "strata serve"),
        ("127.0.0.1:8080", 2, "--url 127.0.0.1:8080"),
        ("ftp://127.0.0.1", 2, "--url ftp://127.0.0.1"),
        ("http://127.0.0.1:x", 2, "--url http://127.0.0.1:x"),
    ],
)
def test_chat_without_a_server(url: str, code: int, words: str) -> None:
    ended = run("chat", "--url", url)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_chat_with_another_kind_of_server(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        address = re.search(r"http://\S+:\d+", server.stdout.readline())
        assert address is not None
        ended = run("chat", "--url", address[0])
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert len(ended.stderr.splitlines()) == 1


class Terminal:
    """A program on a pseudo-terminal: typed to, and read."""

    def __init__(self, *command: str) -> None:
        pid, self._descriptor = pty.fork()
        if pid == 0:
            os.execvp(command[0], command)
        self._pid = pid
        self.seen = ""

    def type(self, text: str) -> None:
        """Types as a person does; \\x03 is Ctrl-C, \\x04 Ctrl-D."""
        os.write(self._descriptor, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Reads until the pattern was seen since the last call; returns what was seen up to its end."""
        deadline = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.seen, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} not in {self.seen!r}"
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if poll.poll(100):
                self.seen += os.read(self._descriptor, 4096).decode("utf-8", "replace")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        try:
            while os.read(self._descriptor, 4096):
                continue
        except OSError:  # What a terminal without a program gives.
            pass
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_chat_on_a_terminal(endless_stack: Stack) -> None:
    """A prompt, an answer as it comes, Ctrl-C that stops the answer and not the chat, Ctrl-D that ends it."""
    terminal = Terminal(strata_command(), "chat", "--url", endless_stack.url, "--temperature", "2")
    terminal.wait_for("of-the-flag.* at http://.*/exit ends.*> ")
    terminal.type("Hello\n")
    terminal.wait_for(r"Hello\r\n.*\S{3}")
    endless_stack.wait_counters(1, 0)
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped\].*\n.*> ")
    endless_stack.wait_counters(0, 0)
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("/undo.*\n.*> ")
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_chat_outlives_a_server_that_dies_in_its_answer(endless_stack: Stack) -> None:
    chat = subprocess.Popen(
        [strata_command(), "chat", "--url", endless_stack.url, "--temperature", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    try:
        chat.stdin.write("Hello\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        os.kill(endless_stack.pid("gateway"), 9)
        _, errors = chat.communicate(timeout=20)
    finally:
        if chat.poll() is None:
            chat.kill()
            chat.wait()
    assert chat.returncode == 1
    assert errors == "strata: the server ended in the middle of its answer\n"
    endless_stack.wait_ready()


# inspect


def test_inspect_tells_what_the_model_is() -> None:
    ended = run("inspect", str(DEMO_MODEL_PATH))
    assert (ended.returncode, ended.stderr) == (0, "")
    for heading in ("files", "architecture qwen4exp", "tensors", "tokenizer"):
        assert f"\n{heading}" in f"\n{ended.stdout}"
    assert str(DEMO_MODEL_PATH) in ended.stdout


def test_inspect_into_a_pipe_that_is_closed() -> None:
    command = f"{strata_command()} inspect {DEMO_MODEL_PATH} | true"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert ended.stderr == ""


def test_no_command_and_no_such_command() -> None:
    assert run().returncode == 2
    ended = run("serv")
    assert ended.returncode == 2
    assert "serv" in ended.stderr
    assert run("--version").stdout.startswith("strata ")


# logits


@pytest.fixture
def files() -> Iterator[Stack]:
    """Only to look for what a stack of `strata logits` leaves."""
    with stack_files() as stack:
        yield stack


def test_logits_do_not_depend_on_the_size_of_a_step(stack: Stack, files: Stack, tmp_path: Path) -> None:
    """The running stack reads the sequence in one step, the command in ten. Sums in another order can make an
    activation another code when it is rounded; a wrong state would move most logits by whole units."""
    token_ids = stack.post("/tokenize", {"prompt": "Once upon a time there was " * 5}).json["tokens"]
    np.save(tmp_path / "ids.npy", np.array(token_ids))
    size = -(-len(token_ids) // 10)
    flags = ("--prefill", f"{size}", "--run-dir", str(files.run_dir), "--log-level", "info")
    paths = ("--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz"))
    command = files.launch(strata_command(), "logits", *paths, *flags)
    assert command.wait(START_TIMEOUT_S) == 0, files.log
    files.assert_nothing_left()
    with np.load(tmp_path / "out.npz") as written:
        logits, ids = written["logits"], written["ids"]
    assert ids.tolist() == token_ids
    answer = stack.post("/v1/logits", {"prompt_token_ids": token_ids})
    whole = np.frombuffer(answer.body, "<f4").reshape(logits.shape)
    difference = np.abs(logits - whole)
    assert np.median(difference) <= 0.02
    assert difference.max() <= 0.5
    assert f"logits [{len(token_ids)}, {logits.shape[1]}]" in files.log


def test_logits_of_scaled_positions(stack: Stack, tmp_path: Path) -> None:
    """Flags reach the process that rotates, and no other way of reading the file disagrees with them."""
    token_ids = np.random.default_rng(0).integers(0, 4000, 200)
    np.save(tmp_path / "ids.npy", token_ids)
    paths = ("--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz"))
    # The demo model hardly minds stretched positions; ten times the scores it does mind.
    flags = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-attn-factor", "3")
    ended = run("logits", *paths, *flags, "--max-context", "200000")
    assert ended.returncode == 0, ended.stderr
    assert "--max-context is 200000, but the model reaches 131072 tokens" in ended.stderr
    assert "--rope-scaling yarn --rope-scale 7" in ended.stderr
    with np.load(tmp_path / "out.npz") as written:
        logits = written["logits"]
    settings = GpuWorkerConfig(rope_scaling="yarn", rope_scale=4.0, yarn_attn_factor=3.0)
    model = InProcessModel(DEMO_MODEL_PATH, settings=settings)
    difference = np.median(np.abs(logits - model.logits(token_ids.tolist())))
    model.device.close()
    answer = stack.post("/v1/logits", {"prompt_token_ids": token_ids.tolist()})
    unscaled = np.frombuffer(answer.body, "<f4").reshape(logits.shape)
    assert difference <= 0.1 * np.median(np.abs(logits - unscaled)), difference


def test_logits_of_rounded_keys_and_values(stack: Stack, tmp_path: Path) -> None:
    """The flag reaches the process that keeps them."""
    token_ids = np.random.default_rng(0).integers(0, 4000, 200)
    np.save(tmp_path / "ids.npy", token_ids)
    paths = ("--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz"))
    ended = run("logits", *paths, "--kv-type", "k8v4")
    assert ended.returncode == 0, ended.stderr
    with np.load(tmp_path / "out.npz") as written:
        logits = written["logits"]
    model = InProcessModel(DEMO_MODEL_PATH, settings=GpuWorkerConfig(kv_type="k8v4"))
    difference = np.median(np.abs(logits - model.logits(token_ids.tolist())))
    model.device.close()
    answer = stack.post("/v1/logits", {"prompt_token_ids": token_ids.tolist()})
    exact = np.frombuffer(answer.body, "<f4").reshape(logits.shape)
    assert difference <= 0.1 * np.median(np.abs(logits - exact)), difference


def test_logits_that_are_interrupted_leave_nothing(files: Stack, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3]))
    paths = ("--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz"))
    command = files.launch(
        strata_command(), "logits", *paths, "--run-dir", str(files.run_dir), "--log-level", "info"
    )
    wait_for(lambda: "gpu_worker." in files.log, START_TIMEOUT_S, "the first word of a child")
    command.send_signal(2)
    assert command.wait(20) == 130
    files.assert_nothing_left()
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not a .npy file"),
        (np.array([[1]]), "one-dimensional"),
        (np.array([1.5]), "integers"),
        (np.array([], np.int64), "no ids"),
        (np.array([3, -1]), "-1 is no token id"),
        (np.array([2**63], np.uint64), "9223372036854775808 is no token id"),
    ],
)
def test_logits_of_what_is_no_sequence(tmp_path: Path, content: np.ndarray | None, words: str) -> None:
    path = tmp_path / "ids.npy"
    if content is None:
        path.write_text("not an array")
    else:
        np.save(path, content)
    ended = run("logits", "--ids", str(path), "--out", str(tmp_path / "out.npz"))
    assert ended.returncode == 2
    assert words in ended.stderr
    assert str(path) in ended.stderr


def test_logits_into_what_is_a_directory(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3]))
    ended = run("logits", "--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path))
    assert ended.returncode == 2
    assert f"{tmp_path} is a directory" in ended.stderr


def test_logits_into_a_directory_that_is_not_there(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1]))
    ended = run("logits", "--ids", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "no" / "out.npz"))
    assert ended.returncode == 2
    assert "there is no directory" in ended.stderr
