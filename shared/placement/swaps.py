"""An exchange of experts in a slot: what it is, how it begins, and filling of slots that are empty."""

from dataclasses import dataclass

import numpy as np

from shared.placement.hotness import Hotness
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable, SlotState


@dataclass(frozen=True, slots=True)
class Swap:
    """A proposal: in this slot, `in_expert` instead of `out_expert` (-1 where the slot is empty).

    `gain` is what its policy orders by: uses, or for the least recently used steps of age.
    """

    layer: int
    slot: int
    out_expert: int
    in_expert: int
    gain: float


def begin_swap(table: ResidencyTable, swap: Swap) -> bool:
    """Evicts, and begins the load. False, and nothing has changed, where the slot or the expert is not any
    more what it was when this was proposed, or where work that reads the slot has not ended."""
    if table.expert_of[swap.slot] != swap.out_expert or not table.has_ended_reads(swap.slot):
        return False
    wanted = SlotState.EMPTY if swap.out_expert == NO_EXPERT else SlotState.RESIDENT
    if table.state(swap.slot) != wanted:
        return False
    if table.slot_of[swap.layer, swap.in_expert] != NO_SLOT or table.is_loading[swap.layer, swap.in_expert]:
        return False
    if wanted == SlotState.RESIDENT:
        table.evict(swap.slot)
    table.begin_load(swap.slot, swap.in_expert)
    return True


def fills(table: ResidencyTable, hotness: Hotness) -> list[Swap]:
    """For each slot that is empty and can be written the hottest expert of its layer that is left, hottest
    first; as used the same count those that the profile prefers.

    What slots hold that were lent is gone: this brings them back. Uses are those of the last `settle`.
    """
    slots = table.writable_slots()
    found: list[Swap] = []
    for layer in np.unique(table.slot_layers[slots]).tolist():
        outside = np.flatnonzero((table.slot_of[layer] == NO_SLOT) & ~table.is_loading[layer])
        counts = hotness.counts[layer, outside]
        order = np.lexsort((-hotness.long_counts[layer, outside], -counts))
        found += (
            Swap(layer, slot, NO_EXPERT, int(outside[place]), float(counts[place]))
            for slot, place in zip(slots[table.slot_layers[slots] == layer].tolist(), order, strict=False)
        )
    found.sort(key=lambda swap: -swap.gain)
    return found
