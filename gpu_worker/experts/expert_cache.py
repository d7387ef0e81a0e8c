"""Experts in the memory of the device: their slots, what fills them, and to whom they are lent.

Slots (`slot_memory`) have the hottest experts of the model, and are filled by loads (`slot_loads`). They can
be lent: as work space to a large chunk of a prompt, or to keys and values. Their experts are not on the
device meanwhile, and are loaded again when the slots come back.

Where blobs that are lent away might have to come from the disk again, they are kept in RAM meanwhile
(`keeps_lent`), and are transferred and loaded from there.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.memory import Bytes, DeviceMemory, Event
from gpu_worker.experts.slot_loads import Kept, LoadCounts, SlotLoads
from gpu_worker.experts.slot_memory import Segment, SlotMemory
from gpu_worker.experts.staging import Staging
from shared.placement.swaps import Swap
from shared.placement.table import NO_EXPERT, ResidencyTable

_log = logging.getLogger(__name__)


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
        self._kept: Kept = {}
        self._slots = SlotMemory(memory, [experts.slot_bytes(layer) for layer in self.layers])
        self._loads = SlotLoads(
            memory, experts, self._slots, table, slot_experts.tolist(), self._kept, timeout_s
        )
        self._unfinished: deque[tuple[int, Event]] = deque()
        self._ticket = 0
        self.keeps_lent = False
        """Whether what is lent away is kept in RAM; to be set where it would have to be read again."""
        self._could_keep = True
        self.claims: dict[str, int] = {}
        """Who needs how many bytes of the device's memory beside the slots."""
        self._loads.fill(range(len(self.layers)))

    # The stager.

    def attach(self, staging: Staging) -> None:
        """Blobs come this way from now on."""
        self._loads.attach(staging)

    def detach(self) -> None:
        """The stager is lost: nothing of its memory is used once this returns."""
        self._loads.detach()

    # Steps.

    def begin_step(self, *, is_held: bool) -> int:
        """The ticket that reads of the step's work on the device are marked with. With `is_held` nobody comes
        or goes until its end."""
        if is_held:
            self._loads.hold()
        self._ticket += 1
        return self._ticket

    def end_step(self) -> None:
        """All work of the step has been issued."""
        self._loads.go_on()
        self._unfinished.append((self._ticket, self._memory.record()))

    def buffer(self, slot: int) -> Tensor:
        """The memory of a slot that is not lent, uint8 [slot bytes of its layer]."""
        return self._slots.buffer(slot)

    def kept(self, layer: int, expert: int) -> Bytes | None:
        """The content of a slot that is lent, uint8 [slot bytes], if its expert is kept in RAM meanwhile.
        Whoever uses it holds on to it: it is forgotten once the expert is back."""
        return self._kept.get((layer, expert))

    @property
    def num_kept(self) -> int:
        """Experts that are kept in RAM."""
        return len(self._kept)

    # Loads.

    @property
    def counts(self) -> LoadCounts:
        """Of loads, since the start."""
        return self._loads.counts

    @property
    def is_busy(self) -> bool:
        """Whether `pump` has something to do."""
        return self._loads.is_busy

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Experts are to change places. Those whose slot or expert is on the way already are left out. Who is
        to leave stays until its successor is staged."""
        for swap in swaps:
            self._loads.exchange(swap.slot, swap.out_expert, swap.in_expert)

    def pump(self) -> None:
        """Takes every load as far as it goes. Never waits."""
        while self._unfinished and self._unfinished[0][1].is_done():
            self.table.finished(self._unfinished.popleft()[0])
        self._loads.pump()

    def load_kept(self) -> None:
        """Has experts that were kept in RAM back in their slots, where these have come back."""
        if self._kept:
            self._loads.load_kept(self.pump)

    # Lending.

    @property
    def lent_bytes(self) -> int:
        """Memory that was given back to the device's allocator."""
        return self._slots.lent_bytes

    @property
    def num_bytes(self) -> int:
        """Of all slots, lent ones too."""
        return self._slots.num_bytes

    def claim(self, name: str, num_bytes: int) -> int:
        """Someone needs so much of the device's memory from now on, 0 for no more; returns what is lent to
        all, which may be less than what they claim. Called between steps.

        Segments are lent or given back to meet all claims; giving back stops early where the memory cannot
        be had, and goes on with a later claim, or `give_back_spare`. Raises StepStalledError where the device
        does not come to an end; the claim is then as it was.
        """
        claims = {**self.claims, name: num_bytes}
        to_lend, _ = self._slots.changes(sum(claims.values()))
        for segment in to_lend:
            self._lend(segment)
        self.claims = claims
        self.give_back_spare()
        return self.lent_bytes

    def give_back_spare(self) -> None:
        """Has slots that are lent to nobody any more filled again, as far as their memory can be had."""
        _, spare = self._slots.changes(sum(self.claims.values()))
        for segment in spare:
            if not self._slots.reclaim(segment):
                break
            for slot in segment.slots:
                self.table.give_back(slot)
            self._loads.fill(segment.slots)

    def _lend(self, segment: Segment) -> None:
        self._loads.drop(segment.slots)
        while self._unfinished:
            ticket, event = self._unfinished[0]
            event.wait(self._timeout_s)
            self._unfinished.popleft()
            self.table.finished(ticket)
        if self.keeps_lent and self._can_keep(segment):
            self._keep(segment)
        for slot in segment.slots:
            self.table.lend(slot)
        self._slots.release(segment)

    def _can_keep(self, segment: Segment) -> bool:
        can_keep = self._has_ram(segment.num_bytes)
        if self._could_keep and not can_keep:
            _log.warning("RAM has no room for experts whose slots are lent: they are read again afterwards")
        self._could_keep = can_keep
        return can_keep

    def _keep(self, segment: Segment) -> None:
        """Copies the experts of a segment to RAM."""
        resident = [slot for slot in segment.slots if self.table.expert_of[slot] != NO_EXPERT]
        sizes = [self._experts.slot_bytes(self.layers[slot]) for slot in resident]
        # One piece, which is the system's again when the last of them is.
        memory = self._memory.host_buffer(sum(sizes)) if resident else np.empty(0, np.uint8)
        blobs = np.split(memory, np.cumsum(sizes)[:-1])
        events = [
            self._memory.copy_out(self.buffer(slot), [blob])
            for slot, blob in zip(resident, blobs, strict=False)
        ]
        for event in events:
            event.wait(self._timeout_s)
        for slot, blob in zip(resident, blobs, strict=False):
            self._kept[self.layers[slot], int(self.table.expert_of[slot])] = blob
