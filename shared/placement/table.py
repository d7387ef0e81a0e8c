"""Which expert is in which slot of the device's memory, and when a slot may be written.

A slot belongs to one layer for life, since blobs of different layers differ in size. Its states::

            begin_load            publish
    EMPTY ------------> LOADING ----------> RESIDENT
      ^ ^                  |                   | |
      | '----- abandon ----'                   | |
      |'--------------- evict -----------------' | lend
      '------ give_back ------ LENT <------------'  (EMPTY slots are lent too)

An expert is named by `slot_of` only while its slot is RESIDENT, so whoever asks that table never reads a slot
whose copy has not finished.

**Reads and writes.** Device work is numbered by *tickets* that only grow. Who has a slot read notes the
ticket of the work that does it; who has seen work end says up to which ticket all of it has, and none of
those tickets is for new work. A slot may be written when it is EMPTY and all that reads it has ended: evicted
is not yet writable. What a borrower has done with a lent slot is noted in the same way before it gives the
slot back.

All calls come from one thread.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

NO_SLOT = -1
NO_EXPERT = -1


class SlotState(IntEnum):
    """What a slot is used for."""

    EMPTY = 0
    LOADING = 1
    RESIDENT = 2
    LENT = 3


class ResidencyTable:
    """The slots of all layers. Arrays are there to be read; they change with every call."""

    def __init__(self, slot_layers: NDArray[np.int32], num_layers: int, num_experts: int) -> None:
        """`slot_layers`: int32 [num_slots], the layer of each slot. All slots are EMPTY.

        Raises ValueError for a layer that there is not, or with more slots than experts.
        """
        self.slot_layers: NDArray[np.int32] = np.array(slot_layers, np.int32).reshape(-1)
        wrong = self.slot_layers[(self.slot_layers < 0) | (self.slot_layers >= num_layers)]
        if len(wrong):
            raise ValueError(f"a slot is for layer {wrong[0]}; there are {num_layers}")
        per_layer = np.bincount(self.slot_layers, minlength=num_layers)
        if per_layer.max(initial=0) > num_experts:
            layer = int(per_layer.argmax())
            raise ValueError(
                f"layer {layer} has {per_layer[layer]} slots, more than its {num_experts} experts"
            )
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.slot_of: NDArray[np.int32] = np.full((num_layers, num_experts), NO_SLOT, np.int32)
        """int32 [layers, experts]: the slot that the expert is RESIDENT in, or -1."""
        self.expert_of: NDArray[np.int32] = np.full(self.num_slots, NO_EXPERT, np.int32)
        """int32 [slots]: the expert that is RESIDENT or LOADING there, or -1."""
        self.states: NDArray[np.uint8] = np.zeros(self.num_slots, np.uint8)
        """uint8 [slots]: `SlotState`."""
        self.is_loading: NDArray[np.bool_] = np.zeros((num_layers, num_experts), np.bool_)
        """bool [layers, experts]: the expert is LOADING into some slot."""
        self.read_marks: NDArray[np.int64] = np.full(self.num_slots, -1, np.int64)
        """int64 [slots]: the last ticket whose work reads the slot, -1 for none."""
        self.finished_ticket = -1
        """All device work up to this ticket has ended."""
        order = np.argsort(self.slot_layers, kind="stable").astype(np.int32)
        self._slots_of_layer = np.split(order, np.cumsum(per_layer)[:-1])
        self._num_in = [self.num_slots, 0, 0, 0]

    @property
    def num_slots(self) -> int:
        """In all states."""
        return len(self.slot_layers)

    @property
    def num_resident(self) -> int:
        """Slots, and so experts, that can be read."""
        return self._num_in[SlotState.RESIDENT]

    @property
    def num_loading(self) -> int:
        """Slots that are being written."""
        return self._num_in[SlotState.LOADING]

    @property
    def num_lent(self) -> int:
        """Slots that somebody uses for something else."""
        return self._num_in[SlotState.LENT]

    @property
    def coverage(self) -> float:
        """The share of all experts of all layers that are resident, 0 to 1."""
        return self.num_resident / self.slot_of.size

    def slots_of_layer(self, layer: int) -> NDArray[np.int32]:
        """The layer's slots in all states, ascending: int32 [slots of the layer]."""
        slots: NDArray[np.int32] = self._slots_of_layer[layer]
        return slots

    def state(self, slot: int) -> SlotState:
        """Raises ValueError where there is no such slot."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"there is no slot {slot}; there are {self.num_slots}")
        return SlotState(int(self.states[slot]))

    def has_ended_reads(self, slot: int) -> bool:
        """Whether all work that reads the slot has ended: once it is evicted, it is writable."""
        return int(self.read_marks[slot]) <= self.finished_ticket

    def is_writable(self, slot: int) -> bool:
        """Whether a load into the slot may begin."""
        return self.state(slot) == SlotState.EMPTY and self.has_ended_reads(slot)

    def writable_slots(self) -> NDArray[np.int32]:
        """All slots that a load may begin into, ascending: int32 [slots]."""
        is_writable = (self.states == SlotState.EMPTY) & (self.read_marks <= self.finished_ticket)
        slots: NDArray[np.int32] = np.flatnonzero(is_writable).astype(np.int32)
        return slots

    def begin_load(self, slot: int, expert: int) -> None:
        """The expert is being copied into the slot from now on. Raises ValueError for a slot that may not be
        written, or an expert that has one."""
        self._require(slot, "loaded into", SlotState.EMPTY)
        if not self.has_ended_reads(slot):
            raise ValueError(
                f"slot {slot} cannot be loaded into yet: work of ticket {self.read_marks[slot]} reads it, "
                f"and work has ended up to {self.finished_ticket}"
            )
        layer = int(self.slot_layers[slot])
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"there is no expert {expert} for slot {slot}; a layer has {self.num_experts}")
        if self.slot_of[layer, expert] != NO_SLOT or self.is_loading[layer, expert]:
            slots = self.slots_of_layer(layer)
            other = int(slots[self.expert_of[slots] == expert][0])
            raise ValueError(
                f"expert {expert} of layer {layer} cannot be loaded into slot {slot}: it is in slot {other}"
            )
        self.is_loading[layer, expert] = True
        self.expert_of[slot] = expert
        self._set(slot, SlotState.LOADING)

    def publish(self, slot: int) -> None:
        """The copy has finished: the expert can be read. Raises ValueError for a slot that is not loading."""
        self._require(slot, "published", SlotState.LOADING)
        layer, expert = int(self.slot_layers[slot]), int(self.expert_of[slot])
        self.is_loading[layer, expert] = False
        self.slot_of[layer, expert] = slot
        self._set(slot, SlotState.RESIDENT)

    def abandon(self, slot: int) -> None:
        """The load has failed, and nothing writes to the slot any more: it is EMPTY again. Raises ValueError
        for a slot that is not loading."""
        self._require(slot, "abandoned", SlotState.LOADING)
        self.is_loading[self.slot_layers[slot], self.expert_of[slot]] = False
        self.expert_of[slot] = NO_EXPERT
        self._set(slot, SlotState.EMPTY)

    def evict(self, slot: int) -> int:
        """Takes the expert out of the table; returns it. The slot can be written once its readers are done.
        Raises ValueError for a slot that is not resident."""
        self._require(slot, "evicted", SlotState.RESIDENT)
        expert = self._forget(slot)
        self._set(slot, SlotState.EMPTY)
        return expert

    def lend(self, slot: int) -> int:
        """Lends the slot's memory; returns the expert that is lost by it, -1 for none.

        The borrower's work has to come after what reads the slot, as work in one stream of a device does.
        Raises ValueError for a slot that is loading or lent.
        """
        self._require(slot, "lent", SlotState.EMPTY, SlotState.RESIDENT)
        expert = self._forget(slot)
        self._set(slot, SlotState.LENT)
        return expert

    def give_back(self, slot: int) -> None:
        """The borrower needs the slot no more; what it has had done there is noted (`note_reads`). Raises
        ValueError for a slot that is not lent."""
        self._require(slot, "given back", SlotState.LENT)
        self._set(slot, SlotState.EMPTY)

    def note_reads(self, slots: Iterable[int], ticket: int) -> None:
        """Work of this ticket uses the slots, which are resident, or lent. Raises ValueError for others, and
        for a ticket whose work has ended."""
        self.check_ticket(ticket)
        for slot in slots:
            self._require(slot, "read", SlotState.RESIDENT, SlotState.LENT)
            self.read_marks[slot] = max(int(self.read_marks[slot]), ticket)

    def check_ticket(self, ticket: int) -> None:
        """Raises ValueError where the ticket's work was said to have ended: reads would count as done."""
        if ticket <= self.finished_ticket:
            raise ValueError(
                f"work of ticket {ticket} cannot read slots: work has ended up to {self.finished_ticket}"
            )

    def finished(self, ticket: int) -> None:
        """All device work up to this ticket has ended. Older news changes nothing."""
        self.finished_ticket = max(self.finished_ticket, ticket)

    def _forget(self, slot: int) -> int:
        expert = int(self.expert_of[slot])
        if expert != NO_EXPERT:
            self.slot_of[self.slot_layers[slot], expert] = NO_SLOT
            self.expert_of[slot] = NO_EXPERT
        return expert

    def _set(self, slot: int, state: SlotState) -> None:
        self._num_in[self.states[slot]] -= 1
        self._num_in[state] += 1
        self.states[slot] = state

    def _require(self, slot: int, what: str, *states: SlotState) -> None:
        state = self.state(slot)
        if state not in states:
            wanted = " or ".join(wanted.name for wanted in states)
            raise ValueError(f"slot {slot} cannot be {what}: it is {state.name}, not {wanted}")
