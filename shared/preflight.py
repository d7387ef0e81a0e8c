"""Everything about a stack that can be known to fail before a process is started: checked within a second."""

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from shared.arena import SHARED_MEMORY, free_shared_memory
from shared.config import (
    DEFAULT_PREFILL,
    CommonConfig,
    CpuWorkerConfig,
    GatewayConfig,
    GpuWorkerConfig,
    StagerConfig,
    check_device,
    check_heartbeats,
    prefill_setting,
)
from shared.draft_model import open_model
from shared.errors import ResourceError
from shared.expert_blobs import BlobLayout, ExpertMode, expert_tensors
from shared.gguf.model import GGUFModel
from shared.locked_memory import may_lock, not_permitted, resident_refusal
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.placement.device import check_deterministic, may_have_slots, runs_on_cuda
from shared.run_directory import Role
from shared.tensor_catalog import check_tensors
from shared.topology import cpu_set
from shared.window import window_tokens
from shared.work_slots import RingTokens, ring_tokens, shared_memory_needed

CUDA_DRIVERS = tuple(
    Path(path)
    for path in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd")
)
"""What there is where torch may find a CUDA device: of NVIDIA's driver, also as a container is given it; of
WSL; of a Jetson; and of AMD's, whose devices torch calls CUDA too."""


def check_stack(configs: Mapping[Role, CommonConfig]) -> None:
    """Raises StartError naming what is missing or wrong: the file, the port, shared memory, a device or CPU
    that cannot be. Whether a device that can be is there, only the gpu_worker can find out."""
    gateway, gpu_worker = configs[Role.GATEWAY], configs[Role.GPU_WORKER]
    cpu_worker, stager = configs[Role.CPU_WORKER], configs[Role.STAGER]
    assert isinstance(gateway, GatewayConfig)
    assert isinstance(gpu_worker, GpuWorkerConfig)
    assert isinstance(cpu_worker, CpuWorkerConfig)
    assert isinstance(stager, StagerConfig)
    check_heartbeats(gateway)
    check_device(gpu_worker.device)
    check_driver(gpu_worker.device)
    has_slots = may_have_slots(gpu_worker.device, gpu_worker.expert_cache)
    if gpu_worker.deterministic:
        check_deterministic(runs_on_cuda(gpu_worker.device), has_slots)
    tokens = _ring_tokens(gpu_worker)
    cpu_set(cpu_worker.cpu_worker_cpus, flag="--cpu-worker-cpus", second_half=False)
    cpu_set(stager.stager_cpus, flag="--stager-cpus", second_half=True)
    with open_model(gateway.model, gateway.draft_model) as model:
        config = read_model_config(model, gpu_worker, with_prediction=gpu_worker.uses_prediction)
        check_tensors(model, config)
        if cpu_worker.experts == ExpertMode.RESIDENT:
            check_lock(model, config)
        place_bytes = BlobLayout(model, config.num_layers).largest_place_bytes if has_slots else 0
    check_port(gateway.host, gateway.port)
    needed = shared_memory_needed(config, tokens, place_bytes)
    if needed > free_shared_memory():
        raise ResourceError(
            f"{SHARED_MEMORY} has {free_shared_memory() / 2**20:.0f} MiB left, this stack needs "
            f"{needed / 2**20:.0f} MiB; enlarge it (docker: shm_size), "
            f"or lower --prefill (now {gpu_worker.prefill})"
        )


def _ring_tokens(config: GpuWorkerConfig) -> RingTokens:
    """For the largest chunk of a prompt that may be chosen. Raises ConfigError."""
    prefill = prefill_setting(config.prefill)
    has_slots = may_have_slots(config.device, config.expert_cache)
    largest = prefill.cap if has_slots else min(prefill.cap, DEFAULT_PREFILL)
    return ring_tokens(
        prefill.tokens or largest,
        config.parallel,
        window_tokens=window_tokens(config.spec),
        has_slots=has_slots,
        stream_min=config.prefill_stream_min,
    )


def check_lock(model: GGUFModel, config: Qwen4ExpConfig) -> None:
    """Raises ResourceError where all experts of a model are to be locked in RAM, and this user may not."""
    num_bytes = sum(model.info(name).num_bytes for name in expert_tensors(config.num_expert_layers))
    if not may_lock(num_bytes):
        raise resident_refusal(num_bytes, not_permitted())


def check_driver(device: str) -> None:
    """Raises ResourceError where a CUDA device is asked for and nothing of a driver is to be seen. To load
    torch, which knows better, takes seconds."""
    if device.startswith("cuda") and not any(path.exists() for path in CUDA_DRIVERS):
        raise ResourceError(
            f"--device is {device!r}, but this machine has no driver for such a device "
            f"(no {', '.join(str(path) for path in CUDA_DRIVERS)}); use --device cpu, or install the driver "
            "(docker: run with --gpus all)"
        )


def check_port(host: str, port: int) -> None:
    """Raises ResourceError where nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server will: a port that is only being wound down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one of a host
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        remedy = "stop what uses the port, or choose another --port" if is_taken else "choose another --host"
        if getattr(error, "errno", None) == errno.EACCES:
            remedy = "choose another --port, from 1024 on"
        raise ResourceError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; {remedy}"
        ) from None
