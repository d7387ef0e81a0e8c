"""Which experts should be exchanged: proposals after each window, a step in which tokens are decoded.

Pairs stay in one layer, since slots do. A proposal is good as of now: whoever carries it out (`begin_swap`)
drops those that no longer fit. An expert that is loading is neither proposed nor in the way.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shared.placement.hotness import Hotness
from shared.placement.swaps import Swap, fills
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable, SlotState

# The original engine's values.
EVERY = 4
DECAY = 0.7
GAP = 1.5
MOST_SWAPS = 96


class Policy(Protocol):
    """Proposes exchanges."""

    def after_window(self, table: ResidencyTable) -> Sequence[Swap]:
        """What should be exchanged now that a window has ended, the best first."""
        ...


class StaticPolicy:
    """What was loaded at the start stays."""

    def after_window(self, table: ResidencyTable) -> Sequence[Swap]:
        """Nothing."""
        return ()


class LruPolicy:
    """Each expert that was missed since the last window takes the slot of its layer that is longest unused.

    A slot whose expert was used as late as the missed one does not give way.
    """

    def __init__(self, hotness: Hotness, most: int = MOST_SWAPS) -> None:
        """At most so many exchanges a window, those against the oldest first."""
        self._hotness = hotness
        self._most = most
        self._seen = -1

    def after_window(self, table: ResidencyTable) -> Sequence[Swap]:
        """For every missed expert, where a slot of its layer is older; slots that are empty are oldest."""
        last_used = self._hotness.last_used
        is_missed = (last_used > self._seen) & (table.slot_of == NO_SLOT) & ~table.is_loading
        self._seen = max(self._seen, int(last_used.max(initial=-1)))
        found: list[Swap] = []
        writable = np.zeros(table.num_slots, np.bool_)
        writable[table.writable_slots()] = True
        for layer in np.flatnonzero(is_missed.any(1)).tolist():
            slots = table.slots_of_layer(layer)
            slots = slots[writable[slots] | (table.states[slots] == SlotState.RESIDENT)]
            experts = table.expert_of[slots]
            slot_ages = np.where(experts == NO_EXPERT, -2, last_used[layer, experts])
            missed = np.flatnonzero(is_missed[layer])
            missed_ages = last_used[layer, missed]
            by_age = np.argsort(slot_ages, kind="stable")[: len(missed)]
            latest = np.argsort(-missed_ages, kind="stable")[: len(by_age)]
            gains = missed_ages[latest] - slot_ages[by_age]
            found += (
                Swap(layer, int(slots[old]), int(experts[old]), int(missed[new]), float(gain))
                for old, new, gain in zip(by_age, latest, gains, strict=True)
                if gain > 0
            )
        found.sort(key=lambda swap: -swap.gain)
        return found[: self._most]


class AdaptivePolicy:
    """Rounds in which the hottest outsiders of each layer take the slots of its coldest residents."""

    def __init__(
        self,
        hotness: Hotness,
        every: int = EVERY,
        decay: float = DECAY,
        gap: float = GAP,
        most: int = MOST_SWAPS,
    ) -> None:
        """A round after `every` windows; of a round's uses the share `decay` counts in the next one. An
        outsider takes a slot if it has `gap` more uses, and there are `most` exchanges a round at most."""
        self._hotness = hotness
        self._every = every
        self._decay = decay
        self._gap = gap
        self._most = most
        self._num_windows = 0

    def after_window(self, table: ResidencyTable) -> Sequence[Swap]:
        """In a round, first empty slots are filled; then, of each layer, the k-th hottest outsider is paired
        with the k-th coldest resident, and the pairs of largest gain are exchanged, over all layers."""
        self._num_windows += 1
        if self._num_windows % self._every:
            return ()
        self._hotness.settle()
        filled = fills(table, self._hotness)[: self._most]
        found = filled + self._exchanges(table, filled, self._most - len(filled))
        self._hotness.decay(self._decay)
        return found

    def _exchanges(self, table: ResidencyTable, filled: Sequence[Swap], most: int) -> list[Swap]:
        counts, is_resident = self._hotness.counts, table.slot_of != NO_SLOT
        outside = np.where(is_resident | table.is_loading, -np.inf, counts)
        for swap in filled:
            outside[swap.layer, swap.in_expert] = -np.inf
        inside = np.where(is_resident, counts, np.inf)
        # Stable, so that equals come in the same order on every machine.
        hottest = np.argsort(-outside, axis=1, kind="stable")[:, :most]
        coldest = np.argsort(inside, axis=1, kind="stable")[:, :most]
        gains = np.take_along_axis(outside, hottest, 1) - np.take_along_axis(inside, coldest, 1)
        layers, ranks = np.nonzero(gains >= self._gap)
        best = np.argsort(-gains[layers, ranks], kind="stable")[:most]
        layers, ranks = layers[best], ranks[best]
        out_experts, in_experts = coldest[layers, ranks], hottest[layers, ranks]
        slots = table.slot_of[layers, out_experts]
        columns = (layers, slots, out_experts, in_experts, gains[layers, ranks])
        return [Swap(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def policy_named(
    name: str, hotness: Hotness, *, every: int = EVERY, decay: float = DECAY, most: int = MOST_SWAPS
) -> Policy:
    """The policy of a setting of `--expert-policy` (`shared.config.SWAP_POLICIES`). Raises ValueError where
    there is none of that name."""
    match name:
        case "adaptive":
            return AdaptivePolicy(hotness, every, decay, most=most)
        case "lru":
            return LruPolicy(hotness, most)
        case "static":
            return StaticPolicy()
        case _:
            raise ValueError(f"there is no policy {name!r}")
