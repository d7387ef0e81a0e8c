"""What the gpu_worker does before it serves: kernels, weights, the model, room for experts, the size of
chunks."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpu_worker.device.choose import formats_of, open_device
from gpu_worker.device.interface import Device
from gpu_worker.experts.placement import ExpertPlacement, open_placement, wants_experts
from gpu_worker.experts.profile_store import ProfileStore
from gpu_worker.model.qwen4exp import Qwen4Exp
from shared import quants
from shared.config import GpuWorkerConfig, prefill_setting
from shared.errors import ConfigError
from shared.expert_blobs import expert_tensors
from shared.kv_format import kv_format
from shared.locked_memory import lock_refusal, may_lock, not_permitted
from shared.memory_budget import held_by_stack, read_memory
from shared.model_config import Qwen4ExpConfig
from shared.placement.chunk_choice import resolve_prefill
from shared.placement.device import check_deterministic
from shared.placement.memory_plan import headroom_bytes
from shared.placement.profile import model_identity
from shared.placement.rates import assumed_rates
from shared.placement.sizes import active_weights
from shared.placement.trace import TraceHeader, TraceWriter
from shared.process import SUPERVISED_VARIABLE, ProcessContext
from shared.tensor_catalog import TensorClass, expected_tensors
from shared.topology import num_threads_on, usable_cpus

_log = logging.getLogger(__name__)

# These are computed or read by other processes.
_NOT_OURS = (TensorClass.EXPERTS_GATE_UP, TensorClass.EXPERTS_DOWN, TensorClass.NGRAM_TABLE)


@dataclass(slots=True)
class Loaded:
    """All that serving needs. `placement` is None where no experts are on the device, `recorder` where routes
    are not written down; `kernels` names those of the CPU."""

    kernels: str
    device: Device
    model: Qwen4Exp
    placement: ExpertPlacement | None
    prefill_tokens: int
    """Tokens of a chunk of a prompt."""
    recorder: TraceWriter | None
    profile_store: ProfileStore

    def save_profile(self) -> None:
        """Keeps what was learned of experts for the next run. Called from any thread."""
        if self.placement is not None:
            self.profile_store.save(self.placement.profile)

    def close(self) -> None:
        """Lets everything go. The engine has ended."""
        if self.placement is not None:
            self.placement.close()
            self.save_profile()
        if self.recorder is not None:
            self.recorder.close()
        self.device.close()


def load(
    context: ProcessContext[GpuWorkerConfig], config: Qwen4ExpConfig, torch_device: torch.device
) -> Loaded:
    """Loads a model; may take long. Raises StartError for what was asked for and cannot be."""
    settings, file = context.config, context.model
    if settings.deterministic:
        check_deterministic(torch_device.type != "cpu", wants_experts(settings, torch_device))
    kernels = quants.choose_kernels(
        settings.cpu_kernels, settings.cpu_activations, deterministic=settings.deterministic
    )
    tensors = [
        expected
        for expected in expected_tensors(config, file)
        if expected.tensor_class not in _NOT_OURS and expected.name in file
    ]
    multiplied, decoded, gathered = formats_of(torch_device, file, tensors)
    if torch_device.type == "cpu" and wants_experts(settings, torch_device):
        multiplied |= {
            quants.block_format(file.info(name).type.type_id) for name in expert_tensors(config.num_layers)
        }
    quants.warm(
        multiplied,
        decoded,
        gathered,
        lambda done, total, name: context.report(f"compiling {name}", 0.5 * done / total),
    )
    recorder = _open_recorder(context, config)
    if torch_device.type == "cpu":
        _keep_dense_weights(context, [expected.name for expected in tensors])
    device = open_device(torch_device, file, settings.threads)
    try:
        model = Qwen4Exp(
            device,
            config,
            has_own_head="output.weight" in file,
            report=lambda activity, progress: context.report(activity, 0.5 + 0.5 * progress),
            kv_format=kv_format(settings.kv_type),
        )
        store = ProfileStore(settings.expert_profile, file, config)
        placement = open_placement(settings, file, config, device, store, context.report)
    except BaseException:
        device.close()
        raise
    tokens = _prefill_tokens(context, config, placement)
    return Loaded(kernels, device, model, placement, tokens, recorder, store)


def _open_recorder(context: ProcessContext[GpuWorkerConfig], config: Qwen4ExpConfig) -> TraceWriter | None:
    path = context.config.record_routing
    if path is None:
        return None
    header = TraceHeader.of(model_identity(context.model, config), config.num_experts_used)
    try:
        if not path.parent.is_dir():
            raise ConfigError(
                f"--record-routing is {path}, but there is no folder {path.parent}; make it, or name another "
                "file"
            )
        return TraceWriter(path, header)
    except OSError as error:
        raise ConfigError(
            f"--record-routing: {path} cannot be written: {error.strerror}; name another file"
        ) from None


def _prefill_tokens(
    context: ProcessContext[GpuWorkerConfig], config: Qwen4ExpConfig, placement: ExpertPlacement | None
) -> int:
    settings = context.config
    setting = prefill_setting(settings.prefill)
    memory = read_memory().with_locked(held_by_stack(is_supervised=SUPERVISED_VARIABLE in os.environ))
    has_device = placement is not None and placement.memory.torch_device.type != "cpu"
    rates = assumed_rates(
        active_weights(context.model, config), num_threads_on(usable_cpus()), has_device=has_device
    )
    tokens = resolve_prefill(
        setting,
        placement.plan if placement is not None else None,
        max(0, memory.available - headroom_bytes(memory)),
        replace(rates, link=placement.link_bytes_s) if placement is not None else rates,
        config.longest_sequence(settings.max_context),
    )
    if placement is not None:
        _log.info("prompts are read in chunks of %d tokens", tokens)
    return tokens


def _keep_dense_weights(context: ProcessContext[GpuWorkerConfig], names: Sequence[str]) -> None:
    """Locks what every token needs in RAM, where that is allowed, so that nothing that is read beside it
    makes the page cache give it up. The embedding is read by rows, unless it is the output matrix too."""
    model = context.model
    kept = [name for name in names if name != "token_embd.weight" or "output.weight" not in model]
    num_bytes, memory = sum(model.info(name).num_bytes for name in kept), read_memory()
    if num_bytes > memory.available - memory.floor:
        _log.warning(
            "dense weights are %.2f GiB, which do not fit into the memory that is available, %.2f GiB; "
            "they are left to the page cache",
            num_bytes / 2**30,
            memory.available / 2**30,
        )
        return
    done = 0
    try:
        if not may_lock(num_bytes):
            raise not_permitted()
        for name in kept:
            info, home = model.info(name), model.home(name)
            context.report("reading dense weights", 0.5 + 0.2 * done / num_bytes)
            home.will_need(*home.pages(info))
            home.lock(*home.pages(info))
            done += info.num_bytes
    except OSError as error:
        _log.info("dense weights are left to the page cache: %s", lock_refusal(num_bytes, error))
    else:
        _log.info("%.2f GiB of dense weights are locked in RAM", num_bytes / 2**30)
