"""Where the experts of a stack are to be, by the memory there is and what the rest of the stack will take."""

import logging
import os

from cpu_worker.residency import decide, experts_of
from cpu_worker.stager_link import StagerListener
from shared.arena import free_shared_memory, sweep_segments
from shared.config import DEFAULT_PREFILL_CAP, CpuWorkerConfig, expert_cache_slots, prefill_setting
from shared.expert_blobs import BlobLayout
from shared.kv_format import kv_format
from shared.memory_budget import (
    conversation_cache_bytes,
    held_by_stack,
    needs_of,
    read_memory,
    row_cache_bytes,
)
from shared.model_config import Qwen4ExpConfig
from shared.placement.device import may_have_slots, runs_on_cuda, slots_in_ram
from shared.placement.memory_plan import placed_bytes, work_space
from shared.placement.sizes import ExpertSizes, expert_sizes
from shared.process import SUPERVISED_VARIABLE, ProcessContext
from shared.tensor_catalog import NGRAM_TABLE
from shared.work_slots import RingTokens, shared_memory_needed

_log = logging.getLogger(__name__)

# What the gpu_worker's rings may take of shared memory: steps of more tokens than by default, twice, since
# those of a predecessor may not be gone yet.
_RING_TOKENS, _RING_STEPS = 1024, 2


def keep_experts(context: ProcessContext[CpuWorkerConfig], model_config: Qwen4ExpConfig) -> StagerListener:
    """Decides where experts are to be, and gets the memory for it. Raises ResourceError for what was asked
    for and cannot be had."""
    config = context.config
    # Of a predecessor that was killed: a pool is most of the memory there is.
    sweep_segments()
    layout = BlobLayout(context.model, model_config.num_expert_layers)
    sizes = expert_sizes(context.model, model_config)
    held = held_by_stack(is_supervised=SUPERVISED_VARIABLE in os.environ)
    memory = read_memory().with_locked(held)
    table_bytes = context.model.info(NGRAM_TABLE).num_bytes if NGRAM_TABLE in context.model else 0
    row_bytes = row_cache_bytes(memory, table_bytes, config.ple_io, config.ple_cache_bytes)
    residency = decide(
        config.experts,
        config.ram_budget,
        experts_of(model_config, layout),
        memory,
        needs_of(
            context.model,
            model_config,
            held,
            row_bytes,
            kv_format=kv_format(config.kv_type),
            is_on_cuda=runs_on_cuda(config.device),
            slot_bytes=placed_bytes(sizes, slots_in_ram(config.device, config.expert_cache)),
            lent_bytes=_lent_bytes(config, model_config, sizes),
            parallel=config.parallel,
            conversation_bytes=conversation_cache_bytes(memory, config.conversation_cache_mib),
        ),
        max(0, free_shared_memory() - _RING_STEPS * _ring_bytes(config, model_config, layout)),
    )
    keeping = StagerListener(context.identity.incarnation, residency, layout, model_config.num_experts)
    context.report("reserving memory for experts", 1.0)
    keeping.make_room()
    _log.info("experts: %s", ", ".join(f"{name}={value}" for name, value in keeping.capabilities.items()))
    return keeping


def _lent_bytes(config: CpuWorkerConfig, model_config: Qwen4ExpConfig, sizes: ExpertSizes) -> int:
    """What a prompt borrows of the device's slots at most: how many tokens `--prefill auto` will choose is
    not known here."""
    setting, stream_min = prefill_setting(config.prefill), config.prefill_stream_min
    chunk = setting.tokens or setting.cap
    may_stream = may_have_slots(config.device, config.expert_cache) and chunk >= stream_min
    if not (may_stream and config.prefill_borrow):
        return 0
    slots = expert_cache_slots(config.expert_cache)
    is_in_ram = not runs_on_cuda(config.device)
    borrowed = work_space(model_config, sizes, stream_min, is_in_ram=is_in_ram).num_bytes(chunk)
    return borrowed if slots is None else min(borrowed, placed_bytes(sizes, slots))


def _ring_bytes(config: CpuWorkerConfig, model_config: Qwen4ExpConfig, layout: BlobLayout) -> int:
    may_stream = may_have_slots(config.device, config.expert_cache)
    ngram_tokens = DEFAULT_PREFILL_CAP if may_stream else _RING_TOKENS
    place_bytes = layout.largest_place_bytes if may_stream else 0
    return shared_memory_needed(model_config, RingTokens(_RING_TOKENS, ngram_tokens), place_bytes)
