"""Starts that cannot work: exit code 2 and one line that says what to change, and nothing is left behind.

What the command finds out by itself is asked of it in this process, as most of these tests do; what needs the
real command, or a process of the stack, has it.
"""

import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.cli.main import main
from shared.demo_model import DEMO_MODEL_PATH
from shared.preflight import CUDA_DRIVERS
from tests.support.stack import START_TIMEOUT_S, Stack, measured, stack_files, strata_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# Importing Python modules, on a busy machine, is nearly all of it.
QUICK_S = 5.0

Refuse = Callable[..., str]


@pytest.fixture
def unstarted() -> Iterator[Stack]:
    with stack_files() as stack:
        yield stack


@pytest.fixture
def refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Refuse]:
    """The message with which a command refuses to start."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def refuse(*arguments: str, command: str = "serve") -> str:
        with pytest.raises(SystemExit) as ended:
            main([command, *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    yield refuse
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--portt", "5"), ("--portt",)),
        (("--port",), ("--port", "expected one argument")),
        (("--port", "five"), ("--port", "'five'", "a whole number")),
        (("--port", "70000"), ("--port", "70000", "65535")),
        (("--parallel", "0"), ("--parallel", "0", "1")),
        (("--slots", "65"), ("--parallel", "65", "64")),
        (("--temperature", "-1"), ("--temperature", "-1")),
        (("--temperature", "nan"), ("--temperature", "nan")),
        (("--top-p", "0"), ("--top-p", "0")),
        (("--log-level", "loud"), ("--log-level", "loud", "debug")),
        (("--heartbeat-timeout-s", "0.1"), ("--heartbeat-timeout-s", "0.1")),
        (("--eos-ids", "1,x"), ("--eos-ids", "x")),
        (("--host", "no.such.host.invalid"), ("no.such.host.invalid", "--host")),
        (("--device", "abacus"), ("--device", "abacus", "cuda:N")),
        (("--device", "cuda:first"), ("--device", "cuda:first", "cuda:N")),
        (("--cpu-worker-cpus", "all"), ("--cpu-worker-cpus", "all", "0-7")),
        (("--stager-cpus", "3-1"), ("--stager-cpus", "3-1")),
        (("--expert-cache", "half"), ("--expert-cache", "'half'", "auto", "number of slots")),
        (("--expert-cache", "-1"), ("--expert-cache", "-1", "auto", "number of slots")),
        (("--expert-cache", "1.5"), ("--expert-cache", "1.5", "number of slots")),
        (("--prefill", "0"), ("--prefill", "'0'", "1 to 65536")),
        (("--prefill", "1000000000"), ("--prefill", "1000000000", "number of tokens")),
        (("--prefill", "100000"), ("--prefill", "100000", "1 to 65536")),
        (("--prefill", "-1"), ("--prefill", "-1", "auto:CAP")),
        (("--prefill", "auto:x"), ("--prefill", "auto:x", "auto:CAP")),
        (("--prefill", "auto:0"), ("--prefill", "auto:0", "1 to 65536")),
        (("--pcie-frac", "2"), ("--pcie-frac", "2", "1")),
        (("--pcie-frac", "nan"), ("--pcie-frac", "nan")),
        (("--adapt-decay", "1.1"), ("--adapt-decay", "1.1", "1")),
        (("--expert-policy", "wild"), ("--expert-policy", "wild", "adaptive")),
        (("--config", "/nowhere.toml"), ("/nowhere.toml",)),
        (("/nowhere/model.gguf",), ("/nowhere/model.gguf",)),
        (("/",), ("/",)),
    ],
    ids=lambda value: " ".join(value) if value and value[0][:1] in "-/" else "",
)
def test_flags_that_cannot_be(refusal: Refuse, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    message = refusal(*flags)
    for word in words:
        assert word in message.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", ("strata.toml", "TOML")),
        ("prot = 5", ("strata.toml", "prot", "did you mean port?")),
        ('port = "five"', ("strata.toml", "port", "five")),
        ("port = 5.5", ("strata.toml", "port", "5.5")),
        ("parallel = 1000", ("strata.toml", "parallel", "64")),
        ("logits_endpoint = 3", ("strata.toml", "logits_endpoint")),
        ("[gateway]\nport = 5", ("strata.toml", "gateway")),
    ],
)
def test_a_configuration_file_that_cannot_be(
    refusal: Refuse, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "strata.toml"
    path.write_text(text)
    message = refusal("--config", str(path))
    for word in words:
        assert word in message


def test_a_variable_that_cannot_be(refusal: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_PARALLEL", "many")
    message = refusal()
    assert "STRATA_PARALLEL" in message
    assert "many" in message


@pytest.mark.parametrize(
    "content", [b"", b"not a model\n" * 100, b"GGUF", b"GGUF\x09\x00\x00\x00" + bytes(64)]
)
def test_a_file_that_is_no_model(refusal: Refuse, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(content)
    assert str(path) in refusal(str(path))
    assert str(path) in refusal(str(path), command="inspect")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_model(refusal: Refuse, tmp_path: Path, share: float) -> None:
    """A download that broke off."""
    whole = DEMO_MODEL_PATH.read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    assert str(path) in refusal(str(path))


def test_a_part_of_a_split_model_that_is_missing(refusal: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    shutil.copy(DEMO_MODEL_PATH, path)
    assert "model-00002-of-00002.gguf" in refusal(str(path))


# With the real command.


def assert_refused(stack: Stack, process: subprocess.Popen[bytes], *words: str) -> float:
    """Waits for the end of a start that must fail; returns how long it took."""
    began = time.monotonic()
    assert process.wait(START_TIMEOUT_S) == 2, stack.log
    took = time.monotonic() - began
    for word in words:
        assert word in stack.log
    assert "Traceback" not in stack.log
    stack.assert_nothing_left()
    return took


def test_a_wrong_flag_is_refused_at_once(unstarted: Stack) -> None:
    took = assert_refused(unstarted, unstarted.serve("--parallel", "0"), "strata: --parallel (--slots) is 0")
    measured("refusal of a wrong flag", took)
    assert took < QUICK_S


def test_a_truncated_model_is_refused_at_once(unstarted: Stack, tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    path.write_bytes(DEMO_MODEL_PATH.read_bytes()[:1_000_000])
    took = assert_refused(unstarted, unstarted.serve(str(path)), str(path))
    measured("refusal of a truncated model", took)
    assert took < QUICK_S


def test_a_port_in_use(unstarted: Stack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"{taken.getsockname()[1]}"
        took = assert_refused(unstarted, unstarted.serve("--port", port), port, "--port")
    assert took < QUICK_S


@pytest.mark.skipif(any(path.exists() for path in CUDA_DRIVERS), reason="there is a driver")
def test_a_device_without_a_driver_is_refused_at_once(unstarted: Stack) -> None:
    took = assert_refused(unstarted, unstarted.serve("--device", "cuda"), "--device is 'cuda'", "no driver")
    measured("refusal of a device without a driver", took)
    assert took < QUICK_S


def test_a_device_that_is_not_there(unstarted: Stack) -> None:
    """With a driver only the gpu_worker can know: its message and its exit code become those of the stack."""
    with_driver = "mount -t tmpfs tmpfs /proc/driver && mkdir /proc/driver/nvidia && exec "
    if subprocess.run(["unshare", "-m", "sh", "-c", f"{with_driver} true"], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    command = f"{strata_command()} serve --port 0 --run-dir {unstarted.run_dir} --device cuda:99"
    process = unstarted.launch("unshare", "-m", "sh", "-c", with_driver + command)
    took = assert_refused(unstarted, process, "--device is 'cuda:99'", "the gpu_worker cannot start")
    measured("refusal of a device that is not there", took)


@pytest.mark.parametrize(
    ("flag", "path", "words"),
    [
        (
            "--expert-profile",
            "/",
            ("the expert profile / is no file", "name another file (--expert-profile"),
        ),
        ("--expert-profile", "/nowhere/at/all", ("--expert-profile", "there is no folder /nowhere/at")),
        ("--record-routing", "/nowhere/at/all", ("--record-routing", "there is no folder /nowhere/at")),
        ("--record-routing", "/dev/full", ("--record-routing", "/dev/full", "No space left on device")),
    ],
)
def test_files_of_experts_that_cannot_be(
    unstarted: Stack, flag: str, path: str, words: tuple[str, ...]
) -> None:
    """Only the gpu_worker looks at them: its message and its exit code become those of the stack."""
    process = unstarted.serve("--expert-cache", "8", flag, path)
    assert_refused(unstarted, process, "the gpu_worker cannot start", *words)


def test_too_little_shared_memory(unstarted: Stack) -> None:
    """As in a container that was given none: seen before anything is written into it."""
    small_memory = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "
    if subprocess.run(["unshare", "-m", "sh", "-c", f"{small_memory} true"], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    command = f"{small_memory} {strata_command()} serve --port 0 --run-dir {unstarted.run_dir}"
    process = unstarted.launch("unshare", "-m", "sh", "-c", command)
    assert_refused(unstarted, process, "/dev/shm", "1 MiB left", "shm_size", "--prefill")


def test_a_run_directory_is_used_by_one_stack_at_a_time(stack: Stack, unstarted: Stack) -> None:
    process = unstarted.serve("--run-dir", str(stack.run_dir))
    assert_refused(unstarted, process, "already running there", "--run-dir")
    assert stack.health()["loaded"]


@pytest.mark.parametrize("path", ["/proc/nowhere", "/tmp/" + "x" * 90])
def test_a_run_directory_that_cannot_be(unstarted: Stack, path: str) -> None:
    assert_refused(unstarted, unstarted.serve("--run-dir", path), path, "--run-dir")
