"""The table under random exchanges, borrowing, failures, reads and their ends, with plans made in between.

The machine keeps its own account of the device: what each slot's memory holds, and which work still reads it.
Whatever happens, no work reads memory that is being written, or that holds another expert than it wants.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.placement.hotness import Hotness
from shared.placement.planner import LayerPlanner, PlanRules
from shared.placement.policies import policy_named
from shared.placement.swaps import begin_swap, fills
from shared.placement.table import NO_EXPERT, ResidencyTable, SlotState
from tests.support.placement import NaivePlanner, check_plan, empty_table

NUM_EXPERTS, NUM_USED, MOST_TOKENS = 6, 3, 4
ARRAYS = ("slot_of", "expert_of", "states", "is_loading", "read_marks")


@dataclass(slots=True)
class Reader:
    """Work that reads a slot, and the expert that it takes the memory for; None for a borrower's work."""

    ticket: int
    slot: int
    expert: int | None


def draws(size: int) -> st.SearchStrategy[int]:
    return st.integers(0, size - 1)


class Residency(RuleBasedStateMachine):
    """Everything an engine does to a table."""

    @initialize(
        slots=st.lists(st.integers(0, NUM_EXPERTS), min_size=1, max_size=3).filter(any),
        policy=st.sampled_from(["adaptive", "lru"]),
    )
    def begin(self, slots: list[int], policy: str) -> None:
        self.table: ResidencyTable = empty_table(slots, NUM_EXPERTS)
        self.hotness = Hotness(len(slots), NUM_EXPERTS, NUM_USED)
        self.planner = LayerPlanner(self.table, self.hotness, NUM_USED, MOST_TOKENS)
        self.naive = NaivePlanner()
        self.policy = policy_named(policy, self.hotness, every=1, most=4)
        self.slots_of_layer = slots
        # What is in the memory of each slot, None where it is not known; who reads it; who is writing.
        self.memory: list[tuple[int, int] | None] = [None] * self.table.num_slots
        self.readers: list[Reader] = []
        self.writing: dict[int, int] = {}
        self.ticket = 0

    def slot(self, number: int) -> int:
        return number % self.table.num_slots

    def layer(self, number: int) -> int:
        return number % self.table.num_layers

    def write_begins(self, slot: int, expert: int) -> None:
        assert all(reader.slot != slot for reader in self.readers), "a slot is written that is being read"
        assert slot not in self.writing
        self.writing[slot] = expert
        self.memory[slot] = None

    # What an engine does.

    @rule(layer=draws(3), data=st.data(), share=st.sampled_from([0.0, 0.3, 1.0]), skip_rank=st.integers(0, 3))
    def a_layer_is_planned(self, layer: int, data: st.DataObject, share: float, skip_rank: int) -> None:
        layer = self.layer(layer)
        tokens = st.lists(
            st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=NUM_USED, max_size=NUM_USED),
            min_size=1,
            max_size=MOST_TOKENS,
        )
        ids = np.array(data.draw(tokens), np.int32)
        rules = PlanRules(share, most_transfers=2, skip_rank=skip_rank)
        naive = self.naive.plan(self.table, layer, ids, rules)
        plan = self.planner.plan(layer, ids, self.ticket, rules)
        check_plan(plan, naive, ids, self.table.slot_of[layer])
        for group in range(plan.num_device_groups):
            slot, expert = int(plan.group_slots[group]), int(plan.group_experts[group])
            assert self.memory[slot] == (layer, expert), "a slot is read that does not hold the expert"
            assert slot not in self.writing
            self.readers.append(Reader(self.ticket, slot, expert))

    @rule()
    def a_window_ends(self) -> None:
        self.ticket += 1
        for swap in self.policy.after_window(self.table):
            assert self.table.slot_layers[swap.slot] == swap.layer
            if begin_swap(self.table, swap):
                self.write_begins(swap.slot, swap.in_expert)

    @rule(behind=st.integers(0, 3))
    def work_ends(self, behind: int) -> None:
        ticket = self.ticket - behind
        self.ticket += 1
        self.table.finished(ticket)
        self.readers = [reader for reader in self.readers if reader.ticket > ticket]

    @rule(slot=draws(18), expert=draws(NUM_EXPERTS))
    def a_load_is_tried(self, slot: int, expert: int) -> None:
        slot = self.slot(slot)
        layer = int(self.table.slot_layers[slot])
        has_slot = expert in self.table.expert_of[self.table.slots_of_layer(layer)]
        may_begin = self.table.is_writable(slot) and not has_slot
        try:
            self.table.begin_load(slot, expert)
        except ValueError:
            assert not may_begin
        else:
            assert may_begin
            self.write_begins(slot, expert)

    @rule()
    def empty_slots_are_filled(self) -> None:
        for swap in fills(self.table, self.hotness):
            assert begin_swap(self.table, swap)
            self.write_begins(swap.slot, swap.in_expert)

    @precondition(lambda self: self.writing)
    @rule(which=draws(18), is_well=st.booleans())
    def a_load_ends(self, which: int, is_well: bool) -> None:
        slot = sorted(self.writing)[which % len(self.writing)]
        expert = self.writing.pop(slot)
        if is_well:
            self.memory[slot] = int(self.table.slot_layers[slot]), expert
            self.table.publish(slot)
        else:
            self.table.abandon(slot)

    @rule(slot=draws(18))
    def a_slot_is_evicted(self, slot: int) -> None:
        slot = self.slot(slot)
        held = int(self.table.expert_of[slot])
        if self.table.state(slot) == SlotState.RESIDENT:
            assert self.table.evict(slot) == held

    @rule(slots=st.sets(draws(18)))
    def slots_are_lent(self, slots: set[int]) -> None:
        for slot in {self.slot(number) for number in slots}:
            if self.table.state(slot) not in (SlotState.EMPTY, SlotState.RESIDENT):
                continue
            held = int(self.table.expert_of[slot])
            assert self.table.lend(slot) == held
            # The borrower's work comes behind all that reads the slot, and writes there.
            self.memory[slot] = None
            self.table.note_reads([slot], self.ticket)
            self.readers = [reader for reader in self.readers if reader.slot != slot]
            self.readers.append(Reader(self.ticket, slot, None))

    @rule(slots=st.sets(draws(18)))
    def slots_are_given_back(self, slots: set[int]) -> None:
        for slot in {self.slot(number) for number in slots}:
            if self.table.state(slot) == SlotState.LENT:
                self.table.give_back(slot)

    @rule(slot=draws(18), call=st.sampled_from(["publish", "abandon", "evict", "give_back", "lend"]))
    def misuse_changes_nothing(self, slot: int, call: str) -> None:
        slot = self.slot(slot)
        allowed = {
            "publish": (SlotState.LOADING,),
            "abandon": (SlotState.LOADING,),
            "evict": (SlotState.RESIDENT,),
            "give_back": (SlotState.LENT,),
            "lend": (SlotState.EMPTY, SlotState.RESIDENT),
        }
        if self.table.state(slot) in allowed[call]:
            return
        before = [getattr(self.table, name).copy() for name in ARRAYS]
        try:
            getattr(self.table, call)(slot)
        except ValueError:
            after = [getattr(self.table, name) for name in ARRAYS]
            assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
        else:
            raise AssertionError(f"{call} was allowed")

    # What is always so.

    @invariant()
    def both_tables_agree(self) -> None:
        table = self.table
        holds = table.expert_of != NO_EXPERT
        resident, loading = table.states == SlotState.RESIDENT, table.states == SlotState.LOADING
        assert np.array_equal(holds, resident | loading)
        for is_in, slots in ((table.slot_of >= 0, resident), (table.is_loading, loading)):
            placed = sorted(zip(*(axis.tolist() for axis in np.nonzero(is_in)), strict=True))
            held = sorted(zip(table.slot_layers[slots], table.expert_of[slots], strict=True))
            assert placed == held
            assert max(Counter(held).values(), default=1) == 1
        layers, experts = np.nonzero(table.slot_of >= 0)
        named = table.slot_of[layers, experts]
        assert np.array_equal(table.slot_layers[named], layers)
        assert np.array_equal(table.expert_of[named], experts)

    @invariant()
    def no_slot_is_lost(self) -> None:
        table = self.table
        assert np.bincount(table.slot_layers, minlength=table.num_layers).tolist() == self.slots_of_layer
        counts = np.bincount(table.states, minlength=4).tolist()
        assert counts[1:] == [table.num_loading, table.num_resident, table.num_lent]
        assert sum(counts) == table.num_slots
        assert set(np.flatnonzero(table.states == SlotState.LOADING).tolist()) == set(self.writing)

    @invariant()
    def what_is_read_is_not_written(self) -> None:
        for reader in self.readers:
            assert reader.slot not in self.writing
            assert not self.table.is_writable(reader.slot)
            if reader.expert is not None:
                assert self.memory[reader.slot] is not None
        for slot in self.table.writable_slots().tolist():
            assert self.table.is_writable(slot)


Residency.TestCase.settings = settings(
    deadline=None, print_blob=True, max_examples=200, stateful_step_count=40
)
TestResidency = Residency.TestCase
