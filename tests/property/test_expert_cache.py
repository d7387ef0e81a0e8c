"""The expert cache and the transfers beside it, under everything an engine does to them and all that fails.

Real staging places, filled by the real stager from the file, and RAM as the memory of the device; blobs that
cannot be read, copies that fail, device work that ends late, stagers that come and go in the middle of steps.
Whatever the order: who is in the table has the bytes of the file, nobody's memory is written while it is
read, no byte of memory and no place is lost, and once everything goes right again every slot has its expert.
"""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.cpu_memory import CpuMemory
from gpu_worker.device.cpu_slot_experts import CpuSlotExperts
from gpu_worker.device.memory import Bytes, Event
from gpu_worker.experts import slot_loads
from gpu_worker.experts.expert_cache import ExpertCache
from gpu_worker.experts.transfers import Arrival, Transfers
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.native.records import Record
from shared.native.team import Team
from shared.placement.profile import assign_slots, fill_order
from shared.placement.swaps import Swap
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable, SlotState
from stager.blob_sources import BlobSources
from tests.support.staging import Staged, staged
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

NUM_PLACES, NUM_BUFFERS = 6, 3
TIMEOUT_S = 10.0
ALL = NUM_LAYERS * NUM_EXPERTS
experts_of_layer = st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=NUM_EXPERTS)
layers = st.integers(0, NUM_LAYERS - 1)


class LateEvent:
    """Compute that has ended when the test says so, or somebody waits for it."""

    def __init__(self) -> None:
        self.has_happened = False

    def is_done(self) -> bool:
        return self.has_happened

    def wait(self, timeout_s: float) -> None:
        self.has_happened = True

    def seconds(self) -> float:
        return 0.0


class BrokenMoves(list[tuple[int, int, int]]):
    """What the copying thread meets an error in, as it does where a device fails."""

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        raise RuntimeError("the copy has failed")


class UnreliableMemory(CpuMemory):
    """Some copies to it fail, and what is computed ends late."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.num_failing = 0
        self.is_late = False
        self.events: list[LateEvent] = []

    def copy_in(
        self,
        parts: Sequence[Bytes],
        target: Tensor,
        offsets: Sequence[int] | None = None,
        after: Event | None = None,
    ) -> Event:
        if not self.num_failing:
            return super().copy_in(parts, target, offsets, after)
        self.num_failing -= 1
        return self._copy(BrokenMoves(), (target, parts))

    def record(self) -> Event:
        event = LateEvent()
        if self.is_late:
            self.events.append(event)
        else:
            event.has_happened = True
        return event

    def finish(self) -> None:
        for event in self.events:
            event.has_happened = True
        self.events.clear()


class Placed(RuleBasedStateMachine):
    """One engine's use of the cache, step by step."""

    file: ClassVar[GGUFModel]
    contents: ClassVar[NDArray[np.uint8]]
    team: ClassVar[Team]

    @initialize(num_slots=st.integers(1, ALL), hottest=st.randoms(use_true_random=False))
    def begin(self, num_slots: int, hottest: random.Random) -> None:
        self.patch = mock.patch.object(slot_loads, "RETRY_S", 0.0)
        self.patch.start()
        self.layout = BlobLayout(self.file, NUM_LAYERS)
        self.experts = CpuSlotExperts(self.file, NUM_LAYERS, self.team)
        sizes = np.array([self.experts.slot_bytes(layer) for layer in range(NUM_LAYERS)], np.int64)
        counts = np.array([hottest.random() for _ in range(ALL)], np.float32)
        counts = counts.reshape(NUM_LAYERS, NUM_EXPERTS)
        slot_layers, chosen = assign_slots(fill_order(counts), sizes, num_slots=num_slots)
        self.landing_bytes = NUM_BUFFERS * int(sizes.max())
        self.budget = int(sizes[slot_layers].sum()) + self.landing_bytes
        self.memory = UnreliableMemory(self.budget)
        self.memory.is_late = True
        self.table = ResidencyTable(slot_layers, NUM_LAYERS, NUM_EXPERTS)
        self.cache = ExpertCache(self.memory, self.experts, self.table, slot_layers, chosen, TIMEOUT_S)
        self.transfers: Transfers | None = None
        self.staged: Staged | None = None
        self.stack = contextlib.ExitStack()
        self.bad: set[tuple[int, int]] = set()

    # The stager.

    @precondition(lambda self: self.staged is None)
    @rule()
    def attach(self) -> None:
        """As the engine does when a stager has come."""
        self.staged = self.stack.enter_context(staged(self.file, BlobSources(), NUM_PLACES))
        self.staged.reader.before = self.spoil
        staging = self.staged.staging
        self.memory.pin(staging.memory)
        self.transfers = Transfers(self.memory, self.experts, self.cache, staging, NUM_BUFFERS, TIMEOUT_S)
        self.cache.attach(staging)

    @precondition(lambda self: self.staged is not None)
    @rule()
    def lose(self) -> None:
        """As the engine does when the stager is lost."""
        assert self.staged is not None
        assert self.transfers is not None
        self.cache.detach()
        self.transfers.close()
        self.cache.claim("work space", 0)
        self.memory.unpin(self.staged.staging.memory)
        self.staged = self.transfers = None
        self.stack.close()
        assert self.memory.free_bytes() == self.budget - self.cache.num_bytes + self.cache.lent_bytes

    def spoil(self, reads: Record) -> None:
        for layer, expert in self.bad:
            for part in self.layout.layers[layer].parts:
                start, stop = part.start(expert), part.start(expert) + part.num_bytes
                begins = reads["offset"] == start // 4096 * 4096
                reads["file"][begins & (reads["offset"] + reads["needed"] == stop)] = 9999

    @rule(layer=layers, experts=experts_of_layer)
    def disk_goes_bad(self, layer: int, experts: list[int]) -> None:
        self.bad |= {(layer, expert) for expert in experts}

    @rule()
    def disk_is_good(self) -> None:
        self.bad = set()

    @rule(count=st.integers(1, 3))
    def copies_fail(self, count: int) -> None:
        self.memory.num_failing = count

    # Between steps.

    @rule()
    def pump(self) -> None:
        self.cache.pump()

    @rule(late=st.booleans())
    def compute_is_late(self, late: bool) -> None:
        self.memory.is_late = late
        if not late:
            self.memory.finish()

    @rule(keeps=st.booleans())
    def keep_what_is_lent(self, keeps: bool) -> None:
        self.cache.keeps_lent = keeps

    @rule(name=st.sampled_from(["keys and values", "work space"]), share=st.floats(0, 1.2))
    def claim(self, name: str, share: float) -> None:
        """Slots are lent or come back. Work space is landing buffers here."""
        is_work = name == "work space"
        if is_work and self.transfers is not None and self.transfers.has_extra:
            self.transfers.set_extra(0)
        if not is_work and self.transfers is not None and self.transfers.has_extra:
            return
        num_bytes = int(share * self.cache.num_bytes)
        lent = self.cache.claim(name, num_bytes)
        assert lent >= min(sum(self.cache.claims.values()), self.cache.num_bytes)
        if is_work and self.transfers is not None:
            granted = min(num_bytes, max(0, lent - self.cache.claims.get("keys and values", 0)))
            if count := granted // self.transfers.buffer_bytes:
                self.transfers.set_extra(count)
                assert self.transfers.num_buffers == NUM_BUFFERS + count

    @rule(wanted=st.dictionaries(st.integers(0, ALL - 1), st.integers(0, ALL), max_size=6))
    def swap(self, wanted: dict[int, int]) -> None:
        """Exchanges and fills as a policy proposes them: of who is outside and not coming."""
        swaps = []
        # Nothing is drawn here: who is outside depends on threads.
        for slot, pick in {slot % self.table.num_slots: pick for slot, pick in wanted.items()}.items():
            layer = int(self.table.slot_layers[slot])
            outside = np.flatnonzero((self.table.slot_of[layer] == NO_SLOT) & ~self.table.is_loading[layer])
            if self.table.state(slot) in (SlotState.RESIDENT, SlotState.EMPTY) and len(outside):
                chosen = int(outside[pick % len(outside)])
                swaps.append(Swap(layer, slot, int(self.table.expert_of[slot]), chosen, 1.0))
        self.cache.swap(swaps)

    # Steps.

    @precondition(lambda self: self.staged is not None)
    @rule(chosen=st.lists(st.tuples(layers, experts_of_layer), max_size=3), ends_well=st.booleans())
    def step(self, chosen: list[tuple[int, list[int]]], ends_well: bool) -> None:
        """Computes from slots, and has the rest transferred; or is broken off before they are taken."""
        assert self.transfers is not None
        ticket = self.cache.begin_step(is_held=False)
        with self.ending():
            for layer, experts in chosen:
                missed = self.compute_hits(layer, experts, ticket)
                self.transfers.ask(layer, missed)
                if not ends_well:
                    raise RuntimeError("the step is broken off")
                self.take(len(missed))

    @precondition(lambda self: self.staged is not None)
    @rule(stops_at=st.integers(0, 2 * NUM_LAYERS))
    def streamed_step(self, stops_at: int) -> None:
        """Streams what is not on the device, ahead of what computes it; nobody leaves a slot meanwhile."""
        transfers = self.transfers
        assert transfers is not None
        ticket = self.cache.begin_step(is_held=True)
        asked: list[list[int]] = []

        def ask_layer() -> None:
            if len(asked) == NUM_LAYERS:
                transfers.feed = None
                return
            asked.append(np.flatnonzero(self.table.slot_of[len(asked)] < 0).tolist())
            transfers.ask(len(asked) - 1, asked[-1])

        transfers.feed = ask_layer
        with self.ending():
            for layer in range(NUM_LAYERS):
                if layer == stops_at:
                    raise RuntimeError("the step is broken off")
                self.cache.pump()
                transfers.pump()
                while len(asked) <= layer:
                    ask_layer()
                missed = self.compute_hits(layer, list(range(NUM_EXPERTS)), ticket)
                assert set(missed) <= set(asked[layer])
                self.take(len(asked[layer]))

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The end of a step, however it comes."""
        assert self.transfers is not None
        try:
            yield
        except RuntimeError:
            self.transfers.abandon()
        self.transfers.feed = None
        self.cache.end_step()
        self.cache.pump()
        assert self.transfers.num_wanted == 0

    def compute_hits(self, layer: int, experts: list[int], ticket: int) -> list[int]:
        """Reads the slots of who is on the device; returns the others."""
        self.cache.pump()
        hits = [expert for expert in experts if self.table.slot_of[layer, expert] >= 0]
        slots = [int(self.table.slot_of[layer, expert]) for expert in hits]
        self.table.note_reads(slots, ticket)
        for slot, expert in zip(slots, hits, strict=True):
            self.check_blob(self.cache.buffer(slot), layer, expert)
        return [expert for expert in experts if expert not in hits]

    def take(self, count: int) -> None:
        assert self.transfers is not None
        while count:
            arrivals: list[Arrival] = self.transfers.take(count)
            count -= len(arrivals)
            for arrival in arrivals:
                if arrival.error_number:
                    assert (arrival.layer, arrival.expert) in self.bad
                else:
                    assert arrival.buffer is not None
                    self.check_blob(arrival.buffer, arrival.layer, arrival.expert)
            for arrival in arrivals:
                self.transfers.used(arrival)

    # What has to hold.

    def check_blob(self, memory: Tensor, layer: int, expert: int) -> None:
        content: NDArray[np.uint8] = memory.numpy()
        parts = self.layout.layers[layer].parts
        for part, at in zip(parts, self.experts.part_offsets(layer), strict=True):
            start = part.start(expert)
            assert np.array_equal(
                content[at : at + part.num_bytes], self.contents[start : start + part.num_bytes]
            )

    @invariant()
    def table_and_memory_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        table, cache = self.table, self.cache
        for slot, layer in enumerate(cache.layers):
            state, expert = table.state(slot), int(table.expert_of[slot])
            assert (expert == NO_EXPERT) == (state in (SlotState.EMPTY, SlotState.LENT))
            is_lent = state is SlotState.LENT
            assert is_lent == cache._slots.is_lent(slot)
            if state is SlotState.RESIDENT:
                assert table.slot_of[layer, expert] == slot
                self.check_blob(cache.buffer(slot), layer, expert)
        assert (table.slot_of >= 0).sum() == table.num_resident
        loads = cache._loads
        under_way = [*loads._queue, *loads._asked, *loads._copying]
        coming = [load for load in under_way if not load.is_dropped]
        assert {load.slot for load in coming} == loads._busy_slots
        assert {(load.layer, load.expert) for load in coming} == loads._coming
        assert len(coming) == len(loads._busy_slots) == len(loads._coming)
        transfers = self.transfers
        landing = 0 if transfers is None else transfers.num_buffers * transfers.buffer_bytes
        assert self.memory.free_bytes() == self.budget - cache.num_bytes + cache.lent_bytes - landing
        assert 0 <= self.memory.free_bytes() <= self.budget

    @precondition(lambda self: self.staged is not None)
    @rule()
    def settle(self) -> None:
        """All goes right from here on: then nothing is missing."""
        assert self.staged is not None
        assert self.transfers is not None
        cache, table, staging = self.cache, self.table, self.staged.staging
        self.bad, self.memory.num_failing = set(), 0
        self.compute_is_late(late=False)
        deadline = time.monotonic() + TIMEOUT_S
        cache.pump()
        while cache.is_busy or cache._loads._unfilled:
            assert time.monotonic() < deadline
            cache.pump()
        for slot, layer in enumerate(cache.layers):
            if table.state(slot) is SlotState.EMPTY:
                owner = cache._loads.owners[slot]
                assert table.slot_of[layer, owner] not in (NO_SLOT, slot)
            elif table.state(slot) is SlotState.RESIDENT:
                assert cache._loads.owners[slot] == table.expert_of[slot]
        self.transfers.pump()
        while staging.num_free < NUM_PLACES:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        assert len(self.transfers._buffers.free) == self.transfers.num_buffers
        assert not any(cache.claims.values()) or cache.lent_bytes
        # What is kept is lent, or somebody's who came back by another way.
        assert not cache.num_kept or cache.lent_bytes

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        try:
            if self.staged is None:
                self.attach()
            self.settle()
            self.lose()
            self.cache.claim("keys and values", 0)
            assert self.memory.free_bytes() == self.budget - self.cache.num_bytes
        finally:
            self.stack.close()
            self.memory.close()
            self.patch.stop()


@pytest.mark.timeout(120, method="thread")
def test_the_cache_under_everything(tmp_path: Path) -> None:
    path = tiny_model().write(tmp_path / "tiny.gguf")
    Placed.contents = np.fromfile(path, np.uint8)
    Placed.team = Team(1)
    with GGUFModel(path) as file:
        Placed.file = file
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                Placed, settings=settings(max_examples=30, stateful_step_count=30, deadline=None)
            )
        finally:
            Placed.team.close()
