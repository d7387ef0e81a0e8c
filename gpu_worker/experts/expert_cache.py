"""Experts in the memory of the device: their slots, and the copies that fill them.

Slots lie side by side in *segments*, the hottest experts first. A segment can be lent: as work space to a
large chunk of a prompt, or to keys and values. It is given back to the device's allocator then, the coldest
one first; its experts are not on the device meanwhile, and are loaded again when it comes back.

A blob takes two steps to its slot: the stager brings it into a staging place, and from there it is copied.
Neither is waited for: `pump` takes every load as far as it goes now, and is called again and again by the
thread that computes. Who is in which slot, and whether it may be written, is for the table
(`shared.placement.table`), which names an expert only once its copy has finished.

Where blobs that are lent away might have to come from the disk again, they are kept in RAM meanwhile
(`keeps_lent`), and are transferred and loaded from there.
"""

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.memory import Bytes, DeviceMemory, Event
from gpu_worker.experts.staging import Staging
from shared.errors import StrataError
from shared.placement.swaps import Swap
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable, SlotState

_log = logging.getLogger(__name__)

_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 64 << 10, 64 << 20
# The cache is lent in steps of about a thirty-second of it.
_NUM_SEGMENTS = 32
_NOT_ASKED = -1
RETRY_S = 10.0
"""After so long a slot that could not be filled is tried again; a choice of ours."""


@dataclass(slots=True, eq=False)
class _Segment:
    """Slots `first` to `stop`. `memory` is None while it is lent."""

    first: int
    stop: int
    num_bytes: int
    memory: Tensor | None = None
    # What has to have happened before its memory may be written: it may have been someone's work space.
    usable: Event | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """An expert on its way into a slot."""

    slot: int
    layer: int
    expert: int
    is_swap: bool
    place: int = _NOT_ASKED
    copied: Event | None = None
    is_dropped: bool = False


@dataclass(slots=True)
class CacheCounts:
    """What has happened since the start."""

    loaded_bytes: int = 0
    num_swaps: int = 0
    swapped_bytes: int = 0
    num_failures: int = 0


class ExpertCache:
    """The slots of one model. Used by one thread."""

    def __init__(
        self,
        memory: DeviceMemory,
        experts: DeviceExperts,
        table: ResidencyTable,
        slot_layers: NDArray[np.int32],
        slot_experts: NDArray[np.int32],
        timeout_s: float,
        has_ram: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        """`slot_layers` and `slot_experts` [slots] say who is to be in the slots, hottest first. A copy may
        take `timeout_s`; `has_ram` says whether RAM has so many bytes for what is kept there. Raises
        ResourceError where the device's memory does not suffice."""
        self._memory = memory
        self._experts = experts
        self._timeout_s = timeout_s
        self._has_ram = has_ram
        self.table = table
        self.layers: list[int] = slot_layers.tolist()
        # Who belongs into each slot: who is there, or is to be there again.
        self._owners: list[int] = slot_experts.tolist()
        self._offsets: list[int] = []
        self._segments: list[_Segment] = []
        self._segment_of: list[_Segment] = []
        self._cut_segments()
        self._staging: Staging | None = None
        self._queue: deque[_Load] = deque()
        self._asked: deque[_Load] = deque()
        self._copying: deque[_Load] = deque()
        # Slots and experts of all loads that are queued or under way.
        self._busy_slots: set[int] = set()
        self._coming: set[tuple[int, int]] = set()
        # Slots that could not be filled, and when that is tried again.
        self._unfilled: set[int] = set()
        self._retry_at = 0.0
        self._unfinished: deque[tuple[int, Event]] = deque()
        self._ticket = 0
        self._kept: dict[tuple[int, int], Bytes] = {}
        self.keeps_lent = False
        """Whether what is lent away is kept in RAM; to be set where it would have to be read again."""
        self._could_keep = True
        self.is_held = False
        """Whether nobody may leave a slot now: a prompt is streamed by who was on the device before."""
        self.claims: dict[str, int] = {}
        """Who needs how many bytes of the device's memory beside the slots."""
        self.counts = CacheCounts()
        self._queue_loads(range(len(self.layers)))

    # The stager.

    def attach(self, staging: Staging) -> None:
        """Blobs come this way from now on."""
        self._staging = staging

    def detach(self) -> None:
        """The stager is lost: nothing of its memory is used once this returns; what was under way is queued
        again."""
        for load in self._copying:
            if load.copied is not None:
                self._end_copy(load)
        again = [load for load in (*self._copying, *self._asked) if not load.is_dropped]
        self._copying.clear()
        self._asked.clear()
        self._staging = None
        for load in reversed(again):
            if self._is_settled(load):
                self._forget(load)
                continue
            load.place, load.copied = _NOT_ASKED, None
            self._queue.appendleft(load)

    # Steps.

    @property
    def is_busy(self) -> bool:
        """Whether `pump` has something to do."""
        return bool(self._queue or self._asked or self._copying) and self._staging is not None

    def begin_step(self) -> int:
        """The ticket that reads of the step's work on the device are marked with."""
        self._ticket += 1
        return self._ticket

    def end_step(self) -> None:
        """All work of the step has been issued."""
        self._unfinished.append((self._ticket, self._memory.record()))

    def buffer(self, slot: int) -> Tensor:
        """The memory of a slot, u8 [slot bytes of its layer]. The slot is not lent."""
        memory = self._segment_of[slot].memory
        assert memory is not None, "a slot that is lent has no memory"
        offset = self._offsets[slot]
        return memory[offset : offset + self._experts.slot_bytes(self.layers[slot])]

    def kept(self, layer: int, expert: int) -> Bytes | None:
        """The content of a slot that is lent, uint8 [slot bytes], if its expert is kept in RAM meanwhile."""
        return self._kept.get((layer, expert))

    @property
    def num_kept(self) -> int:
        """Experts that are kept in RAM."""
        return len(self._kept)

    # Loads.

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Experts are to change places. Those whose slot or expert is on the way already are left out."""
        for swap in swaps:
            is_lent = self._segment_of[swap.slot].memory is None
            if is_lent or swap.slot in self._busy_slots or (swap.layer, swap.in_expert) in self._coming:
                continue
            self._owners[swap.slot] = swap.in_expert
            self._add_load(swap.slot, is_swap=swap.out_expert >= 0)

    def pump(self) -> None:
        """Takes every load as far as it goes. Never waits."""
        while self._unfinished and self._unfinished[0][1].is_done():
            self.table.finished(self._unfinished.popleft()[0])
        staging = self._staging
        if self._unfilled and time.monotonic() >= self._retry_at:
            self._retry()
        if staging is None or not (self._queue or self._asked or self._copying):
            return
        while self._copying:
            load = self._copying[0]
            if load.copied is not None and not _has_ended(load.copied):
                break
            self._copying.popleft()
            self._end_copy(load)
            self._forget(load)
            if not self._is_settled(load):
                reason = f"expert {load.expert} of layer {load.layer} could not be copied to the device"
                self._try_later(load, reason)
        for _ in range(len(self._asked)):
            load = self._asked.popleft()
            if not self._take_further(load, staging):
                self._asked.append(load)
        self._ask(staging)

    def load_kept(self) -> None:
        """Loads the experts whose slots have come back from being lent, as far as they were kept in RAM, and
        waits until they are there: whoever missed one would have it read from the disk."""
        coming = [load for load in self._queue if self.kept(load.layer, load.expert) is not None]
        if not coming:
            return
        chosen = set(map(id, coming))
        self._queue = deque([*coming, *(load for load in self._queue if id(load) not in chosen)])
        waiting = {load.slot for load in coming}
        while waiting & self._busy_slots:
            self.pump()
            if self._copying and (copied := self._copying[-1].copied) is not None:
                _let_end(copied, self._timeout_s)

    def _take_further(self, load: _Load, staging: Staging) -> bool:
        """Begins the copy of a blob that was asked for, if it can begin; whether the load is done with that
        part of its way."""
        state = staging.state(load.place)
        if state == 0:
            return False
        if state < 0 or load.is_dropped:
            staging.free(load.place)
            if load.is_dropped:
                return True
            if state == -errno.ECANCELED:
                # No bad disk, but a stager that ends: its successor is asked.
                load.place = _NOT_ASKED
                self._queue.appendleft(load)
                return True
            self.counts.num_failures += 1
            self._forget(load)
            self._try_later(load, str(staging.failure(load.layer, load.expert, -state)))
            return True
        if not self._make_way(load):
            return False
        parts = staging.parts(load.place, load.layer, load.expert)
        self._copy(load, parts, self._experts.part_offsets(load.layer))
        return True

    def _make_way(self, load: _Load) -> bool:
        """Empties the slot; whether it may be written."""
        table = self.table
        if table.expert_of[load.slot] >= 0:
            if self.is_held:
                return False
            table.evict(load.slot)
        return table.is_writable(load.slot)

    def _copy(self, load: _Load, parts: Sequence[Bytes], offsets: Sequence[int]) -> None:
        usable, buffer = self._segment_of[load.slot].usable, self.buffer(load.slot)
        self.table.begin_load(load.slot, load.expert)
        load.copied = self._memory.copy_in(parts, buffer, offsets, usable)
        self._copying.append(load)

    def _end_copy(self, load: _Load) -> None:
        """Publishes a copy; waits for its end where it has none yet."""
        copied, load.copied = load.copied, None
        if copied is None:
            return
        try:
            copied.wait(self._timeout_s)
        except (StrataError, RuntimeError):
            self.counts.num_failures += 1
            self.table.abandon(load.slot)
        else:
            if load.is_dropped:
                self.table.abandon(load.slot)
            else:
                self.table.publish(load.slot)
                num_bytes = self._experts.slot_bytes(load.layer)
                self.counts.loaded_bytes += num_bytes
                if load.is_swap:
                    self.counts.num_swaps += 1
                    self.counts.swapped_bytes += num_bytes
        if load.place != _NOT_ASKED and self._staging is not None:
            self._staging.free(load.place)
        self._kept.pop((load.layer, load.expert), None)

    def _ask(self, staging: Staging) -> None:
        """Has more blobs staged, of half of the places: the other half is for what a step waits for."""
        while self._queue:
            load = self._queue[0]
            if (blob := self.kept(load.layer, load.expert)) is not None:
                if not self._make_way(load):
                    return
                self._queue.popleft()
                self._copy(load, [blob], [0])
                continue
            num_held = len(self._asked) + sum(load.place != _NOT_ASKED for load in self._copying)
            if num_held >= max(1, staging.num_places // 2):
                return
            places = staging.request(load.layer, [load.expert])
            if not places:
                return
            load.place = places[0]
            self._asked.append(self._queue.popleft())

    def _queue_loads(self, slots: Iterable[int]) -> None:
        for slot in slots:
            pair = self.layers[slot], self._owners[slot]
            # While its slot was lent, an expert may have come into another one. The policy fills this one.
            if pair[1] != NO_EXPERT and pair not in self._coming and self.table.slot_of[pair] == NO_SLOT:
                self._add_load(slot)

    def _add_load(self, slot: int, *, is_swap: bool = False) -> None:
        load = _Load(slot, self.layers[slot], self._owners[slot], is_swap)
        self._busy_slots.add(slot)
        self._coming.add((load.layer, load.expert))
        self._queue.append(load)

    def _forget(self, load: _Load) -> None:
        if not load.is_dropped:
            self._busy_slots.discard(load.slot)
            self._coming.discard((load.layer, load.expert))

    def _try_later(self, load: _Load, reason: str) -> None:
        """A load has failed. A slot that is empty shall not stay so; one that is not keeps who is there."""
        now, there = time.monotonic(), int(self.table.expert_of[load.slot])
        if now >= self._retry_at:
            # The first one: with a bad disk there are many.
            _log.warning("%s; such slots are tried again after %g s", reason, RETRY_S)
            self._retry_at = now + RETRY_S
        if there == NO_EXPERT:
            self._unfilled.add(load.slot)
        else:
            self._owners[load.slot] = there

    def _retry(self) -> None:
        slots, self._unfilled = sorted(self._unfilled), set()
        empty = (slot for slot in slots if self.table.state(slot) is SlotState.EMPTY)
        self._queue_loads(slot for slot in empty if slot not in self._busy_slots)

    def _is_settled(self, load: _Load) -> bool:
        return bool(self.table.slot_of[load.layer, load.expert] == load.slot)

    # Lending.

    @property
    def lent_bytes(self) -> int:
        """Memory that was given back to the device's allocator."""
        return sum(segment.num_bytes for segment in self._segments if segment.memory is None)

    @property
    def num_bytes(self) -> int:
        """Of all slots, lent ones too."""
        return sum(segment.num_bytes for segment in self._segments)

    def claim(self, name: str, num_bytes: int) -> int:
        """Someone needs so much of the device's memory from now on, 0 for no more; returns what is lent to
        all, which may be less than what they claim. Called between steps.

        Segments are lent or given back to meet all claims; giving back stops early where the memory cannot
        be had, and goes on with a later claim, or `give_back_spare`.
        """
        self.claims[name] = num_bytes
        wanted = sum(self.claims.values())
        for segment in reversed(self._segments):
            if self.lent_bytes >= wanted:
                break
            if segment.memory is not None:
                self._lend(segment)
        self.give_back_spare()
        return self.lent_bytes

    def give_back_spare(self) -> None:
        """Has slots that are lent to nobody any more filled again, as far as their memory can be had."""
        wanted = sum(self.claims.values())
        for segment in self._segments:
            is_spare = segment.memory is None and self.lent_bytes - segment.num_bytes >= wanted
            if is_spare and not self._give_back(segment):
                break

    def _lend(self, segment: _Segment) -> None:
        slots = range(segment.first, segment.stop)
        self._drop_loads(slots)
        while self._unfinished:
            ticket, event = self._unfinished.popleft()
            event.wait(self._timeout_s)
            self.table.finished(ticket)
        if self.keeps_lent and self._can_keep(segment):
            self._keep(slots)
        for slot in slots:
            self.table.lend(slot)
        memory, segment.memory, segment.usable = segment.memory, None, None
        if memory is not None:
            self._memory.release(memory)

    def _can_keep(self, segment: _Segment) -> bool:
        can_keep = self._has_ram(segment.num_bytes)
        if self._could_keep and not can_keep:
            _log.warning("RAM has no room for experts whose slots are lent: they are read again afterwards")
        self._could_keep = can_keep
        return can_keep

    def _keep(self, slots: Iterable[int]) -> None:
        """Copies the experts of some slots to RAM."""
        events = []
        for slot in slots:
            expert, layer = int(self.table.expert_of[slot]), self.layers[slot]
            if expert >= 0:
                blob = np.empty(self._experts.slot_bytes(layer), np.uint8)
                events.append(self._memory.copy_out(self.buffer(slot), [blob]))
                self._kept[layer, expert] = blob
        for event in events:
            event.wait(self._timeout_s)

    def _give_back(self, segment: _Segment) -> bool:
        try:
            segment.memory = self._memory.allocate(segment.num_bytes)
        except StrataError:
            return False
        segment.usable = self._memory.record()
        slots = range(segment.first, segment.stop)
        for slot in slots:
            self.table.give_back(slot)
        self._queue_loads(slots)
        return True

    def _drop_loads(self, slots: Iterable[int]) -> None:
        """Ends all loads into some slots."""
        dropped = set(slots) & self._busy_slots
        if not dropped:
            return
        kept = deque(load for load in self._copying if load.slot not in dropped)
        for load in self._copying:
            if load.slot in dropped:
                self._end_copy(load)
                self._forget(load)
        self._copying = kept
        for load in [*self._asked, *self._queue]:
            if load.slot in dropped and not load.is_dropped:
                self._forget(load)
                load.is_dropped = True
        self._queue = deque(load for load in self._queue if not load.is_dropped)

    def _cut_segments(self) -> None:
        """Packs the slots into segments, and gets their memory."""
        sizes = [self._experts.slot_bytes(layer) for layer in self.layers]
        target = min(max(sum(sizes) // _NUM_SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        first = offset = 0
        for slot, size in enumerate(sizes):
            self._offsets.append(offset)
            offset += size
            if offset >= target or slot + 1 == len(sizes):
                self._segments.append(_Segment(first, slot + 1, offset))
                first, offset = slot + 1, 0
        for segment in self._segments:
            segment.memory = self._memory.allocate(segment.num_bytes)
            self._segment_of += [segment] * (segment.stop - segment.first)


def _let_end(event: Event, timeout_s: float) -> None:
    with contextlib.suppress(StrataError, RuntimeError):
        event.wait(timeout_s)


def _has_ended(event: Event) -> bool:
    """A copy that failed has ended too; who waits for it is told why."""
    try:
        return event.is_done()
    except (StrataError, RuntimeError):
        return True
