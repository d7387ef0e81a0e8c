"""Experts on their way through the device: not to stay, but to be computed once.

Blobs are asked for in the order in which they are needed, and arrive in that order: staged by the stager,
copied into one of a few *landing buffers* in the device's memory, used, and the buffer is the next one's. A
buffer is written again only after what was computed from it has finished (*used*), and read only after its
copy has (*copied*); both are events of the device, so that copies overlap with what is computed meanwhile.

What a chunk of a prompt streams through the device takes this way too, with more buffers
(`gpu_worker.experts.three_ways`).
"""

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.memory import Bytes, DeviceMemory, Event, has_ended
from gpu_worker.experts.expert_cache import ExpertCache
from gpu_worker.experts.staging import Staging
from shared.errors import StrataError, WorkerFailedError

_NOT_ASKED = -1


@dataclass(slots=True, eq=False)
class Arrival:
    """A blob that has come, or has not: `error_number` is then the errno. `num_reads` and `read_bytes` are
    those of gate, up and down that were made for it."""

    layer: int
    expert: int
    place: int = _NOT_ASKED
    # Of one that is kept in RAM: it may be forgotten there before it has landed.
    blob: Bytes | None = None
    buffer: Tensor | None = None
    copied: Event | None = None
    error_number: int = 0
    num_reads: Sequence[int] = ()
    read_bytes: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Tensor
    # When the last one who was in it has been computed.
    used: Event | None = None


@dataclass(slots=True)
class _Buffers:
    free: deque[_Buffer] = field(default_factory=deque)
    taken: dict[int, _Buffer] = field(default_factory=dict)
    """By the address of their memory."""


class Transfers:
    """The landing buffers, and what is on its way into them. Used by one thread."""

    def __init__(
        self,
        memory: DeviceMemory,
        experts: DeviceExperts,
        cache: ExpertCache,
        staging: Staging,
        num_buffers: int,
        timeout_s: float,
    ) -> None:
        self._memory = memory
        self._experts = experts
        self._cache = cache
        self._staging = staging
        self._timeout_s = timeout_s
        self._wanted: deque[Arrival] = deque()
        self._asked: deque[Arrival] = deque()
        self._landed: deque[Arrival] = deque()
        # Those whose places, or blobs, are read from by a copy.
        self._held: deque[Arrival] = deque()
        self._buffers = _Buffers()
        self._own: list[Tensor] = []
        self._extra: list[Tensor] = []
        self.feed: Callable[[], None] | None = None
        """Called when there is room for more to be asked for."""
        self.buffer_bytes = max(experts.slot_bytes(layer) for layer in range(cache.table.num_layers))
        """Of one landing buffer: any expert fits."""
        self.moved_bytes = 0
        """Copied to the device since the start, or being copied."""
        self.copied_bytes, self.copied_s = 0, 0.0
        """Of copies that were seen to have ended, and how long they took."""
        self._own = self._allocate(num_buffers)

    def _allocate(self, count: int) -> list[Tensor]:
        buffers: list[Tensor] = []
        try:
            while len(buffers) < count:
                buffers.append(self._memory.allocate(self.buffer_bytes))
        except StrataError:
            if not buffers and not self._own:
                raise
        usable = self._memory.record()
        self._buffers.free += [_Buffer(buffer, usable) for buffer in buffers]
        return buffers

    @property
    def num_buffers(self) -> int:
        """How many blobs can be on the device at a time."""
        return len(self._own) + len(self._extra)

    @property
    def has_extra(self) -> bool:
        """Whether it has more buffers than its own."""
        return bool(self._extra)

    def set_extra(self, count: int) -> None:
        """Gets that many buffers beside its own, or as many as there is memory for; 0 gives them back. To be
        called while nothing is on its way."""
        assert self.num_wanted == 0, "buffers are exchanged between steps"
        self._release(self._extra)
        self._extra = self._allocate(count) if count else []

    def close(self) -> None:
        """Gives the buffers back. What is being copied has ended when this returns."""
        self.abandon()
        self._release(self._own)
        self._release(self._extra)
        self._own, self._extra = [], []

    def _release(self, memories: Iterable[Tensor]) -> None:
        gone = {memory.data_ptr() for memory in memories}
        self._buffers.free = deque(
            buffer for buffer in self._buffers.free if buffer.memory.data_ptr() not in gone
        )
        for memory in memories:
            self._memory.release(memory)

    # What is wanted.

    @property
    def num_wanted(self) -> int:
        """Blobs that were asked for and have not been taken."""
        return len(self._wanted) + len(self._asked) + len(self._landed)

    @property
    def num_places(self) -> int:
        """Blobs that can be staged at a time."""
        return self._staging.num_places

    def ask(self, layer: int, experts: Iterable[int]) -> None:
        """These blobs are needed next, behind those that were asked for before."""
        self._wanted += [Arrival(layer, expert) for expert in experts]
        self.pump()

    def abandon(self) -> None:
        """The step has failed: nobody takes what is on its way. Waits for copies that have begun."""
        for arrival in self._held:
            with contextlib.suppress(StrataError):
                self._await_copy(arrival)
        self._free_places()
        for arrival in self._asked:
            if arrival.place != _NOT_ASKED:
                self._staging.free(arrival.place)
        for arrival in self._landed:
            self.used(arrival)
        self._wanted.clear()
        self._asked.clear()
        self._landed.clear()
        usable = self._memory.record()
        for buffer in self._buffers.taken.values():
            self._buffers.free.append(_Buffer(buffer.memory, usable))
        self._buffers.taken.clear()
        self.feed = None

    def pump(self) -> None:
        """Takes everything as far as it goes. Never waits."""
        self._free_places()
        if self.feed is not None and len(self._wanted) + len(self._asked) < self._staging.num_places:
            self.feed()
        while self._asked and self._buffers.free and self._may_copy and self._land(self._asked[0]):
            self._landed.append(self._asked.popleft())
        while self._wanted and self._stage_next():
            pass

    @property
    def _may_copy(self) -> bool:
        """No more copies are under way than there are places: small ones that compute waits for come behind
        all of them."""
        return len(self._held) < self._staging.num_places

    def _free_places(self) -> None:
        while self._held:
            copied = self._held[0].copied
            if copied is not None and not has_ended(copied):
                break
            arrival = self._held.popleft()
            if copied is not None:
                self.copied_s += copied.seconds()
                self.copied_bytes += self._experts.slot_bytes(arrival.layer)
            if arrival.place != _NOT_ASKED:
                self._staging.free(arrival.place)

    def _stage_next(self) -> bool:
        """Has the next blobs staged, all of one layer at once; whether that is under way."""
        layer, batch = self._wanted[0].layer, []
        for arrival in islice(self._wanted, max(1, self._staging.num_free)):
            if arrival.layer != layer or self._is_kept(arrival):
                break
            batch.append(arrival)
        if batch:
            places = self._staging.request(layer, [arrival.expert for arrival in batch])
            for arrival, place in zip(batch, places, strict=False):
                arrival.place = place
            count = len(places)
        else:
            count = 1
        self._asked += [self._wanted.popleft() for _ in range(count)]
        return count > 0

    def _is_kept(self, arrival: Arrival) -> bool:
        """Whether it comes from RAM, not from the stager."""
        arrival.blob = self._cache.kept(arrival.layer, arrival.expert)
        return arrival.blob is not None

    def _land(self, arrival: Arrival) -> bool:
        """Begins the copy to the device, or notes that there will be none; False where it cannot begin."""
        layer, expert, staging = arrival.layer, arrival.expert, self._staging
        if arrival.blob is not None:
            parts, offsets = [arrival.blob], [0]
        else:
            state = staging.state(arrival.place)
            if state == 0:
                return False
            arrival.num_reads, arrival.read_bytes = staging.reads(arrival.place)
            if state < 0:
                arrival.error_number = -state
                staging.free(arrival.place)
                return True
            parts = staging.parts(arrival.place, layer, expert)
            offsets = list(self._experts.part_offsets(layer))
        buffer = self._buffers.free.popleft()
        self._buffers.taken[buffer.memory.data_ptr()] = buffer
        arrival.buffer = buffer.memory
        arrival.copied = self._memory.copy_in(parts, buffer.memory, offsets, buffer.used)
        self._held.append(arrival)
        self.moved_bytes += self._experts.slot_bytes(layer)
        return True

    # What has come.

    def take(self, most: int) -> list[Arrival]:
        """The next blobs, in the order in which they were asked for: one at least, which is waited for, and
        as many more as have landed. What is computed from now on may read their buffers; who has issued that
        calls `used` for each.

        Raises StepStalledError or WorkerFailedError where none comes.
        """
        assert self.num_wanted, "nothing was asked for"
        self.pump()
        if not self._landed:
            self._wait()
        taken: list[Arrival] = []
        while self._landed and len(taken) < most:
            if taken and not self._has_copied(self._landed[0]):
                break
            arrival = self._landed.popleft()
            if arrival.error_number == errno.ECANCELED:
                raise WorkerFailedError("the stager is stopping; it is being restarted, try again soon")
            if arrival.copied is not None:
                self._memory.compute_waits_for(arrival.copied)
            taken.append(arrival)
        self.pump()
        return taken

    def used(self, arrival: Arrival) -> None:
        """What needs the blob has been issued: its buffer is the next one's."""
        if arrival.buffer is None:
            return
        buffer = self._buffers.taken.pop(arrival.buffer.data_ptr())
        buffer.used = self._memory.record()
        self._buffers.free.append(buffer)
        arrival.buffer = None

    def _has_copied(self, arrival: Arrival) -> bool:
        return arrival.copied is None or has_ended(arrival.copied)

    def _wait(self) -> None:
        """Until something has landed."""
        while True:
            # Looked at before the states: what arrives after that is not slept through.
            seen = self._staging.arrived
            self.pump()
            self._cache.pump()
            if self._landed:
                return
            if self._held and (not self._asked or not self._may_copy):
                # Places are all taken by copies, or there are as many as may be.
                self._await_copy(self._held[0])
            else:
                self._staging.wait_any(seen)

    def _await_copy(self, arrival: Arrival) -> None:
        """Raises StepStalledError where it does not end; one that fails is told to who computes with it."""
        if arrival.copied is not None:
            with contextlib.suppress(RuntimeError):
                arrival.copied.wait(self._timeout_s)
