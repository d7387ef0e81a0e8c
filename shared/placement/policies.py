"""Which experts should be exchanged: proposals after each window, a step in which tokens are decoded.

Pairs stay in one layer, since slots do. A proposal is good as of now: whoever carries it out, the device's
expert cache or a replay (`begin_swap`), drops those that no longer fit. An expert that is loading is neither
proposed nor in the way.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.placement.hotness import Hotness
from shared.placement.swaps import Swap, fills
from shared.placement.table import NO_EXPERT, NO_SLOT, ResidencyTable

# The original engine's values.
EVERY = 4
DECAY = 0.7
GAP = 1.5
MOST_SWAPS = 96

_EXPERT_BITS = 16
_Values = NDArray[np.float32] | NDArray[np.int64]


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
        """For every missed expert, where a slot of its layer is older; slots that are empty come first."""
        last_used = self._hotness.last_used
        is_missed = (last_used > self._seen) & (table.slot_of == NO_SLOT) & ~table.is_loading
        self._seen = max(self._seen, int(last_used.max(initial=-1)))
        filled = self._fills(table, is_missed)[: self._most]
        for swap in filled:
            is_missed[swap.layer, swap.in_expert] = False
        pairs = _pairs(last_used, is_missed, table.slot_of != NO_SLOT, self._most - len(filled))
        return filled + _swaps(table, pairs, 1, self._most - len(filled))

    def _fills(self, table: ResidencyTable, is_missed: NDArray[np.bool_]) -> list[Swap]:
        found: list[Swap] = []
        slots = table.writable_slots()
        for layer in np.unique(table.slot_layers[slots]).tolist():
            missed = np.flatnonzero(is_missed[layer])
            ages = self._hotness.last_used[layer, missed]
            latest = np.argsort(-ages, kind="stable")
            found += (
                Swap(layer, slot, NO_EXPERT, int(missed[place]), float(ages[place]))
                for slot, place in zip(
                    slots[table.slot_layers[slots] == layer].tolist(), latest, strict=False
                )
            )
        return found


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
        is_resident = table.slot_of != NO_SLOT
        is_outside = ~is_resident & ~table.is_loading
        for swap in filled:
            is_outside[swap.layer, swap.in_expert] = False
        most = self._most - len(filled)
        pairs = _pairs(self._hotness.counts, is_outside, is_resident, most)
        found = filled + _swaps(table, pairs, self._gap, most)
        self._hotness.decay(self._decay)
        return found


class _Pairs(NamedTuple):
    """Of one layer each: who might come in, who would go out for it, and what that gains."""

    layers: NDArray[np.int64]
    in_experts: NDArray[np.int64]
    out_experts: NDArray[np.int64]
    gains: NDArray[np.float64]


def _pairs(
    values: _Values, is_outside: NDArray[np.bool_], is_resident: NDArray[np.bool_], most: int
) -> _Pairs:
    """In each layer, the k-th largest outside with the k-th smallest resident, `most` of them: [layers,
    experts] each. Of equals the lower expert is first."""
    # Floats that are not negative are in the order of their bits.
    order = values.view(np.int32).astype(np.int64) if values.dtype == np.float32 else values.astype(np.int64)
    largest, smallest = _ranked(-order, is_outside), _ranked(order, is_resident)
    counts = np.minimum(is_outside.sum(1), is_resident.sum(1))
    layers, ranks = np.nonzero(np.arange(min(most, values.shape[1])) < counts[:, None])
    in_experts, out_experts = largest[layers, ranks], smallest[layers, ranks]
    gains = values[layers, in_experts].astype(np.float64) - values[layers, out_experts]
    return _Pairs(layers, in_experts, out_experts, gains)


def _ranked(values: NDArray[np.int32] | NDArray[np.int64], is_ranked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The experts of each layer, those of smallest value first; those that are not ranked are behind.

    The value with its expert below is one number that no two experts share: sorting those takes a fifth of a
    stable sort of places, and any algorithm comes to the same order.
    """
    keys = (values << _EXPERT_BITS) | np.arange(values.shape[1])
    keys[~is_ranked] = np.iinfo(np.int64).max
    keys.sort(axis=1)
    keys &= (1 << _EXPERT_BITS) - 1
    return keys


def _swaps(table: ResidencyTable, pairs: _Pairs, gap: float, most: int) -> list[Swap]:
    """The pairs of largest gain over all layers, as long as they gain so much."""
    good = np.flatnonzero(pairs.gains >= gap)
    best = good[np.argsort(-pairs.gains[good], kind="stable")[:most]]
    layers, in_experts, out_experts, gains = (column[best] for column in pairs)
    slots = table.slot_of[layers, out_experts]
    columns = (column.tolist() for column in (layers, slots, out_experts, in_experts, gains))
    return [Swap(*values) for values in zip(*columns, strict=True)]


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
