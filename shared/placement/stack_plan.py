"""The plan of a whole stack: what goes where on the device and in RAM, what is short, what frees how much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shared.config import CpuWorkerConfig, GpuWorkerConfig, expert_cache_slots, prefill_setting
from shared.gguf.model import GGUFModel
from shared.kv_format import kv_format
from shared.memory_budget import Held, Memory, Needs, conversation_cache_bytes, needs_of, row_cache_bytes
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.placement.chunk_choice import (
    Candidate,
    prompt_seconds,
    resolve_prefill,
    sizes_to_weigh,
    weigh,
)
from shared.placement.expectations import Shares, expected_shares, token_seconds
from shared.placement.memory_plan import (
    DeviceNeeds,
    Placement,
    WorkSpace,
    device_needs,
    expert_ram_bytes,
    headroom_bytes,
    placed_bytes,
    slots_in,
    slots_of,
    work_space,
)
from shared.placement.rates import Rates
from shared.placement.savings import Saving, smaller_chunk, smaller_settings, smallest_settings
from shared.placement.shortages import (
    DEVICE_MEMORY,
    RAM,
    Shortage,
    chunk_shortages,
    device_shortages,
    ram_shortages,
    ways_out_of_reading,
)
from shared.placement.sizes import (
    ExpertSizes,
    dense_device_bytes,
    dense_file_bytes,
    expert_sizes,
    widest_matrix_bytes,
)
from shared.tensor_catalog import NGRAM_TABLE

_MIB = 1 << 20
_SHORT_PROMPT = 4096


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a model the plan depends on, read from its header."""

    config: Qwen4ExpConfig
    experts: ExpertSizes
    dense_file: int
    dense_device: int
    widest_matrix: int
    table: int


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Everything planned, in bytes. `device` and `device_bytes` are None where the model runs on the CPU;
    `seconds` maps lengths of prompts to the time until the first token. With `shortages` the stack does not
    start; what RAM has no room for is read from the disk."""

    facts: ModelFacts
    max_context: int
    device_bytes: int | None
    device: DeviceNeeds | None
    placement: Placement
    memory: Memory
    headroom: int
    ram: Needs
    for_experts: int
    chunk: int
    candidates: Sequence[Candidate]
    shares: Shares
    token_s: float
    seconds: dict[int, float]
    shortages: Sequence[Shortage]
    savings: Sequence[Saving]
    keeping: str
    """What gets experts into RAM that it has no room for."""

    @property
    def complement(self) -> int:
        """Experts that are to be in RAM while a prompt is read."""
        return self.placement.complement_bytes(self.chunk if self.placement.num_slots else 0)

    @property
    def unread(self) -> int:
        """Those of them that RAM has no room for, so that they are read from the disk."""
        return max(0, self.complement - self.for_experts)

    @property
    def helpful_savings(self) -> list[Saving]:
        """Those that help here: of memory that some of the model has no room in."""
        is_full = bool(self.shortages) or self.placement.num_slots < self.facts.experts.num_pairs
        wanted = {DEVICE_MEMORY: is_full, RAM: self.unread > 0}
        wanted |= {shortage.memory: True for shortage in self.shortages}
        return [saving for saving in self.savings if wanted[saving.memory]]


def read_facts(model: GGUFModel, settings: GpuWorkerConfig) -> ModelFacts:
    """Those of a model. Raises UnsupportedModelError, ConfigError."""
    config = read_model_config(model, settings, with_prediction=settings.uses_prediction)
    return ModelFacts(
        config,
        expert_sizes(model, config),
        dense_file_bytes(model, config),
        dense_device_bytes(model, config),
        widest_matrix_bytes(model, config),
        model.info(NGRAM_TABLE).num_bytes if NGRAM_TABLE in model else 0,
    )


class Planner:
    """Plans a stack: a model, the settings of its processes, memory, and rates. `device_bytes` is what is
    free on the device, None where there is none; slots that are asked for are then in RAM."""

    def __init__(
        self,
        model: GGUFModel,
        gpu_worker: GpuWorkerConfig,
        cpu_worker: CpuWorkerConfig,
        device_bytes: int | None,
        memory: Memory,
        rates: Rates,
    ) -> None:
        self._model = model
        self._facts = read_facts(model, gpu_worker)
        self._gpu, self._cpu = gpu_worker, cpu_worker
        self._device_bytes, self._memory, self._rates = device_bytes, memory, rates
        self._work_space = work_space(
            self._facts.config,
            self._facts.experts,
            gpu_worker.prefill_stream_min,
            is_in_ram=device_bytes is None,
        )
        self._asked = expert_cache_slots(gpu_worker.expert_cache)
        self._headroom = headroom_bytes(memory)
        self._max_context = self._facts.config.longest_sequence(gpu_worker.max_context)

    def plan(self) -> StackPlan:
        """The plan."""
        device = self._device_needs(self._gpu)
        placement = self._placement(device)
        lendable = placement
        ram = self._ram_needs(self._cpu, placement)
        for_experts = expert_ram_bytes(self._memory, ram, self._cpu.ram_budget)
        setting = prefill_setting(self._gpu.prefill)
        chunk = resolve_prefill(setting, placement, for_experts, self._rates, self._max_context)
        candidates: list[Candidate] = []
        if placement.num_slots:
            tokens = sorted({*sizes_to_weigh(setting.cap, self._max_context), chunk})
            candidates = weigh(tokens, placement, for_experts, self._rates, self._max_context)
            if not self._gpu.prefill_borrow:
                placement = self._without_lent(placement, chunk)
        shares = expected_shares(placement, for_experts)
        dense = self._facts.dense_file if device is None else self._facts.dense_device
        token_s = token_seconds(placement, shares, dense, self._rates)
        seconds = {
            tokens: prompt_seconds(tokens, chunk, placement, for_experts, self._rates) + token_s
            for tokens in sorted({min(_SHORT_PROMPT, self._max_context), self._max_context})
        }
        return StackPlan(
            self._facts,
            self._max_context,
            self._device_bytes,
            device,
            placement,
            self._memory,
            self._headroom,
            ram,
            for_experts,
            chunk,
            candidates,
            shares,
            token_s,
            seconds,
            list(self._shortages(device, lendable, ram, chunk, candidates)),
            list(self._savings(device, placement, ram, chunk)),
            ways_out_of_reading(self._cpu, ram, chunk, candidates),
        )

    def _device_needs(self, settings: GpuWorkerConfig) -> DeviceNeeds | None:
        if self._device_bytes is None:
            return None
        return device_needs(
            self._facts.config,
            dense=self._facts.dense_device,
            widest_matrix=self._facts.widest_matrix,
            max_context=min(self._max_context, settings.max_context or self._max_context),
            parallel=settings.parallel,
            kv_grow=settings.kv_grow,
            kv_format=kv_format(settings.kv_type),
            reserve=settings.vram_reserve_mib * _MIB,
        )

    def _placement(self, device: DeviceNeeds | None) -> Placement:
        sizes = self._facts.experts
        if self._asked is not None:
            slots = slots_of(sizes, self._asked)
        else:
            slots = slots_in(sizes, self._room(device))
        placement = Placement(sizes, slots, self._work_space)
        spare = max(0, self._room(device) - placement.cache_bytes)
        return replace(placement, spare_bytes=spare)

    def _room(self, device: DeviceNeeds | None) -> int:
        """What the device has for slots; less than nothing where the rest does not fit."""
        return 0 if device is None or self._device_bytes is None else self._device_bytes - device.total

    def _without_lent(self, placement: Placement, chunk: int) -> Placement:
        """Fewer slots, for a work space that is set aside rather than borrowed."""
        left = slots_in(placement.sizes, placement.cache_bytes - placement.lent_bytes(chunk))
        nothing = WorkSpace(0.0, 0.0, 0, self._gpu.prefill_stream_min)
        return replace(placement, slots_per_layer=left, work_space=nothing)

    def _ram_needs(self, settings: CpuWorkerConfig, placement: Placement) -> Needs:
        in_ram = placed_bytes(placement.sizes, placement.num_slots) if self._device_bytes is None else 0
        rows = row_cache_bytes(self._memory, self._facts.table, settings.ple_io, settings.ple_cache_bytes)
        return needs_of(
            self._model,
            self._facts.config,
            Held(private=0, locked=0),
            rows,
            kv_format=kv_format(self._gpu.kv_type),
            is_on_cuda=self._device_bytes is not None,
            slot_bytes=in_ram,
            parallel=self._gpu.parallel,
            conversation_bytes=conversation_cache_bytes(self._memory, self._gpu.conversation_cache_mib),
        )

    def _shortages(
        self,
        device: DeviceNeeds | None,
        placement: Placement,
        ram: Needs,
        chunk: int,
        candidates: Sequence[Candidate],
    ) -> Iterator[Shortage]:
        if device is not None and self._device_bytes is not None:
            least = self._device_needs(smallest_settings(self._gpu, self._max_context))
            assert least is not None
            yield from device_shortages(self._gpu, self._device_bytes, device, least, placement)
            yield from chunk_shortages(self._gpu, placement, chunk, candidates)
        yield from ram_shortages(self._cpu, self._memory, ram, placement)

    def _savings(
        self, device: DeviceNeeds | None, placement: Placement, ram: Needs, chunk: int
    ) -> Iterator[Saving]:
        if device is not None:
            for change in smaller_settings(self._gpu, self._max_context):
                needs = self._device_needs(change.changed)
                assert needs is not None
                more = max(0, sum(self._slots_with(needs)) - sum(self._slots_with(device)))
                if needs.total < device.total:
                    freed = device.total - needs.total
                    yield Saving(change.setting, DEVICE_MEMORY, freed, more, change.price)
        # What `--prefill auto` has taken is the best for what RAM there is.
        if placement.num_slots and prefill_setting(self._gpu.prefill).tokens is not None:
            tokens = smaller_chunk(chunk)
            freed = placement.complement_bytes(chunk) - placement.complement_bytes(tokens)
            if freed > 0:
                yield Saving(f"--prefill {tokens}", RAM, freed, 0, "prompts in more chunks")
        if self._facts.table:
            half = (ram.rows // 2) >> 20
            changed_ram = replace(self._cpu, ple_io="direct", ple_cache_mib=half)
            freed = ram.rows - self._ram_needs(changed_ram, placement).rows
            if half and freed > 0:
                loads = "--ple-io direct " if ram.rows >= self._facts.table else ""
                price = "more n-gram rows read from the disk"
                yield Saving(f"{loads}--ple-cache-mib {half}", RAM, freed, 0, price)

    def _slots_with(self, device: DeviceNeeds) -> tuple[int, ...]:
        return slots_in(self._facts.experts, self._room(device))
