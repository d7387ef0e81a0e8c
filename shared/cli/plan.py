"""Says what will fit, before anything is loaded: slots of experts on the device, RAM, the chunk of a prompt,
and how fast that may be. Takes the settings of `strata serve`, so that its command line can be tried here.

Exits with 1 where something does not fit. Reads the header of the file only.
"""

import argparse
import json
import re

from shared.cli.plan_report import as_json, as_text
from shared.cli.stack_arguments import add_stack_arguments, stack_configs
from shared.config import CpuWorkerConfig, GpuWorkerConfig, check_device
from shared.errors import ConfigError
from shared.gguf.model import GGUFModel
from shared.memory_budget import Memory, read_memory
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.placement.device import slots_in_ram
from shared.placement.rates import (
    ASSUMED_CPU,
    ASSUMED_DEVICE,
    ASSUMED_DISK,
    ASSUMED_LINK,
    Rates,
    assumed_prompt_tokens,
    probe_copy,
    probe_disk,
    probe_reading,
)
from shared.placement.sizes import active_weights
from shared.placement.stack_plan import Planner
from shared.run_directory import Role
from shared.tensor_catalog import check_tensors
from shared.topology import cpu_set, num_threads_on, usable_cpus

_SIZE = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,6})?) ?(?P<unit>[KMGT])(?P<binary>i?)B", re.IGNORECASE)
_GIB = 1 << 30
_RATES = {
    "link_gb_s": "from RAM to the device",
    "cpu_gb_s": "of encoded experts computed in RAM",
    "disk_mb_s": "of large reads from the disk",
    "device_gb_s": "of weights read from the device's memory",
    "prompt_tokens_s": "tokens of a prompt computed, where all weights are at hand",
}


def parse_size(text: str) -> int:
    """Bytes of a size as 24GiB, 24GB or 512MiB. Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 24GiB, 24GB or 512MiB")
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** ("KMGT".index(match["unit"].upper()) + 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata plan`: the machine to plan for, and every setting of `strata serve`."""
    machine = parser.add_argument_group("the machine to plan for")
    machine.add_argument(
        "--vram", type=parse_size, metavar="SIZE", help="free memory of the CUDA device (default: no device)"
    )
    machine.add_argument(
        "--ram", type=parse_size, metavar="SIZE", help="RAM in all (default: what this machine has available)"
    )
    for name, meaning in _RATES.items():
        machine.add_argument(
            f"--{name.replace('_', '-')}", type=_positive, metavar="RATE", help=f"rate {meaning}"
        )
    machine.add_argument(
        "--probe", action="store_true", help="measure what can be measured here within a second, else assumed"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")
    parser.add_argument(
        "--context",
        dest="max_context",
        default=argparse.SUPPRESS,
        metavar="TOKENS",
        help="same as --max-context",
    )
    add_stack_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan; returns 1 where something is short."""
    configs = stack_configs(parsed)
    gpu_worker, cpu_worker = configs[Role.GPU_WORKER], configs[Role.CPU_WORKER]
    assert isinstance(gpu_worker, GpuWorkerConfig)
    assert isinstance(cpu_worker, CpuWorkerConfig)
    check_device(gpu_worker.device)
    device_bytes = _device_bytes(parsed.vram, gpu_worker)
    memory = read_memory() if parsed.ram is None else Memory(parsed.ram, parsed.ram)
    with GGUFModel(gpu_worker.model) as model:
        config = read_model_config(model)
        check_tensors(model, config)
        rates, origins = _rates(parsed, model, config, gpu_worker, cpu_worker, device_bytes)
        plan = Planner(model, gpu_worker, cpu_worker, device_bytes, memory, rates).plan()
        if parsed.json:
            print(json.dumps(as_json(plan, model.name, rates, origins), indent=2))
        else:
            print("\n".join(as_text(plan, model.name, gpu_worker, rates, origins)))
    return 1 if plan.shortages else 0


def _device_bytes(asked: int | None, config: GpuWorkerConfig) -> int | None:
    """What is free on the device; None without one. Raises ConfigError for settings that contradict."""
    budget = int(config.vram_budget * _GIB) or None
    if config.device == "cpu":
        if asked is not None:
            raise ConfigError("--vram is of a CUDA device, but --device is 'cpu'; leave one of them out")
        return None
    if asked is None and budget is None and config.device.startswith("cuda"):
        raise ConfigError(
            f"--device is {config.device!r}, which is not looked at here; say how much memory is free on it "
            "with --vram (nvidia-smi shows it)"
        )
    known = [num_bytes for num_bytes in (asked, budget) if num_bytes is not None]
    return min(known, default=None)


def _rates(
    parsed: argparse.Namespace,
    model: GGUFModel,
    config: Qwen4ExpConfig,
    gpu_worker: GpuWorkerConfig,
    cpu_worker: CpuWorkerConfig,
    device_bytes: int | None,
) -> tuple[Rates, dict[str, str]]:
    """All rates, and of each whether it was given, measured, or assumed."""
    origins: dict[str, str] = {}

    def rate(name: str, unit: float, measured: float | None, assumed: float) -> float:
        given: float | None = getattr(parsed, name)
        if given is not None:
            origins[name] = "given"
            return given * unit
        origins[name] = "assumed" if measured is None else "measured"
        return assumed if measured is None else measured

    has_device = device_bytes is not None
    cpus = cpu_set(cpu_worker.cpu_worker_cpus, flag="--cpu-worker-cpus", second_half=False)
    num_threads = cpu_worker.pool_workers or num_threads_on(cpus)
    probes = parsed.probe
    wants_cpu, wants_disk = parsed.cpu_gb_s is None, parsed.disk_mb_s is None
    cpu = rate("cpu_gb_s", 1e9, probe_reading(num_threads) if probes and wants_cpu else None, ASSUMED_CPU)
    disk = rate("disk_mb_s", 1e6, _disk_rate(model) if probes and wants_disk else None, ASSUMED_DISK)
    link = 0.0
    if has_device:
        link = rate("link_gb_s", 1e9, None, ASSUMED_LINK)
    elif slots_in_ram("cpu", gpu_worker.expert_cache):
        wants_link = parsed.link_gb_s is None
        link = rate("link_gb_s", 1e9, probe_copy() if probes and wants_link else None, ASSUMED_LINK)
    device = rate("device_gb_s", 1e9, None, ASSUMED_DEVICE) if has_device else cpu
    assumed = assumed_prompt_tokens(
        active_weights(model, config), num_threads_on(usable_cpus()), has_device=has_device
    )
    return Rates(link, cpu, disk, device, rate("prompt_tokens_s", 1.0, None, assumed)), origins


def _disk_rate(model: GGUFModel) -> float | None:
    """Measured on the first expert matrix's home, by reads as large as one expert's."""
    info = model.info("blk.0.ffn_gate_exps.weight")
    return probe_disk(model.home(info.name).path, info.num_bytes // info.shape[0])


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
