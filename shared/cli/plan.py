"""Says what will fit, before anything is loaded: slots of experts on the device, RAM, the chunk of a prompt,
and how fast that may be. Takes the settings of `strata serve`, so that its command line can be tried here.

Exits with 0 where the stack starts, be it with experts read from the disk, and with 1 where it does not.
Reads the header of the file only. The same rates are assumed as by `strata simulate`.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace

from shared.cli.plan_report import as_json, as_text
from shared.cli.stack_arguments import add_stack_arguments, stack_configs
from shared.config import CpuWorkerConfig, GpuWorkerConfig, check_device
from shared.draft_model import open_model
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
    assumed_rates,
    probe_copy,
    probe_disk,
    probe_reading,
)
from shared.placement.sizes import active_weights
from shared.placement.stack_plan import Planner
from shared.run_directory import Role
from shared.tensor_catalog import TensorClass, check_tensors, expected_tensors
from shared.topology import cpu_set, num_threads_on, usable_cpus

_SIZE = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,6})?) ?(?P<unit>[KMGT])(?P<binary>i?)B", re.IGNORECASE)
_GIB = 1 << 30
# Of each rate its flag, what its value is in, and that in words.
_FLAGS = {
    "link": ("link_gb_s", 1e9, "GB/s"),
    "cpu": ("cpu_gb_s", 1e9, "GB/s"),
    "disk": ("disk_mb_s", 1e6, "MB/s"),
    "device": ("device_gb_s", 1e9, "GB/s"),
    "prompt_tokens": ("prompt_tokens_s", 1.0, "TOKENS/s"),
}
_MEANINGS = {
    "link": f"copies from RAM to the device (assumed: {ASSUMED_LINK / 1e9:g})",
    "cpu": f"encoded experts computed in RAM (assumed: {ASSUMED_CPU / 1e9:g})",
    "disk": f"large reads from the disk (assumed: {ASSUMED_DISK / 1e6:g})",
    "device": f"weights read from the device's memory (assumed: {ASSUMED_DEVICE / 1e9:g})",
    "prompt_tokens": "tokens of a prompt computed, where all weights are at hand (assumed: by the model, and "
    "by the cores of this machine, or for a device by what an RTX 3090 does)",
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
    for rate, (flag, _, unit) in _FLAGS.items():
        machine.add_argument(
            f"--{flag.replace('_', '-')}", type=_positive, metavar=unit, help=_MEANINGS[rate]
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
    """Prints the plan; returns 1 where the stack would not start."""
    configs = stack_configs(parsed)
    gpu_worker, cpu_worker = configs[Role.GPU_WORKER], configs[Role.CPU_WORKER]
    assert isinstance(gpu_worker, GpuWorkerConfig)
    assert isinstance(cpu_worker, CpuWorkerConfig)
    check_device(gpu_worker.device)
    device_bytes = _device_bytes(parsed.vram, gpu_worker)
    memory = read_memory() if parsed.ram is None else Memory(parsed.ram, parsed.ram)
    with open_model(gpu_worker.model, gpu_worker.draft_model) as model:
        config = read_model_config(model, gpu_worker, with_prediction=gpu_worker.uses_prediction)
        check_tensors(model, config)
        rates, origins = _rates(parsed, model, config, gpu_worker, cpu_worker, device_bytes)
        plan = Planner(model, gpu_worker, cpu_worker, device_bytes, memory, rates).plan()
        if parsed.json:
            print(json.dumps(as_json(plan, model.name, rates, origins), indent=2))
        else:
            is_ram_given = parsed.ram is not None
            report = as_text(plan, model.name, gpu_worker, rates, origins, is_ram_given=is_ram_given)
            print("\n".join(report))
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
    """All rates, and of those that matter whether each is given, measured or assumed."""
    has_device = device_bytes is not None
    has_link = has_device or slots_in_ram("cpu", gpu_worker.expert_cache) > 0
    assumed = assumed_rates(
        active_weights(model, config), num_threads_on(usable_cpus()), has_device=has_device
    )
    matters = {"link": has_link, "cpu": True, "disk": True, "device": has_device, "prompt_tokens": True}
    given = {
        rate: getattr(parsed, flag) * unit
        for rate, (flag, unit, _) in _FLAGS.items()
        if getattr(parsed, flag) is not None
    }
    measured: dict[str, float] = {}
    if parsed.probe:
        cpus = cpu_set(cpu_worker.cpu_worker_cpus, flag="--cpu-worker-cpus", second_half=False)
        probes: dict[str, Callable[[], float | None]] = {
            "cpu": lambda: probe_reading(cpu_worker.pool_workers or num_threads_on(cpus)),
            "disk": lambda: _disk_rate(model, config),
        }
        if has_link and not has_device:
            probes["link"] = probe_copy
        found = {rate: probe() for rate, probe in probes.items() if rate not in given}
        measured = {rate: value for rate, value in found.items() if value is not None}
    rates = replace(assumed, **measured, **given)
    if not has_link:
        rates = replace(rates, link=0.0)
    if not has_device:
        # What would be read from the device's memory is read from RAM.
        rates = replace(rates, device=rates.cpu)
    origins = {
        rate: "given" if rate in given else "measured" if rate in measured else "assumed"
        for rate, is_told in matters.items()
        if is_told
    }
    return rates, origins


def _disk_rate(model: GGUFModel, config: Qwen4ExpConfig) -> float | None:
    """Measured in the file of the experts, by reads as large as one expert's largest matrix."""
    infos = [
        model.info(tensor.name)
        for tensor in expected_tensors(config, model)
        if tensor.tensor_class in (TensorClass.EXPERTS_GATE_UP, TensorClass.EXPERTS_DOWN)
    ]
    largest = max(infos, key=lambda info: info.num_bytes)
    return probe_disk(model.home(largest.name).path, largest.num_bytes // config.num_experts)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
