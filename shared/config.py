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
from shared.kv_format import KV_TYPES
from shared.settings import setting

_MODEL = "model and files"
_MEMORY = "memory and disk"
_PLACEMENT = "experts on the device"
_NETWORK = "network"
_CAPACITY = "capacity"
_SCALING = "contexts beyond the trained length"
_SAMPLING = "sampling defaults, for requests that do not say"
_SPECULATION = "speculation"
_COMPUTE = "devices and threads"
_LIFE = "processes and time limits"

# Those of `shared.quants`, named here too because importing it costs half a second; a test compares them.
CPU_KERNELS = ("auto", "avx512", "avxvnni", "avx2", "portable")
CPU_ACTIVATIONS = ("int16", "int8")

PLE_IO = ("auto", "direct", "mmap", "ram")
EXPERT_SETTINGS = ("auto", "resident", "mapped")
SWAP_POLICIES = ("adaptive", "lru", "static")
ROPE_SCALINGS = ("auto", "none", "linear", "yarn")

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
"""What this machine alone can reach."""

DEFAULT_MAX_CONTEXT = 32768

DEFAULT_PREFILL = 512
"""Tokens of a chunk without experts on the device."""
DEFAULT_PREFILL_CAP = 8192
"""Of `--prefill auto`."""
_MOST_PREFILL = 65536
_MOST_DIGITS = 9
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,2})?")
# A single sign of life that comes late shall not be taken for none.
_MIN_HEARTBEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What all four processes are told alike."""

    model: Path = setting(
        DEMO_MODEL_PATH, "GGUF file to serve; any one part of a split set", group=_MODEL, unit="PATH"
    )
    draft_model: Path | None = setting(
        None,
        "GGUF file with the model's prediction block, where that comes by itself; its embedding and output "
        "matrix are not used",
        group=_MODEL,
        unit="PATH",
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
    deterministic: bool = setting(
        False,
        "on the CPU, the same bits for a request whatever is computed beside it, by products that are taken "
        "token by token; prompts are read more slowly",
        group=_COMPUTE,
    )
    # From here to the next comment: the cpu_worker has to know too what of RAM plays the memory of a device,
    # and what is kept there for slots that are lent.
    device: str = setting(
        "auto", "where the model runs: auto, cpu, cuda or cuda:N", group=_COMPUTE, unit="DEVICE"
    )
    expert_cache: str = setting(
        "auto",
        "experts kept in the device's memory, in slots of one expert each; auto takes what is free on a CUDA "
        "device, and none on the CPU, where memory of the device is RAM like any other",
        group=_PLACEMENT,
        unit="N|auto",
    )
    prefill: str = setting(
        "auto",
        "tokens of a prompt computed in one step: a number, or auto[:CAP], which takes what the memory of "
        "the device makes worth while, up to 8192 or the cap; 512 without experts on the device",
        group=_CAPACITY,
        unit="N|auto[:CAP]",
    )
    prefill_stream_min: int = setting(
        1024,
        "chunks of a prompt from this size on stream all experts of a layer through the device",
        group=_PLACEMENT,
        unit="TOKENS",
        minimum=1,
    )
    prefill_borrow: bool = setting(
        True,
        "lend slots of experts to large chunks as work space, until the prompt is read",
        group=_PLACEMENT,
    )
    parallel: int = setting(
        4,
        "requests that are computed at the same time; slots of experts are --expert-cache",
        group=_CAPACITY,
        unit="N",
        minimum=1,
        maximum=64,
        flags=("--slots",),
    )
    conversation_cache_mib: int | None = setting(
        None,
        "memory for conversations that are kept, so that the next turn reads only what is new; 0 keeps none "
        "(default: a sixteenth of all memory, 2048 at most)",
        group=_MEMORY,
        unit="MiB",
        minimum=0,
        maximum=1 << 24,
    )
    kv_type: str = setting(
        "auto",
        "how keys and values are kept: f32 as they are computed, f16, int8 with a scale for each 64, k8v4 "
        "with values in 4 bits; all but f32 change outputs; auto is f32",
        group=_MEMORY,
        choices=KV_TYPES,
    )
    # Who keeps experts has to know too whether the prediction block is used.
    spec: int = setting(
        4,
        "tokens drafted at most, by the prediction block where the model has one, and verified in one step, "
        "so that answers stay what they are; 0 drafts none, the block is then neither loaded nor kept in RAM",
        group=_SPECULATION,
        unit="TOKENS",
        minimum=0,
        maximum=7,
    )
    # Of all processes.
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

    @property
    def uses_prediction(self) -> bool:
        """Whether a prediction block is used, where the model has one."""
        return self.spec > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig(CommonConfig):
    """What the gateway and the gpu_worker have to agree on."""

    max_context: int = setting(
        DEFAULT_MAX_CONTEXT,
        "longest prompt and answer together, up to what the model was trained for or --rope-scaling makes of "
        "it; 0 takes all of that",
        group=_CAPACITY,
        unit="TOKENS",
        minimum=0,
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
    typical_p: float = setting(
        1.0,
        "smallest set with this probability of tokens about as surprising as is to be expected; 1 is all",
        group=_SAMPLING,
        minimum=0.0001,
        maximum=1,
    )
    presence_penalty: float = setting(
        0.0, "taken from the logits of tokens that the answer has", group=_SAMPLING, minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0, "likewise, once for each time", group=_SAMPLING, minimum=-2, maximum=2
    )
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits, multiplies negative ones, of tokens that prompt or answer have; 1 is none",
        group=_SAMPLING,
        minimum=0.01,
        maximum=10,
    )
    repeat_last_n: int = setting(
        -1,
        "tokens that the penalties look back at; -1 is all, 0 none",
        group=_SAMPLING,
        unit="N",
        minimum=-1,
        maximum=2**31 - 1,
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

    threads: int = setting(
        0,
        "CPU threads of the gpu_worker; 0 is one per core",
        group=_COMPUTE,
        unit="N",
        minimum=0,
        maximum=1024,
    )
    expert_policy: str = setting(
        SWAP_POLICIES[0],
        "how experts on the device are exchanged: adaptive by how often they are used, lru takes each that "
        "was missed for the one longest unused, static never",
        group=_PLACEMENT,
        choices=SWAP_POLICIES,
    )
    expert_profile: Path | None = setting(
        None,
        "file that how often experts are used is loaded from, and saved to, while running and at the end "
        "(default: one for the model, in the folder profiles of the cache directory); a file that does not "
        "exist is created, a folder is not",
        group=_PLACEMENT,
        unit="FILE",
    )
    pcie_frac: float | None = setting(
        None,
        "share of missed experts that are transferred to the device and computed there, the others are "
        "computed in RAM (default: from measured rates)",
        group=_PLACEMENT,
        minimum=0,
        maximum=1,
    )
    route_tail_skip: int = setting(
        0,
        "leave out an expert without a slot that every token of the step ranks behind its first N; saves "
        "work and changes outputs, answers count it; 0 leaves out none, the original engine's value is 7",
        group=_PLACEMENT,
        unit="N",
        minimum=0,
        maximum=64,
    )
    adapt_every: int = setting(
        4,
        "windows (steps of decoding) between two rounds of exchanges",
        group=_PLACEMENT,
        unit="N",
        minimum=1,
    )
    adapt_swaps: int = setting(
        96, "exchanges in a round at most", group=_PLACEMENT, unit="N", minimum=0, maximum=65536
    )
    adapt_decay: float = setting(
        0.7, "what uses of an expert count after a round, of before", group=_PLACEMENT, minimum=0, maximum=1
    )
    vram_budget: float = setting(
        0.0, "memory of the device to use; 0 is what is free", group=_PLACEMENT, unit="GiB", minimum=0
    )
    vram_reserve_mib: int = setting(
        700, "memory of the device that stays free", group=_PLACEMENT, unit="MiB", minimum=0
    )
    prefill_cpu_share: float | None = setting(
        None,
        "share of missed experts that smaller chunks have computed in RAM (default: what --pcie-frac leaves)",
        group=_PLACEMENT,
        minimum=0,
        maximum=1,
    )
    kv_grow: bool = setting(
        False,
        "take memory of the device for keys and values as the context grows, slots of experts yield it; off "
        "sets the memory of the longest context aside at the start",
        group=_PLACEMENT,
    )
    record_routing: Path | None = setting(
        None,
        "file that is written with which experts each token chose, for `strata simulate`",
        group=_PLACEMENT,
        unit="FILE",
    )
    rope_scaling: str = setting(
        ROPE_SCALINGS[0],
        "how positions are scaled for longer contexts; auto is what the file says; yarn or linear change "
        "outputs of short prompts too, so use them for contexts that need them only",
        group=_SCALING,
        choices=ROPE_SCALINGS,
    )
    rope_scale: float | None = setting(
        None,
        "how many times the trained length the context may have (default: what the file says)",
        group=_SCALING,
        unit="F",
        minimum=1,
        maximum=1024,
    )
    yarn_orig_ctx: int = setting(
        0,
        "context that the model was trained for; 0 is what the file says",
        group=_SCALING,
        unit="TOKENS",
        minimum=0,
        maximum=1 << 24,
    )
    yarn_attn_factor: float | None = setting(
        None,
        "multiplies YaRN's factor of cosines and sines, 0.1 ln(--rope-scale) + 1 (default: 1, or what the "
        "file says)",
        group=_SCALING,
        minimum=0.01,
        maximum=100,
    )
    yarn_beta_fast: float | None = setting(
        None,
        "dimensions that turn more often than this within the trained length are not stretched (default: "
        "32, or what the file says)",
        group=_SCALING,
        unit="TURNS",
        minimum=0.01,
        maximum=1 << 24,
    )
    yarn_beta_slow: float | None = setting(
        None,
        "dimensions that turn less often than this within the trained length are stretched in full (default: "
        "1, or what the file says)",
        group=_SCALING,
        unit="TURNS",
        minimum=0.01,
        maximum=1 << 24,
    )
    prefill_share: float = setting(
        0.5,
        "share of the time that prompts are read in while other answers are written; 1 reads them as fast as "
        "it goes",
        group=_CAPACITY,
        minimum=0.05,
        maximum=1,
    )
    prefill_gap_ms: float = setting(
        1000.0,
        "longest wait that a piece of a prompt is to cause between two tokens of other answers, as far as "
        "pieces of 64 tokens allow",
        group=_CAPACITY,
        unit="ms",
        minimum=1,
        maximum=600_000,
    )
    conversation_cache_dir: Path | None = setting(
        None,
        "folder for conversations that have to leave memory, or are there when Strata stops; they come back "
        "from it; it holds what was said (default: none)",
        group=_MEMORY,
        unit="DIR",
    )
    conversation_disk_mib: int = setting(
        8192,
        "most that --conversation-cache-dir takes of the disk for a model",
        group=_MEMORY,
        unit="MiB",
        minimum=1,
        maximum=1 << 24,
    )
    spec_min_p: float = setting(
        0.5,
        "a token that the prediction block drafts with less probability ends the draft; 0 always drafts as "
        "many as --spec says",
        group=_SPECULATION,
        minimum=0,
        maximum=1,
    )
    suffix_draft: bool = setting(
        True,
        "draft also what has followed before in prompt and answer, where the latest tokens repeat there",
        group=_SPECULATION,
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


def expert_cache_slots(setting: str) -> int | None:
    """The slots that `--expert-cache` asks for, None for auto. Raises ConfigError for anything else."""
    if setting == "auto":
        return None
    if not setting.isascii() or not setting.isdigit() or len(setting) > _MOST_DIGITS:
        raise ConfigError(f"--expert-cache is {setting!r}; it can be auto, or a number of slots, 0 for none")
    return int(setting)


@dataclass(frozen=True, slots=True)
class PrefillSetting:
    """What `--prefill` says: so many `tokens`, or, where that is None, what pays up to `cap`."""

    tokens: int | None
    cap: int


def prefill_setting(setting: str) -> PrefillSetting:
    """Reads `--prefill`. Raises ConfigError for what it cannot be."""
    word, _, cap = setting.partition(":")
    number = cap if word == "auto" else setting
    if setting == "auto":
        return PrefillSetting(None, DEFAULT_PREFILL_CAP)
    if not (number.isascii() and number.isdigit() and 1 <= len(number) <= _MOST_DIGITS):
        raise ConfigError(f"--prefill is {setting!r}; it can be a number of tokens, auto, or auto:CAP")
    if not 1 <= int(number) <= _MOST_PREFILL:
        raise ConfigError(f"--prefill is {setting!r}; it can be 1 to {_MOST_PREFILL} tokens")
    tokens = int(number)
    return PrefillSetting(None, tokens) if word == "auto" else PrefillSetting(tokens, tokens)


def check_device(setting: str) -> None:
    """Raises ConfigError for what is not the name of a device; whether there is one is not known here."""
    if not _DEVICE.fullmatch(setting):
        raise ConfigError(f"--device is {setting!r}; it can be auto, cpu, cuda or cuda:N")
