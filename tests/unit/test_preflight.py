"""What can be known to fail before a process is started, and what is said then."""

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shared import preflight
from shared.config import PROCESS_CONFIGS
from shared.errors import ConfigError, ModelFileError, ResourceError, UnsupportedModelError
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement.device import check_deterministic
from shared.preflight import check_port, check_stack
from shared.run_directory import Role
from shared.settings import settings_of
from shared.work_slots import RingTokens, ring_tokens, shared_memory_needed
from tests.support.tiny_model import tiny_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model that can be served."""
    return tiny_model().write(tmp_path / "tiny.gguf")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def check(path: Path, **changes: object) -> None:
    """Checks a stack of that model, with settings of any process changed."""
    settings = {"model": path, "port": 0} | changes
    check_stack(
        {
            Role(name): kind(**{key: value for key, value in settings.items() if key in settings_of(kind)})
            for name, kind in PROCESS_CONFIGS.items()
        }
    )


def test_a_stack_that_can_start(path: Path) -> None:
    """Nothing is said, and nothing held: neither the file nor the port."""
    before = len(os.listdir("/proc/self/fd"))
    check(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_model(tmp_path: Path) -> None:
    """A path that was mistyped."""
    with pytest.raises(ModelFileError, match=r"gone\.gguf: no such model file"):
        check(tmp_path / "gone.gguf")


def test_truncated_model(path: Path) -> None:
    """A download that broke off: file, offset, reason, way out."""
    size = path.stat().st_size
    os.truncate(path, size - 100)
    message = (
        rf"{path}: truncated: tensor .* needs bytes \d+ to {size}, but the file ends at {size - 100}; down"
    )
    with pytest.raises(ModelFileError, match=message):
        check(path)


def test_a_model_that_is_not_run(path: Path) -> None:
    """Metadata and tensors are both looked at."""
    model = tiny_model()
    model.set("expert_used_count", 9)
    with pytest.raises(UnsupportedModelError, match="expert_used_count is 9"):
        check(model.write(path))
    model = tiny_model()
    del model.tensors["blk.2.ssm_a"]
    with pytest.raises(UnsupportedModelError, match=r"the tensor blk\.2\.ssm_a is missing"):
        check(model.write(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu"}, "^--device is 'gpu'; it can be auto, cpu, cuda or cuda:N"),
        ({"cpu_worker_cpus": "a"}, "^--cpu-worker-cpus is 'a'; expected CPUs as 0-7"),
        ({"rope_scaling": "yarn"}, "^--rope-scaling is 'yarn', but neither --rope-scale nor the file says"),
        ({"stager_cpus": "3-1"}, "^--stager-cpus is '3-1'; the CPUs 3-1 run backwards"),
    ],
)
def test_settings_that_cannot_be(path: Path, changes: dict[str, object], message: str) -> None:
    """Otherwise a worker would say so, after the others have been started."""
    with pytest.raises(ConfigError, match=message):
        check(path, **changes)


def test_a_device_without_a_driver(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before torch is loaded, which takes seconds; where there is a driver, of whatever kind, it is left
    to torch whether there is a device."""
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(preflight, "CUDA_DRIVERS", (tmp_path / "dxg", driver))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ResourceError,
            match=rf"^--device is '{device}', but .* no driver .*/dxg, .*/nvidiactl\); use --device cpu",
        ):
            check(path, device=device)
    check(path, device="auto")
    check(path, device="cpu")
    driver.touch()
    check(path, device="cuda:1")


def test_port_in_use(path: Path, taken: int) -> None:
    """The message has the address, the reason and the settings to change."""
    with pytest.raises(
        ResourceError,
        match=rf"cannot listen on 127\.0\.0\.1:{taken}: Address already in use; stop what .*another --port",
    ):
        check(path, port=taken)


def test_hosts_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another machine, not even a name, unknown: all the same kind of error."""
    for host in ("203.0.113.7", "x" * 70):
        with pytest.raises(ResourceError, match=rf"^cannot listen on {host}:0: .+; choose another --host"):
            check_port(host, 0)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ResourceError, match=r"^cannot listen on nowhere:0: Name or service not known; choose"
    ):
        check_port("nowhere", 0)


def test_a_port_just_left(taken: int) -> None:
    """A server that is restarted at once finds its own port, though old connections wind down."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        port = listener.getsockname()[1]
        accepted, _ = listener.accept()
        accepted.close()
        client.recv(1)
    check_port("127.0.0.1", port)


def test_too_little_shared_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives 64 MiB: the message has what is left, what is needed, and both ways out. What is needed
    grows with --prefill, so lowering it helps."""
    monkeypatch.setattr(preflight, "free_shared_memory", lambda: 1 << 20)
    with pytest.raises(
        ResourceError,
        match=r"/dev/shm has 1 MiB left, this stack needs 2 MiB; enlarge it \(docker: shm_size\), "
        r"or lower --prefill \(now 1024\)",
    ):
        check(path, prefill="1024")
    check(path, prefill="64")


def test_chunks_that_stream_need_less_shared_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots on the device the cpu_worker sees chunks below the streaming size only, but n-gram rows
    come for all. A chunk that is left to choose may be as large as the cap."""
    tokens = partial(ring_tokens, parallel=4, window_tokens=5, stream_min=1024)
    assert tokens(8192, has_slots=False) == RingTokens(8213, 8213)
    assert tokens(8192, has_slots=True) == RingTokens(1044, 8213)
    assert tokens(512, has_slots=True) == RingTokens(533, 533)
    with GGUFModel(path) as model:
        config = read_model_config(model)
        place_bytes = BlobLayout(model, config.num_layers).largest_place_bytes
    free = shared_memory_needed(config, RingTokens(1044, 8213), place_bytes)
    assert free > shared_memory_needed(config, RingTokens(1044, 8213))
    assert free < shared_memory_needed(config, RingTokens(8213, 8213))
    monkeypatch.setattr(preflight, "free_shared_memory", lambda: free)
    check(path, prefill="8192", device="cpu", expert_cache="4")
    check(path, device="cpu", expert_cache="4")
    with pytest.raises(ResourceError, match=r"or lower --prefill \(now 8192\)"):
        check(path, prefill="8192", device="cpu")
    with pytest.raises(ResourceError, match=r"or lower --prefill \(now auto:9000\)"):
        check(path, prefill="auto:9000", device="cpu", expert_cache="4")
    # 512 without slots, whatever the cap.
    check(path, prefill="auto:9000", device="cpu")


def test_experts_that_may_not_be_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name: said before a process reads gigabytes. Where it was left open, that is no reason."""
    monkeypatch.setattr(preflight, "may_lock", lambda num_bytes: False)
    with pytest.raises(ResourceError, match=r"^--experts resident: .* cannot be locked in RAM .*ulimit -l"):
        check(path, experts="resident")
    check(path)
    check(path, experts="mapped")


def test_determinism_that_cannot_be_kept(path: Path) -> None:
    """Neither on a card nor with slots that change; said at the start."""
    check(path, deterministic=True, device="cpu")
    with pytest.raises(ConfigError, match=r"^--deterministic .* slots of experts.*take --expert-cache 0"):
        check(path, deterministic=True, device="cpu", expert_cache="4")
    with pytest.raises(ConfigError, match=r"^--deterministic .* a CUDA device.*take --device cpu"):
        check_deterministic(is_on_cuda=True, has_slots=False)
