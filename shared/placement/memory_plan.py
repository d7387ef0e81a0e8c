"""What fits: slots of experts in the device's memory, the other experts in RAM, and work space of prompts.

Slots take what the device has left: free memory less dense weights, keys and values, states of sequences,
buffers, and the reserve. The *complement*, all experts that have no slot, is to be in RAM.

A chunk of a prompt needs *work space* on the device. It is borrowed from the slots while the prompt is read,
and the experts of lent slots are in RAM meanwhile:

    complement = (experts - slots + lent slots) x blob
    lent slots = (work space - what is free anyway) / blob, rounded up

Keys and values are planned once for the longest context: requests that run at the same time share that
memory. With `--kv-grow` it starts at 16384 tokens and grows by 8192.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shared.kv_format import KvFormat
from shared.memory_budget import Memory, Needs
from shared.model_config import Qwen4ExpConfig
from shared.placement.sizes import ExpertSizes, context_bytes, state_bytes

_MIB, _GIB = 1 << 20, 1 << 30

# What the original engine was seen to lend: 0.15 GiB and 0.4365 MiB for each token of the chunk, and a ring
# of 96 blobs where a chunk streams. Within 0.01 GiB of seven logged sizes, for chunks of 256 to 32768 tokens.
# The first two are of 4 streams of 2560, and scale with their width.
_WORK_FIXED_BYTES = 0.15 * _GIB
_WORK_TOKEN_BYTES = 0.4365 * _MIB
_WORK_STREAM_WIDTH = 4 * 2560
_RING_SLOTS = 96

# A product on a torch device widens so much of its matrix at a time, at most.
_WIDENED_BYTES = 256 * _MIB
# Buffers of windows of decoding, as the original sets them aside, at that stream width.
_WINDOW_BYTES = 96 * _MIB

KV_GROW_FIRST, KV_GROW_STEP = 16384, 8192
"""Tokens of context that `--kv-grow` has memory for at first, and that it takes more for at a time, as the
original engine has them."""

_HEADROOM_BYTES, _HEADROOM_PART = 4 * _GIB, 8


@dataclass(frozen=True, slots=True)
class WorkSpace:
    """What a chunk of a prompt takes on the device beyond what is set aside, in bytes: some for any chunk,
    some for each token, and a ring of blobs for chunks from `stream_min` tokens on."""

    fixed_bytes: float
    token_bytes: float
    ring_bytes: int
    stream_min: int

    def num_bytes(self, chunk: int) -> int:
        """For a chunk of so many tokens."""
        ring = self.ring_bytes if chunk >= self.stream_min else 0
        return round(self.fixed_bytes + self.token_bytes * chunk) + ring


def work_space(
    config: Qwen4ExpConfig, sizes: ExpertSizes, stream_min: int, *, is_in_ram: bool = False
) -> WorkSpace:
    """That of a model; `stream_min` is `--prefill-stream-min`. Where RAM plays the memory of a device,
    `is_in_ram`, activations have RAM without borrowing, and only the ring takes slots."""
    scale = 0.0 if is_in_ram else config.stream_width / _WORK_STREAM_WIDTH
    ring_slots = min(_RING_SLOTS, sizes.num_experts)
    return WorkSpace(
        _WORK_FIXED_BYTES * scale, _WORK_TOKEN_BYTES * scale, ring_slots * max(sizes.slot_bytes), stream_min
    )


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What of the device's memory is not for experts, in bytes."""

    dense: int
    context: int
    states: int
    buffers: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.dense + self.context + self.states + self.buffers + self.reserve


def device_needs(
    config: Qwen4ExpConfig,
    *,
    dense: int,
    widest_matrix: int,
    max_context: int,
    parallel: int,
    kv_grow: bool,
    kv_format: KvFormat,
    reserve: int,
) -> DeviceNeeds:
    """Of a stack with these settings; `dense`, `widest_matrix` and `reserve` in bytes."""
    tokens = min(max_context, KV_GROW_FIRST) if kv_grow else max_context
    windows = round(_WINDOW_BYTES * config.stream_width / _WORK_STREAM_WIDTH)
    return DeviceNeeds(
        dense=dense,
        context=context_bytes(config, tokens, kv_format),
        states=parallel * state_bytes(config),
        buffers=min(widest_matrix, _WIDENED_BYTES) + windows,
        reserve=reserve,
    )


@dataclass(frozen=True)
class Placement:
    """How many slots each layer has, and what that leaves to RAM. `spare_bytes` of the device are neither
    slots nor needed otherwise: a chunk takes them before it borrows."""

    sizes: ExpertSizes
    slots_per_layer: tuple[int, ...]
    work_space: WorkSpace
    spare_bytes: int = 0

    @cached_property
    def num_slots(self) -> int:
        """Of all layers."""
        return sum(self.slots_per_layer)

    @cached_property
    def cache_bytes(self) -> int:
        """What all slots take on the device."""
        counted = zip(self.slots_per_layer, self.sizes.slot_bytes, strict=True)
        return sum(count * num_bytes for count, num_bytes in counted)

    @property
    def coverage(self) -> float:
        """The share of experts that have a slot."""
        return self.num_slots / self.sizes.num_pairs

    def lent_slots(self, chunk: int) -> int:
        """Slots that a chunk of so many tokens borrows; may be more than there are."""
        borrowed = max(0, self.work_space.num_bytes(chunk) - self.spare_bytes)
        return -int(-borrowed // self._lent_slot_bytes)

    def lent_bytes(self, chunk: int) -> int:
        """What these slots hold otherwise."""
        return round(self.lent_slots(chunk) * self._lent_slot_bytes)

    def complement_bytes(self, chunk: int = 0) -> int:
        """Experts that are to be in RAM while a chunk of so many tokens is computed, 0 while none is."""
        lent = min(self.lent_bytes(chunk), self.cache_bytes) if chunk else 0
        return self.sizes.num_bytes - self.cache_bytes + lent

    @property
    def _lent_slot_bytes(self) -> float:
        # Slots of any layer are lent: those of layers that have many, the likelier.
        return self.cache_bytes / self.num_slots if self.num_slots else self.sizes.mean_slot_bytes


def slots_in(sizes: ExpertSizes, num_bytes: int, order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Slots of each layer that fit in so many bytes. `order` has the layers of experts, most wanted first,
    which get slots up to the first that does not fit; without it layers take turns."""
    counts = [0] * sizes.num_layers
    left = max(0, num_bytes)
    if order is None:
        rounds = min(left // sizes.round_bytes, sizes.num_experts)
        counts = [rounds] * sizes.num_layers
        left -= rounds * sizes.round_bytes
        order = range(sizes.num_layers) if rounds < sizes.num_experts else ()
    for layer in order:
        if sizes.slot_bytes[layer] > left:
            break
        counts[layer] += 1
        left -= sizes.slot_bytes[layer]
    return tuple(counts)


def slots_of(sizes: ExpertSizes, num_slots: int) -> tuple[int, ...]:
    """So many slots shared out among the layers, one more for the first ones where that leaves some; not more
    than there are experts."""
    rounds, more = divmod(min(num_slots, sizes.num_pairs), sizes.num_layers)
    return tuple(rounds + (layer < more) for layer in range(sizes.num_layers))


def placed_bytes(sizes: ExpertSizes, num_slots: int) -> int:
    """What so many slots take, shared out among the layers."""
    counted = zip(slots_of(sizes, num_slots), sizes.slot_bytes, strict=True)
    return sum(count * num_bytes for count, num_bytes in counted)


def headroom_bytes(memory: Memory) -> int:
    """RAM that a plan leaves free: 4 GiB, as the original engine does, or an eighth of smaller machines;
    never less than the floor that loading keeps."""
    return max(memory.floor, min(_HEADROOM_BYTES, memory.total // _HEADROOM_PART))


def expert_ram_bytes(memory: Memory, needs: Needs, ram_budget_gib: float = 0.0) -> int:
    """RAM that the trunk's experts can have: what neither the stack needs otherwise nor is headroom; or
    `--ram-budget`, where that is not 0, as far as the floor allows. Either way less those of the prediction
    block, which are always computed in RAM."""
    room = memory.available - headroom_bytes(memory) - needs.total
    if ram_budget_gib:
        room = min(memory.available - memory.floor, int(ram_budget_gib * _GIB))
    return max(0, room - needs.prediction)
