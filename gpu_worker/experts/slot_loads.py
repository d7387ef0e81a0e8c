"""Experts on their way into slots.

A blob takes two steps: the stager brings it into a staging place, and from there it is copied. Neither is
waited for: `pump` takes every load as far as it goes now, and is called again and again by the thread that
computes. Who is in which slot, and whether it may be written, is for the table (`shared.placement.table`),
which names an expert only once its copy has finished.

A slot whose load fails is tried again later, so that it does not stay empty.
"""

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.memory import Bytes, DeviceMemory, Event, has_ended
from gpu_worker.experts.slot_memory import SlotMemory
from gpu_worker.experts.staging import Staging
from shared.errors import StepStalledError, StrataError
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable, SlotState

_log = logging.getLogger(__name__)

RETRY_S = 10.0
"""After so long a slot that could not be filled is tried again; a choice of ours."""
_MOST_COPIES = 16
"""Under way at a time: more would keep whatever else is to be copied waiting."""
_NOT_ASKED = -1

Kept = dict[tuple[int, int], Bytes]
"""By layer and expert: contents of slots that are kept in RAM."""


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
class LoadCounts:
    """What has happened since the start."""

    loaded_bytes: int = 0
    num_swaps: int = 0
    swapped_bytes: int = 0
    num_failures: int = 0


class SlotLoads:
    """The loads of one cache. Used by one thread."""

    def __init__(
        self,
        memory: DeviceMemory,
        experts: DeviceExperts,
        slots: SlotMemory,
        table: ResidencyTable,
        owners: Sequence[int],
        kept: Kept,
        timeout_s: float,
    ) -> None:
        """`owners` [slots] are to be in the slots. Experts that are `kept` come from there, and are taken out
        when they have come. A copy may take `timeout_s`."""
        self._memory = memory
        self._experts = experts
        self._slots = slots
        self._table = table
        self._kept = kept
        self._timeout_s = timeout_s
        self._layers: list[int] = table.slot_layers.tolist()
        self.owners = list(owners)
        """Who belongs into each slot: who is there, or is to be there again."""
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
        self._is_held = False
        self.counts = LoadCounts()

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

    # What is wanted.

    @property
    def is_busy(self) -> bool:
        """Whether `pump` has something to do."""
        return bool(self._queue or self._asked or self._copying) and self._staging is not None

    def fill(self, slots: Iterable[int]) -> None:
        """Loads their owners into empty slots; where one has come into another slot meanwhile, as happens
        while its own is lent, somebody else of the layer, until the policy puts that right."""
        for slot in slots:
            layer = self._layers[slot]
            others = range(self._table.num_experts)
            for expert in (self.owners[slot], *others):
                if self._is_outside(layer, expert):
                    self.owners[slot] = expert
                    self._add(slot)
                    break

    def _is_outside(self, layer: int, expert: int) -> bool:
        """Whether the expert is in no slot of the device, nor coming into one."""
        return (layer, expert) not in self._coming and bool(self._table.slot_of[layer, expert] == NO_SLOT)

    def exchange(self, slot: int, out_expert: int, in_expert: int) -> None:
        """Loads another expert into a slot. Nothing happens where the slot or the expert has a load
        already, or where the slot is lent."""
        pair = self._layers[slot], in_expert
        if self._slots.is_lent(slot) or slot in self._busy_slots or pair in self._coming:
            return
        self.owners[slot] = in_expert
        self._add(slot, is_swap=out_expert != NO_EXPERT)

    def hold(self) -> None:
        """Until `go_on`, nobody leaves a slot, and nothing more is staged: a prompt is streamed by who was on
        the device before, and needs every staging place."""
        self._is_held = True
        staging = self._staging
        while self._asked and staging is not None:
            load = self._asked.pop()
            staging.free(load.place)
            if not load.is_dropped:
                load.place = _NOT_ASKED
                self._queue.appendleft(load)

    def go_on(self) -> None:
        """Ends `hold`."""
        self._is_held = False

    def drop(self, slots: Iterable[int]) -> None:
        """Ends all loads into some slots; who is there is their owner again."""
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
        for slot in dropped:
            if self._table.expert_of[slot] != NO_EXPERT:
                self.owners[slot] = int(self._table.expert_of[slot])

    def _add(self, slot: int, *, is_swap: bool = False) -> None:
        load = _Load(slot, self._layers[slot], self.owners[slot], is_swap)
        self._busy_slots.add(slot)
        self._coming.add((load.layer, load.expert))
        self._queue.append(load)

    # How it comes.

    def pump(self) -> None:
        """Takes every load as far as it goes. Never waits."""
        staging = self._staging
        if self._unfilled and time.monotonic() >= self._retry_at:
            self._retry()
        if staging is None or not (self._queue or self._asked or self._copying):
            return
        self._end_copies()
        if self._is_held:
            return
        for _ in range(len(self._asked)):
            load = self._asked.popleft()
            if not self._take_further(load, staging):
                self._asked.append(load)
        self._ask(staging)

    def load_kept(self, pump: Callable[[], None]) -> None:
        """Loads the experts that are kept in RAM and whose slots have come back, and waits until they are
        there: whoever missed one would have it read from the disk. `pump` is called meanwhile: it pumps this,
        and sees which work has ended. Raises StepStalledError where copies do not end."""
        coming = [load for load in self._queue if (load.layer, load.expert) in self._kept]
        chosen = set(map(id, coming))
        self._queue = deque([*coming, *(load for load in self._queue if id(load) not in chosen)])
        waiting = {load.slot for load in coming}
        deadline = time.monotonic() + self._timeout_s
        while waiting & self._busy_slots and self._staging is not None:
            if time.monotonic() > deadline:
                raise StepStalledError(
                    f"experts that were kept in RAM are not back on the device within {self._timeout_s:g} s; "
                    "raise --watchdog-s if the machine is that slow"
                )
            pump()
            if self._copying and (copied := self._copying[0].copied) is not None:
                with contextlib.suppress(StrataError, RuntimeError):
                    copied.wait(self._timeout_s)

    def _end_copies(self) -> None:
        while self._copying:
            load = self._copying[0]
            if load.copied is not None and not has_ended(load.copied):
                break
            self._copying.popleft()
            self._end_copy(load)
            self._forget(load)
            if not self._is_settled(load):
                reason = f"expert {load.expert} of layer {load.layer} could not be copied to the device"
                self._try_later(load, reason)

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
        if self._table.expert_of[load.slot] != NO_EXPERT:
            self._table.evict(load.slot)
        return self._table.is_writable(load.slot)

    def _copy(self, load: _Load, parts: Sequence[Bytes], offsets: Sequence[int]) -> None:
        self._table.begin_load(load.slot, load.expert)
        usable = self._slots.usable(load.slot)
        load.copied = self._memory.copy_in(parts, self._slots.buffer(load.slot), offsets, usable)
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
            self._table.abandon(load.slot)
        else:
            if load.is_dropped:
                self._table.abandon(load.slot)
            else:
                self._table.publish(load.slot)
                self._count(load)
        if load.place != _NOT_ASKED and self._staging is not None:
            self._staging.free(load.place)
        self._kept.pop((load.layer, load.expert), None)

    def _count(self, load: _Load) -> None:
        num_bytes = self._experts.slot_bytes(load.layer)
        self.counts.loaded_bytes += num_bytes
        if load.is_swap:
            self.counts.num_swaps += 1
            self.counts.swapped_bytes += num_bytes

    def _ask(self, staging: Staging) -> None:
        """Has more blobs staged, of half of the places: the other half is for what a step waits for."""
        while self._queue and len(self._copying) < _MOST_COPIES:
            load = self._queue[0]
            if (blob := self._kept.get((load.layer, load.expert))) is not None:
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

    # How it ends.

    def _forget(self, load: _Load) -> None:
        if not load.is_dropped:
            self._busy_slots.discard(load.slot)
            self._coming.discard((load.layer, load.expert))

    def _try_later(self, load: _Load, reason: str) -> None:
        """A load has failed. A slot that is empty shall not stay so; one that is not keeps who is there."""
        now, there = time.monotonic(), int(self._table.expert_of[load.slot])
        if now >= self._retry_at:
            # The first one: with a bad disk there are many.
            _log.warning("%s; such slots are tried again after %g s", reason, RETRY_S)
            self._retry_at = now + RETRY_S
        if there == NO_EXPERT:
            self._unfilled.add(load.slot)
        else:
            self.owners[load.slot] = there

    def _retry(self) -> None:
        slots, self._unfilled = sorted(self._unfilled), set()
        empty = (slot for slot in slots if self._table.state(slot) is SlotState.EMPTY)
        self.fill(slot for slot in empty if slot not in self._busy_slots)

    def _is_settled(self, load: _Load) -> bool:
        return bool(self._table.slot_of[load.layer, load.expert] == load.slot)
