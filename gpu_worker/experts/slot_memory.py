"""The memory of slots: pieces of the device's memory, which can be given back to its allocator.

Slots lie side by side in *segments*, the hottest experts first. Whoever needs memory of the device for
something else gets whole segments, the coldest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.device.memory import DeviceMemory, Event
from shared.errors import StrataError

# A segment is a thirty-second of all slots, within these bounds: lending takes whole ones.
_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 64 << 10, 64 << 20
_NUM_SEGMENTS = 32


@dataclass(slots=True, eq=False)
class Segment:
    """Slots `first` to `stop`. `memory` is None while it is lent."""

    first: int
    stop: int
    num_bytes: int
    memory: Tensor | None = None
    usable: Event | None = None
    """What has to have happened before its memory may be written: it may have been someone's work space."""

    @property
    def slots(self) -> range:
        """Those in it."""
        return range(self.first, self.stop)


class SlotMemory:
    """The segments of all slots."""

    def __init__(self, memory: DeviceMemory, slot_bytes: Sequence[int]) -> None:
        """`slot_bytes` [slots]. Raises ResourceError where the device's memory does not suffice."""
        self._memory = memory
        self._slot_bytes = list(slot_bytes)
        self._offsets: list[int] = []
        self._segments: list[Segment] = []
        self._segment_of: list[Segment] = []
        self.num_bytes = sum(slot_bytes)
        """Of all slots, lent ones too."""
        self.lent_bytes = 0
        """Given back to the device's allocator."""
        self._cut()

    def _cut(self) -> None:
        """Packs the slots into segments, and gets their memory."""
        target = min(max(self.num_bytes // _NUM_SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
        first = offset = 0
        for slot, size in enumerate(self._slot_bytes):
            self._offsets.append(offset)
            offset += size
            if offset >= target or slot + 1 == len(self._slot_bytes):
                self._segments.append(Segment(first, slot + 1, offset))
                first, offset = slot + 1, 0
        for segment in self._segments:
            segment.memory = self._memory.allocate(segment.num_bytes)
            self._segment_of += [segment] * len(segment.slots)

    def buffer(self, slot: int) -> Tensor:
        """The memory of a slot that is not lent, uint8 [slot bytes]."""
        memory = self._segment_of[slot].memory
        assert memory is not None, "a slot that is lent has no memory"
        offset = self._offsets[slot]
        return memory[offset : offset + self._slot_bytes[slot]]

    def usable(self, slot: int) -> Event | None:
        """What a copy into the slot has to come after."""
        return self._segment_of[slot].usable

    def is_lent(self, slot: int) -> bool:
        """Whether its memory is someone else's."""
        return self._segment_of[slot].memory is None

    def changes(self, wanted_bytes: int) -> tuple[list[Segment], list[Segment]]:
        """To lend so much, or all there is: the segments to lend, coldest first, and those to take back,
        hottest first. What is lent of what is not is decided by `wanted_bytes` alone."""
        lent_bytes, lent = 0, []
        for segment in reversed(self._segments):
            if lent_bytes >= wanted_bytes:
                break
            lent.append(segment)
            lent_bytes += segment.num_bytes
        # The last one may be larger than all it takes to do without another.
        for segment in reversed(lent.copy()):
            if lent_bytes - segment.num_bytes >= wanted_bytes:
                lent.remove(segment)
                lent_bytes -= segment.num_bytes
        chosen = set(map(id, lent))
        return (
            [segment for segment in lent if segment.memory is not None],
            [segment for segment in self._segments if segment.memory is None and id(segment) not in chosen],
        )

    def release(self, segment: Segment) -> None:
        """Lends a segment. What was issued before may still read it."""
        memory, segment.memory, segment.usable = segment.memory, None, None
        assert memory is not None, "a segment is lent once"
        self._memory.release(memory)
        self.lent_bytes += segment.num_bytes

    def reclaim(self, segment: Segment) -> bool:
        """Takes a segment back; whether its memory could be had."""
        try:
            segment.memory = self._memory.allocate(segment.num_bytes)
        except StrataError:
            return False
        segment.usable = self._memory.record()
        self.lent_bytes -= segment.num_bytes
        return True
