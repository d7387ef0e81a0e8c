"""Exchanges that policies propose, and that begin only where they still fit."""

import numpy as np
import pytest

from shared.config import SWAP_POLICIES
from shared.placement.hotness import Hotness
from shared.placement.policies import AdaptivePolicy, LruPolicy, Policy, StaticPolicy, policy_named
from shared.placement.swaps import Swap, begin_swap, fills
from shared.placement.table import ResidencyTable, SlotState
from tests.support.placement import admit, empty_table


def full_table(layers: int, slots: int, experts: int) -> ResidencyTable:
    """Experts 0, 1, ... are resident in each layer."""
    table = empty_table([slots] * layers, experts)
    for slot in range(table.num_slots):
        admit(table, slot, slot % slots)
    return table


def hotness_of(*layers: list[float]) -> Hotness:
    """With these uses, as if counted before."""
    hotness = Hotness(len(layers), len(layers[0]), 1)
    hotness.counts[:] = layers
    return hotness


def round_of(table: ResidencyTable, hotness: Hotness, most: int = 96) -> list[Swap]:
    return list(AdaptivePolicy(hotness, every=1, most=most).after_window(table))


def test_hottest_outsider_against_coldest_resident() -> None:
    """The k-th with the k-th, as long as it gains enough; any other pairing exchanges more for less."""
    hotness = hotness_of([5, 2, 0, 8, 3.5, 3.4])
    assert round_of(full_table(1, 3, 6), hotness) == [
        Swap(layer=0, slot=2, out_expert=2, in_expert=3, gain=8.0),
        Swap(layer=0, slot=1, out_expert=1, in_expert=4, gain=1.5),
    ]
    assert np.allclose(hotness.counts, np.array([5, 2, 0, 8, 3.5, 3.4]) * 0.7)


def test_largest_gains_of_all_layers_first() -> None:
    """A bound on exchanges would otherwise be used up by the first layers."""
    hotness = hotness_of([0, 0, 2, 1], [0, 1, 9, 3])
    found = round_of(full_table(2, 2, 4), hotness, most=2)
    assert [(swap.layer, swap.in_expert, swap.gain) for swap in found] == [(1, 2, 9), (0, 2, 2)]
    assert all(swap.slot // 2 == swap.layer for swap in found)


def test_rounds_are_every_few_windows() -> None:
    """Uses decay once a round, not once a window."""
    hotness = hotness_of([0, 4.0])
    policy = AdaptivePolicy(hotness, every=4)
    table = full_table(1, 1, 2)
    assert [len(policy.after_window(table)) for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert hotness.counts[0, 1] == pytest.approx(4 * 0.7**2)


def test_empty_slots_are_filled_first() -> None:
    """However little their experts are used. The profile decides between equals."""
    table = full_table(1, 2, 6)
    table.evict(1)
    hotness = hotness_of([0, 0, 0, 9, 0.5, 0])
    hotness.long_counts[0, 5] = 3
    assert round_of(table, hotness) == [
        Swap(layer=0, slot=1, out_expert=-1, in_expert=3, gain=9.0),
    ]
    table = empty_table([3], 6)
    found = fills(table, hotness)
    assert [(swap.slot, swap.in_expert) for swap in found] == [(0, 3), (1, 4), (2, 5)]


def test_a_slot_that_is_read_is_not_filled_yet() -> None:
    """Its load could not begin."""
    table = full_table(1, 1, 2)
    table.note_reads([0], 3)
    table.evict(0)
    assert fills(table, hotness_of([0, 1])) == []
    table.finished(3)
    assert len(fills(table, hotness_of([0, 1]))) == 1


@pytest.mark.parametrize("name", SWAP_POLICIES)
def test_experts_that_load_are_left_alone(name: str) -> None:
    """They would be loaded twice, or given up before they were read."""
    table = empty_table([2], 3)
    admit(table, 0, 0)
    table.begin_load(1, 2)
    hotness = hotness_of([0, 0, 9])
    policy = policy_named(name, hotness, every=1)
    hotness.add(0, np.array([[2]], np.int32), 1)
    assert list(policy.after_window(table)) == []


def test_least_recently_used() -> None:
    """Missed experts take the slots that are longest unused, but none that was used as late."""
    table = full_table(1, 3, 6)
    hotness = Hotness(1, 6, 1)
    policy = LruPolicy(hotness)
    for ticket, expert in enumerate([1, 0, 2]):
        hotness.add(0, np.array([[expert]], np.int32), ticket)
    assert list(policy.after_window(table)) == []
    hotness.add(0, np.array([[5], [2], [4]], np.int32), 3)
    found = list(policy.after_window(table))
    assert [(swap.out_expert, swap.in_expert) for swap in found] == [(1, 4), (0, 5)]
    assert list(policy.after_window(table)) == []
    hotness.add(0, np.array([[0, 1, 2, 3]], np.int32), 4)
    assert list(policy.after_window(table)) == []


def test_least_recently_used_takes_empty_slots_and_is_bounded() -> None:
    """As any policy."""
    table = empty_table([3], 6)
    admit(table, 2, 0)
    hotness = Hotness(1, 6, 1)
    policy = LruPolicy(hotness, most=1)
    hotness.add(0, np.array([[3, 4]], np.int32), 7)
    (swap,) = policy.after_window(table)
    assert (swap.slot, swap.out_expert, swap.in_expert) == (0, -1, 3)


def test_static_and_names() -> None:
    """The names of the setting are those of the policies."""
    hotness = hotness_of([0, 9])
    table = full_table(1, 1, 2)
    assert list(StaticPolicy().after_window(table)) == []
    made: list[Policy] = [policy_named(name, hotness) for name in SWAP_POLICIES]
    assert [type(policy) for policy in made] == [AdaptivePolicy, LruPolicy, StaticPolicy]
    with pytest.raises(ValueError, match="there is no policy 'random'"):
        policy_named("random", hotness)


def test_a_swap_begins_where_it_still_fits() -> None:
    """Time passes between a proposal and its load."""
    table = full_table(1, 2, 4)
    swap = Swap(0, 1, 1, 3, 2.0)
    table.note_reads([1], 5)
    assert not begin_swap(table, swap)
    assert table.state(1) == SlotState.RESIDENT
    table.finished(5)
    assert begin_swap(table, swap)
    assert (table.state(1), table.expert_of.tolist()) == (SlotState.LOADING, [0, 3])
    assert not begin_swap(table, swap)
    assert not begin_swap(table, Swap(0, 0, 0, 3, 1.0))
    table.publish(1)
    assert not begin_swap(table, Swap(0, 0, 0, 3, 1.0))
    table.lend(0)
    assert not begin_swap(table, Swap(0, 0, -1, 2, 1.0))
    table.give_back(0)
    assert begin_swap(table, Swap(0, 0, -1, 2, 1.0))


def test_long_memory_outlives_the_short_one() -> None:
    """The profile shall not be that of the last minute."""
    hotness = Hotness(1, 2, 1)
    hotness.add(0, np.array([[0]] * 4, np.int32), 0)
    for _ in range(50):
        hotness.settle()
        hotness.decay(0.7)
    assert hotness.counts[0, 0] < 1e-6
    assert hotness.long_counts[0].tolist() == [4, 0]
    hotness.add(0, np.array([[1]], np.int32), 1)
    later = Hotness(1, 2, 1)
    later.start_from(hotness.profile())
    assert later.long_counts[0].tolist() == [4, 1]
    assert later.counts[0, 0] > 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_round_against_plain_python(seed: int) -> None:
    """Many layers, ties, experts that load, slots that are empty."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = 6, 40
    table = empty_table(rng.integers(0, 30, num_layers).tolist(), num_experts)
    for layer in range(num_layers):
        experts = rng.permutation(num_experts).tolist()
        for slot, expert in zip(table.slots_of_layer(layer).tolist(), experts, strict=False):
            table.begin_load(slot, expert)
            if rng.random() < 0.9:
                table.publish(slot)
                if rng.random() < 0.1:
                    table.evict(slot)
    hotness = Hotness(num_layers, num_experts, 2)
    hotness.counts[:] = rng.integers(0, 6, (num_layers, num_experts))
    counts, most = hotness.counts.copy(), 30

    filled, pairs = [], []
    for layer in range(num_layers):
        of_layer = table.expert_of[table.slots_of_layer(layer)]
        outside = [e for e in range(num_experts) if e not in of_layer]
        outside.sort(key=lambda e, layer=layer: (-counts[layer, e], e))
        empty = [s for s in table.slots_of_layer(layer).tolist() if table.is_writable(s)]
        filled += [(counts[layer, e], layer, s, -1, e) for s, e in zip(empty, outside, strict=False)]
    filled = sorted(filled, key=lambda found: -found[0])[:most]
    for layer in range(num_layers):
        taken = {(found[1], found[4]) for found in filled}
        of_layer = table.expert_of[table.slots_of_layer(layer)]
        outside = [e for e in range(num_experts) if e not in of_layer and (layer, e) not in taken]
        outside.sort(key=lambda e, layer=layer: (-counts[layer, e], e))
        inside = [e for e in range(num_experts) if table.slot_of[layer, e] >= 0]
        inside.sort(key=lambda e, layer=layer: (counts[layer, e], e))
        for hot, cold in zip(outside, inside, strict=False):
            gain = counts[layer, hot] - counts[layer, cold]
            if gain >= 1.5:
                pairs.append((gain, layer, int(table.slot_of[layer, cold]), cold, hot))
    pairs = sorted(pairs, key=lambda found: -found[0])[: most - len(filled)]
    assert round_of(table, hotness, most) == [
        Swap(layer, slot, out, hot, float(gain)) for gain, layer, slot, out, hot in filled + pairs
    ]
    assert filled
    assert pairs
