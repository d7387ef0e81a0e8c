"""Every setting of every process, in one place: what they are called, what they mean, what they may be.

Each process takes its own frozen dataclass; `strata serve` takes their union and hands each child what
differs from the defaults through its environment. After start nothing sets a field: what a process finds
out while running (its device, its cache sizes) travels in the handshake's capabilities.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shared.demo_model import DEMO_MODEL_PATH
from shared.errors import ConfigError
from shared.settings import setting

_MODEL = "model and files"
_MEMORY = "memory and disk"
_NETWORK = "network"
_CAPACITY = "capacity"
_SAMPLING = "sampling defaults, for requests that do not say"
_COMPUTE = "devices and threads"
_LIFE = "processes and time limits"

# Those of `shared.quants`, named here too because importing it costs half a second; a test compares them.
CPU_KERNELS = ("auto", "avx512", "avxvnni", "avx2", "portable")
CPU_ACTIVATIONS = ("int16", "int8")

PLE_IO = ("auto", "direct", "mmap", "ram")
EXPERT_SETTINGS = ("auto", "resident", "mapped")

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
"""What this machine alone can reach."""

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,2})?")
# A single sign of life that comes late shall not be taken for none.
_MIN_HEARTBEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What all four processes are told alike."""

    model: Path = setting(
        DEMO_MODEL_PATH, "GGUF file to serve; any one part of a split set", group=_MODEL, unit="PATH"
    )
    run_dir: Path | None = setting(
        None,
        "directory of this stack's sockets and locks, private to it; "
        "`serve` makes a fresh one, a process started alone uses the user's runtime directory",
        group=_LIFE,
        unit="DIR",
    )
    log_level: str = setting(
        "info",
        "least serious messages logged; the commands `serve` and `logits` start from warning",
        group=_LIFE,
        choices=("debug", "info", "warning", "error"),
    )
    cpu_kernels: str = setting(
        "auto",
        "instructions for products on the CPU; auto takes the fastest it has; portable is slow, and rounds "
        "nothing",
        group=_COMPUTE,
        choices=CPU_KERNELS,
    )
    cpu_activations: str = setting(
        CPU_ACTIVATIONS[0],
        "what activations are rounded to for products with quantised weights on the CPU; int8 is as exact as "
        "llama.cpp and reads prompts faster, int16 has a 200th of its error",
        group=_COMPUTE,
        choices=CPU_ACTIVATIONS,
    )
    heartbeat_interval_s: float = setting(
        0.25, "time between signs of life of a worker", group=_LIFE, unit="SECONDS", minimum=0.05, maximum=10
    )
    heartbeat_timeout_s: float = setting(
        10.0,
        "a live process that is silent for so long counts as stuck: its requests fail, `serve` restarts it",
        group=_LIFE,
        unit="SECONDS",
        minimum=1,
    )
    handshake_timeout_s: float = setting(
        30.0, "time a peer may take for one step of the handshake", group=_LIFE, unit="SECONDS", minimum=1
    )
    drain_timeout_s: float = setting(
        30.0, "time that running requests get to finish after SIGTERM", group=_LIFE, unit="SECONDS", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig(CommonConfig):
    """What the gateway and the gpu_worker have to agree on."""

    max_context: int = setting(
        32768,
        "longest prompt and answer together; 0 takes what the model was trained for",
        group=_CAPACITY,
        unit="TOKENS",
        minimum=0,
    )
    parallel: int = setting(
        4,
        "requests that are computed at the same time",
        group=_CAPACITY,
        unit="N",
        minimum=1,
        maximum=64,
        flags=("--slots",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(CapacityConfig):
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to listen on", group=_NETWORK, unit="ADDRESS")
    port: int = setting(
        8080, "port to listen on; 0 picks a free one", group=_NETWORK, unit="PORT", minimum=0, maximum=65535
    )
    model_name: str = setting(
        "",
        "name of the model in the API (default: the file's, without part number and .gguf)",
        group=_NETWORK,
        unit="NAME",
    )
    aliases: tuple[str, ...] = setting(
        (), "further names that requests may use, separated by commas", group=_NETWORK, unit="NAMES"
    )
    max_body_mib: float = setting(
        8.0, "largest request body", group=_NETWORK, unit="MiB", minimum=0.01, maximum=1024
    )
    # Node's clients give up after 300 s of silence and proxies after 60, but a person who waits for a long
    # prompt begins to doubt after a few seconds; a comment is 50 bytes.
    keepalive_interval_s: float = setting(
        3.0,
        "time between comments on a stream that has nothing to say, which tell how far the request is",
        group=_NETWORK,
        unit="SECONDS",
        minimum=0.1,
    )
    queue_size: int = setting(
        64,
        "requests that may wait for a place; more are refused with 429",
        group=_CAPACITY,
        unit="N",
        minimum=0,
    )
    max_new: int = setting(
        0, "longest answer; 0 is what the context leaves", group=_SAMPLING, unit="TOKENS", minimum=0
    )
    temperature: float = setting(
        0.6, "0 always takes the likeliest token", group=_SAMPLING, minimum=0, maximum=5
    )
    top_k: int = setting(
        20, "tokens to choose from; 0 is all", group=_SAMPLING, unit="N", minimum=0, maximum=2**31 - 1
    )
    top_p: float = setting(
        0.95, "smallest set of tokens with this probability", group=_SAMPLING, minimum=0.0001, maximum=1
    )
    min_p: float = setting(
        0.0, "drop tokens less likely than this share of the likeliest", group=_SAMPLING, minimum=0, maximum=1
    )
    seed: int | None = setting(
        None, "makes sampled answers repeatable; none draws a fresh one", group=_SAMPLING, unit="N", minimum=0
    )
    eos_ids: tuple[int, ...] = setting(
        (),
        "token ids that end an answer, separated by commas (default: the model's)",
        group=_SAMPLING,
        unit="IDS",
        minimum=0,
        maximum=2**31 - 1,
    )
    logits_endpoint: bool = setting(
        False, "serve POST /v1/logits, which `strata logits` uses", group=_NETWORK
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWorkerConfig(CapacityConfig):
    """The forward pass."""

    device: str = setting(
        "auto", "where the model runs: auto, cpu, cuda or cuda:N", group=_COMPUTE, unit="DEVICE"
    )
    threads: int = setting(
        0,
        "CPU threads of the gpu_worker; 0 is one per core",
        group=_COMPUTE,
        unit="N",
        minimum=0,
        maximum=1024,
    )
    prefill: int = setting(
        512,
        "tokens of a prompt computed in one step",
        group=_CAPACITY,
        unit="TOKENS",
        minimum=1,
        maximum=65536,
    )
    watchdog_s: float = setting(
        60.0, "a step that waits this long for another process fails", group=_LIFE, unit="SECONDS", minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(CommonConfig):
    """What the cpu_worker and the stager have to agree on: who takes how much memory."""

    experts: str = setting(
        EXPERT_SETTINGS[0],
        "where experts are kept: resident reads and locks all of them in RAM, mapped leaves it to the page "
        "cache; auto is resident where all fit, else keeps those in use in a pool",
        group=_MEMORY,
        choices=EXPERT_SETTINGS,
    )
    ram_budget: float = setting(
        0.0,
        "RAM for experts; 0 takes what is free and not needed otherwise",
        group=_MEMORY,
        unit="GiB",
        minimum=0,
        maximum=1 << 20,
    )
    ple_io: str = setting(
        "auto",
        "where rows of the n-gram table come from: direct reads them past the page cache, mmap through it, "
        "ram loads the whole table; auto measures",
        group=_MEMORY,
        choices=PLE_IO,
    )
    ple_cache_mib: int | None = setting(
        None,
        "memory for rows of the n-gram table (default: a 32nd of all memory, 1024 at most)",
        group=_MEMORY,
        unit="MiB",
        minimum=0,
        maximum=1 << 24,
    )

    @property
    def ple_cache_bytes(self) -> int | None:
        """`ple_cache_mib` in bytes."""
        return None if self.ple_cache_mib is None else self.ple_cache_mib << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWorkerConfig(MemoryConfig):
    """Experts computed in RAM."""

    pool_workers: int = setting(
        0,
        "threads that compute experts; 0 is one per core of the cpu_worker's set",
        group=_COMPUTE,
        unit="N",
        minimum=0,
        maximum=1024,
    )
    cpu_worker_cpus: str = setting(
        "auto",
        "CPUs of the cpu_worker, as 0-7 or 0,2,4; auto takes the first half",
        group=_COMPUTE,
        unit="CPUS",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig(MemoryConfig):
    """How the model's files are read."""

    io_depth: int = setting(
        64, "reads of the model's files in flight at a time", group=_MEMORY, unit="N", minimum=1, maximum=4096
    )
    io_delay_ms: float = setting(
        0.0,
        "delay that is added to every read, to see what a slow disk does",
        group=_MEMORY,
        unit="ms",
        minimum=0,
        maximum=60_000,
    )
    io_fail_every: int = setting(
        0,
        "lets one read in so many fail with an I/O error, to see what a bad disk does; 0 is none",
        group=_MEMORY,
        unit="N",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagerConfig(DiskConfig):
    """Reads from the model files."""

    stager_cpus: str = setting(
        "auto", "CPUs of the stager, as 8-15 or 8,10; auto takes the second half", group=_COMPUTE, unit="CPUS"
    )


PROCESS_CONFIGS: dict[str, type[CommonConfig]] = {
    "gateway": GatewayConfig,
    "gpu_worker": GpuWorkerConfig,
    "cpu_worker": CpuWorkerConfig,
    "stager": StagerConfig,
}


def check_heartbeats(config: CommonConfig) -> None:
    """Raises ConfigError where a healthy process would be taken for a stuck one."""
    shortest = _MIN_HEARTBEATS * config.heartbeat_interval_s
    if config.heartbeat_timeout_s < shortest:
        raise ConfigError(
            f"--heartbeat-timeout-s is {config.heartbeat_timeout_s:g}, less than {_MIN_HEARTBEATS} times "
            f"--heartbeat-interval-s ({config.heartbeat_interval_s:g}); "
            f"raise it to {shortest:g}, or lower the interval"
        )


def check_device(setting: str) -> None:
    """Raises ConfigError for what is not the name of a device; whether there is one is not known here."""
    if not _DEVICE.fullmatch(setting):
        raise ConfigError(f"--device is {setting!r}; it can be auto, cpu, cuda or cuda:N")
