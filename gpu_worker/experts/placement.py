"""Experts on the device, for as long as the process lives: the cache, and how its experts are chosen."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.interface import Device
from gpu_worker.device.memory import DeviceMemory
from gpu_worker.experts.expert_cache import ExpertCache
from gpu_worker.experts.gauges import ExpertGauges
from gpu_worker.experts.profile_store import ProfileStore
from gpu_worker.model.interface import ProgressReport
from gpu_worker.state.pages import storage_bytes
from shared.config import GpuWorkerConfig, expert_cache_slots
from shared.errors import ResourceError
from shared.gguf.model import GGUFModel
from shared.kv_format import kv_format
from shared.memory_budget import read_memory
from shared.model_config import Qwen4ExpConfig
from shared.placement import profile
from shared.placement.hotness import Hotness
from shared.placement.link_share import LinkShare
from shared.placement.memory_plan import KV_GROW_FIRST, WorkSpace, device_needs, work_space
from shared.placement.memory_plan import Placement as MemoryPlan
from shared.placement.planner import LayerPlanner, skip_rank_at
from shared.placement.policies import Policy, policy_named
from shared.placement.sizes import expert_sizes, widest_matrix_bytes
from shared.placement.table import ResidencyTable

_log = logging.getLogger(__name__)

LANDING_BUFFERS = 8
"""For blobs that are transferred: as many as the original engine has outside of streaming."""
_PROBE_BYTES = 32 << 20
# What is saved of the profile while running is so old at most.
_PROFILE_WINDOWS = 64
_WORK, _CONTEXT = "work space", "keys and values"


@dataclass(frozen=True, slots=True)
class WayRules:
    """How steps are divided among the ways; settings of the gpu_worker have the same names."""

    stream_min: int
    work_space: WorkSpace
    cpu_share: float | None = None
    skip_rank: int = 0
    borrows: bool = True
    set_aside_bytes: int = 0
    """What was set aside for keys and values. Whatever more they take, slots yield."""


def _has_ram(num_bytes: int) -> bool:
    """Whether so much of RAM can be had without touching what has to stay free."""
    memory = read_memory()
    return memory.available - memory.floor >= num_bytes


class ExpertPlacement:
    """The cache and its policy. Used by the engine's thread, but for `gauges` and `profile`."""

    def __init__(
        self,
        memory: DeviceMemory,
        experts: DeviceExperts,
        cache: ExpertCache,
        hotness: Hotness,
        policy: Policy,
        link_share: LinkShare,
        rules: WayRules,
        plan: MemoryPlan,
        link_bytes_s: float,
    ) -> None:
        """`plan` is what of the device's memory the slots take, `link_bytes_s` what was measured of copies to
        it."""
        self.memory = memory
        self.experts = experts
        self.cache = cache
        self.hotness = hotness
        self.policy = policy
        self.link_share = link_share
        self.rules = rules
        self.plan = plan
        self.link_bytes_s = link_bytes_s
        self._num_windows = 0
        self.profile = hotness.long_counts.copy()
        """How often experts were used as of a while ago; replaced, never written to."""

    @property
    def skip_rank(self) -> int:
        """From which rank on a missed expert is left out now; 0 for none."""
        return skip_rank_at(self.cache.table.coverage, self.rules.skip_rank)

    def claim_context(self, num_bytes: int) -> None:
        """Keys and values will take so much: what they need beyond what was set aside for them is taken from
        the slots. Called between steps."""
        claimed = max(0, num_bytes - self.rules.set_aside_bytes)
        if claimed != self.cache.claims.get(_CONTEXT, 0):
            self.cache.claim(_CONTEXT, claimed)

    @property
    def work_bytes(self) -> int:
        """What streamed chunks have claimed."""
        return self.cache.claims.get(_WORK, 0)

    def claim_work_space(self, num_bytes: int) -> int:
        """A streamed chunk needs so much; returns how much of it there is. Called between steps."""
        lent = self.cache.claim(_WORK, num_bytes)
        return min(num_bytes, max(0, lent - self.cache.claims.get(_CONTEXT, 0)))

    def after_window(self) -> None:
        """Tokens have been decoded: exchanges experts where the policy says so, and follows the rates."""
        if self.link_share.after_window():
            _log.info("%.2f of missed experts are transferred from now on", self.link_share.share)
        self.cache.swap(self.policy.after_window(self.cache.table))
        self._num_windows += 1
        if self._num_windows % _PROFILE_WINDOWS == 0:
            self.profile = self.hotness.profile()
            self.cache.give_back_spare()

    def gauges(self) -> ExpertGauges:
        """How experts are placed now. Called from any thread."""
        table, counts, share = self.cache.table, self.cache.counts, self.link_share
        return ExpertGauges(
            expert_cache_slots=table.num_slots,
            expert_cache_resident=table.num_resident,
            expert_cache_lent=table.num_lent,
            expert_cache_coverage=table.coverage,
            expert_swaps_total=counts.num_swaps,
            expert_swapped_bytes_total=counts.swapped_bytes,
            expert_cache_loaded_bytes_total=counts.loaded_bytes,
            expert_cache_failures_total=counts.num_failures,
            pcie_frac=share.share,
            pcie_frac_updates_total=share.num_updates,
            tail_skip_active=int(self.skip_rank > 0),
        )

    def close(self) -> None:
        """Gives the device's memory back. Nothing computes any more."""
        self.profile = self.hotness.profile()
        self.memory.close()


def open_placement(
    settings: GpuWorkerConfig,
    model: GGUFModel,
    config: Qwen4ExpConfig,
    device: Device,
    store: ProfileStore,
    report: ProgressReport,
) -> ExpertPlacement | None:
    """Makes room for experts on the device; None where there are to be none.

    Raises ConfigError for a profile that was asked for and cannot be used, ResourceError where the device, or
    RAM that plays its part, has not the memory for the slots that were asked for.
    """
    asked = expert_cache_slots(settings.expert_cache)
    is_played = device.torch_device.type == "cpu"
    if not wants_experts(settings, device.torch_device):
        return None
    report("making room for experts on the device", 1.0)
    sizes = expert_sizes(model, config)
    blob_bytes = np.array(sizes.slot_bytes, np.int64)
    landing_bytes = LANDING_BUFFERS * int(blob_bytes.max())
    hotness = Hotness(config.num_layers, config.num_experts, config.num_experts_used)
    if (learned := store.load()) is not None:
        hotness.start_from(learned)
    order = profile.fill_order(hotness.long_counts)
    experts = device.experts(config)
    budget_bytes = None
    if not is_played:
        work_bytes = experts.work_bytes(settings.prefill_stream_min + settings.parallel)
        budget_bytes = _room(settings, model, config, device, work_bytes) - landing_bytes
    if budget_bytes is not None and budget_bytes < int(blob_bytes.max()):
        message = (
            f"{max(0, budget_bytes) / 2**20:.0f} MiB of {device.torch_device} memory are left for experts, "
            f"and one takes {int(blob_bytes.max()) / 2**20:.1f} MiB; lower --max-context or "
            "--vram-reserve-mib, or take --expert-cache 0"
        )
        if asked is not None:
            raise ResourceError(message)
        _log.warning("no experts on the device: %s", message)
        return None
    layers, chosen = profile.assign_slots(order, blob_bytes, budget_bytes=budget_bytes, num_slots=asked)
    if asked is not None and len(layers) < min(asked, sizes.num_pairs):
        raise ResourceError(
            f"--expert-cache is {asked}, but {device.torch_device} has room for {len(layers)} slots; lower "
            "it, or take --expert-cache auto"
        )
    if asked is not None and asked > sizes.num_pairs:
        _log.warning(
            "--expert-cache is %d, but the model has %d experts: so many slots are taken",
            asked,
            sizes.num_pairs,
        )
    slot_bytes = int(blob_bytes[layers].sum())
    if is_played and not _has_ram(slot_bytes + landing_bytes):
        ram = read_memory()
        raise ResourceError(
            f"--expert-cache is {asked}: its slots take {(slot_bytes + landing_bytes) / 2**20:.0f} MiB of "
            f"RAM, which has {max(0, ram.available - ram.floor) / 2**20:.0f} MiB for them; lower it, or take "
            "--expert-cache 0"
        )
    memory = device.memory(slot_bytes + landing_bytes)
    try:
        probed = memory.link_probe(max(int(blob_bytes.max()), min(_PROBE_BYTES, slot_bytes)))
        share = LinkShare(settings.pcie_frac, probed)
        table = ResidencyTable(layers, config.num_layers, config.num_experts)
        # Compiled now, not when the first worker is there.
        LayerPlanner(table, hotness, hotness.num_used, 1)
        cache = ExpertCache(memory, experts, table, layers, chosen, settings.watchdog_s, _has_ram)
        rules = WayRules(
            stream_min=settings.prefill_stream_min,
            work_space=work_space(config, sizes, settings.prefill_stream_min, is_in_ram=is_played),
            cpu_share=settings.prefill_cpu_share,
            skip_rank=settings.route_tail_skip,
            borrows=settings.prefill_borrow,
            set_aside_bytes=storage_bytes(
                config, _first_context(settings, config), kv_format(settings.kv_type)
            ),
        )
        policy = policy_named(
            settings.expert_policy,
            hotness,
            every=settings.adapt_every,
            decay=settings.adapt_decay,
            most=settings.adapt_swaps,
        )
        per_layer = np.bincount(layers, minlength=config.num_layers)
        plan = MemoryPlan(sizes, tuple(per_layer.tolist()), rules.work_space)
        placement = ExpertPlacement(memory, experts, cache, hotness, policy, share, rules, plan, probed * 1e9)
    except BaseException:
        memory.close()
        raise
    _log.info(
        "%d of %d experts on the device, %.2f GiB, %s; copies to it run at %.1f GB/s; %.2f of missed experts "
        "are transferred",
        table.num_slots,
        sizes.num_pairs,
        slot_bytes / 2**30,
        f"chosen by {store.path}" if learned is not None else "chosen without a profile",
        probed,
        share.share,
    )
    return placement


def wants_experts(settings: GpuWorkerConfig, torch_device: torch.device) -> bool:
    """Whether experts are to be on the device."""
    asked = expert_cache_slots(settings.expert_cache)
    return torch_device.type != "cpu" if asked is None else asked > 0


def _first_context(settings: GpuWorkerConfig, config: Qwen4ExpConfig) -> int:
    """The tokens that memory for keys and values is set aside for at the start, of all requests together."""
    longest = config.longest_sequence(settings.max_context)
    return min(longest, KV_GROW_FIRST) if settings.kv_grow else longest


def _room(
    settings: GpuWorkerConfig, model: GGUFModel, config: Qwen4ExpConfig, device: Device, work_bytes: int
) -> int:
    """Bytes of the device for slots, now that dense weights are on it; `work_bytes` is what computing experts
    takes beside."""
    unlimited = device.memory(1 << 62)
    free_bytes = unlimited.free_bytes()
    unlimited.close()
    if settings.vram_budget:
        # Dense weights are a part of it.
        taken_bytes = torch.cuda.memory_allocated(device.torch_device)
        free_bytes = min(free_bytes, int(settings.vram_budget * 2**30) - taken_bytes)
    needs = device_needs(
        config,
        dense=0,
        widest_matrix=widest_matrix_bytes(model, config),
        max_context=_first_context(settings, config),
        parallel=settings.parallel,
        kv_grow=settings.kv_grow,
        kv_format=kv_format(settings.kv_type),
        reserve=settings.vram_reserve_mib << 20,
    )
    # Products of dense weights and experts are not computed at the same time.
    return free_bytes - needs.total - max(0, work_bytes - needs.buffers)
