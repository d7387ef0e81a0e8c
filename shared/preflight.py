"""Everything about a stack that can be known to fail before a process is started: checked within a second."""

import socket

from shared.arena import SHARED_MEMORY, free_shared_memory
from shared.config import GatewayConfig, GpuWorkerConfig
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.tensor_catalog import check_tensors
from shared.work_slots import shared_memory_needed


def check_stack(gateway: GatewayConfig, gpu_worker: GpuWorkerConfig) -> None:
    """Raises StartError naming what is missing or wrong: the file, the port, shared memory."""
    with GGUFModel(gateway.model) as model:
        config = read_model_config(model)
        check_tensors(model, config)
    check_port(gateway.host, gateway.port)
    needed = shared_memory_needed(config, gpu_worker.prefill + gpu_worker.parallel)
    if needed > free_shared_memory():
        raise ResourceError(
            f"{SHARED_MEMORY} has {free_shared_memory() / 2**20:.0f} MiB left, this stack needs "
            f"{needed / 2**20:.0f} MiB; enlarge it (docker: shm_size), "
            f"or lower --prefill (now {gpu_worker.prefill})"
        )


def check_port(host: str, port: int) -> None:
    """Raises ResourceError where nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server will: a port that is only being wound down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "stop what uses the port, or choose another --port or --host"
        ) from None
