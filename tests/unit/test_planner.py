"""Plans of layers: ways, counts, and shares that are kept."""

import numpy as np
import pytest

from benchmarks.planner import NUM_LAYERS, lru_seconds, plan_seconds, round_seconds
from shared.placement.hotness import MOST_PROMPT_TOKENS, Hotness
from shared.placement.planner import LayerPlanner, PlanRules, skip_rank_at
from tests.support.placement import NaivePlanner, admit, check_plan, empty_table, ids_of, planner_of

NOTHING_MOVES = PlanRules()


def test_three_ways() -> None:
    """The order of groups and routes is what the device's kernels are written against."""
    table = empty_table([2], 8)
    admit(table, 0, 5)
    admit(table, 1, 1)
    planner, _ = planner_of(table, 3, 4)
    ids = ids_of([5, 2, 1], [2, 3, 5])
    plan = planner.plan(0, ids, 9, PlanRules(transfer_share=0.5))
    assert plan.group_experts.tolist() == [1, 5, 2]
    assert plan.group_slots.tolist() == [1, 0, -1]
    assert plan.group_starts.tolist() == [0, 1, 3, 5]
    assert plan.route_tokens.tolist() == [0, 0, 1, 0, 1]
    assert plan.route_places.tolist() == [2, 0, 5, 1, 3]
    assert np.array_equal(plan.cpu_ids >= 0, ids == 3)
    assert (plan.num_device_groups, plan.num_transfer_groups, plan.num_cpu_groups) == (2, 1, 1)
    assert plan.token_device_routes.tolist() == [2, 1]
    assert plan.token_transfer_routes.tolist() == [1, 1]
    assert table.read_marks.tolist() == [9, 9]


def test_what_is_not_resident_is_not_read() -> None:
    """Slots that are loading, lent or were evicted hold no expert."""
    table = empty_table([3], 4)
    table.begin_load(0, 0)
    admit(table, 1, 1)
    table.lend(1)
    admit(table, 2, 2)
    table.evict(2)
    planner, _ = planner_of(table, 3, 1)
    plan = planner.plan(0, ids_of([0, 1, 2]), 0, NOTHING_MOVES)
    assert (plan.num_groups, plan.num_cpu_routes) == (0, 3)
    assert table.read_marks.tolist() == [-1, -1, -1]


def test_the_share_is_met_over_time() -> None:
    """A layer misses few experts: rounded one by one, a tenth of them would be none at all."""
    planner, _ = planner_of(empty_table([0, 0], 64), 5, 1)
    rng = np.random.default_rng(0)
    moved = missed = 0
    for number in range(400):
        ids = rng.permutation(64)[None, :5].astype(np.int32)
        plan = planner.plan(number % 2, ids, number, PlanRules(transfer_share=0.1))
        moved += plan.num_transfer_groups
        missed += plan.num_transfer_groups + plan.num_cpu_groups
        assert abs(moved - 0.1 * missed) <= 1
    assert missed == 2000


def test_groups_of_most_tokens_are_transferred() -> None:
    """A transfer costs the same for one token as for many."""
    planner, _ = planner_of(empty_table([0], 8), 2, 3)
    plan = planner.plan(0, ids_of([1, 7], [7, 3], [6, 7]), 0, PlanRules(0.5))
    assert plan.group_experts.tolist() == [1, 7]


def test_transfers_are_bounded() -> None:
    """What the staging has no room for goes to the CPU, and is not caught up with later."""
    planner, _ = planner_of(empty_table([0], 8), 4, 1)
    ids = ids_of([0, 1, 2, 3])
    for _ in range(3):
        plan = planner.plan(0, ids, 0, PlanRules(1.0, most_transfers=1))
        assert (plan.num_transfer_groups, plan.num_cpu_groups) == (1, 3)
    assert planner.plan(0, ids, 0, PlanRules(0.25)).num_transfer_groups == 2
    assert planner.plan(0, ids, 0, PlanRules(0.25)).num_transfer_groups == 1


def test_tail_skip() -> None:
    """Left out is what is missed and ranks behind for every token; others keep their places."""
    table = empty_table([1], 8)
    admit(table, 0, 7)
    planner, _ = planner_of(table, 3, 2)
    ids = ids_of([0, 5, 7], [1, 6, 5])
    plan = planner.plan(0, ids, 0, PlanRules(skip_rank=2))
    assert plan.num_skipped_routes == 0
    plan = planner.plan(0, ids, 0, PlanRules(skip_rank=1))
    assert (plan.num_device_routes, plan.num_skipped_groups, plan.num_skipped_routes) == (1, 2, 3)
    assert plan.token_skipped_routes.tolist() == [1, 2]
    assert np.array_equal(np.maximum(plan.cpu_ids, -1), ids_of([0, -1, -1], [1, -1, -1]))
    assert (skip_rank_at(0.89, 7), skip_rank_at(0.9, 7), skip_rank_at(0.0, 0)) == (7, 0, 0)


def test_routes_of_nobody() -> None:
    """Negative ids, such as of experts that have their own way, are counted nowhere."""
    planner, hotness = planner_of(empty_table([0], 8), 2, 2)
    plan = planner.plan(0, ids_of([-1, 2], [-5, -1]), 0, PlanRules(1.0))
    assert (plan.num_transfer_routes, plan.num_cpu_routes) == (1, 0)
    hotness.settle()
    assert hotness.counts.sum() == 1


@pytest.mark.parametrize(
    ("layer", "ids", "message"),
    [
        (0, [[1, 2], [3, 8]], "layer 0: token 1 has expert 8 at rank 1; there are 8"),
        (1, [[1, 2]], "there is no layer 1; there are 1"),
        (-1, [[1, 2]], "there is no layer -1"),
        (0, [[1, 2]] * 3, "layer 0: a step of 3 tokens; plans are made for up to 2"),
        (0, [[1]], "layer 0: 1 experts a token; plans are made for 2"),
    ],
)
def test_refusals(layer: int, ids: list[list[int]], message: str) -> None:
    """A plan with an expert that is none would read beyond the table."""
    table = empty_table([1], 8)
    admit(table, 0, 1)
    planner, hotness = planner_of(table, 2, 2)
    with pytest.raises(ValueError, match=message):
        planner.plan(layer, np.array(ids, np.int32), 3, NOTHING_MOVES)
    hotness.settle()
    assert table.read_marks.tolist() == [-1]
    assert hotness.counts.sum() == 0


def test_rules_out_of_range() -> None:
    """A share above one would transfer experts that are not missed."""
    with pytest.raises(ValueError, match=r"the share of transfers is 1\.5; it can be 0 to 1"):
        PlanRules(1.5)
    with pytest.raises(ValueError, match="neither can be negative"):
        PlanRules(0.5, most_transfers=-1)
    with pytest.raises(ValueError, match=r"uses are of \(1, 4\)"):
        LayerPlanner(empty_table([1], 8), Hotness(1, 4, 2), 2, 2)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("rules", [PlanRules(), PlanRules(0.55, 8), PlanRules(1.0, skip_rank=7)])
def test_against_plain_python(num_tokens: int, rules: PlanRules) -> None:
    """At the model's size, layer after layer."""
    rng = np.random.default_rng(num_tokens)
    table = empty_table([64, 0, 256], 512)
    for layer in range(3):
        for slot, expert in zip(table.slots_of_layer(layer), rng.permutation(512), strict=False):
            admit(table, int(slot), int(expert))
    planner, _ = planner_of(table, 10, 40)
    naive = NaivePlanner()
    for step in range(12):
        ids = np.argsort(rng.random((num_tokens, 512)), axis=1)[:, :10].astype(np.int32)
        ids[rng.random(ids.shape) < 0.05] = -1
        layer = step % 3
        plan = planner.plan(layer, ids, step, rules)
        check_plan(plan, naive.plan(table, layer, ids, rules), ids, table.slot_of[layer])


def test_prompts_do_not_make_all_else_forgotten() -> None:
    """However long a prompt is, and into however many chunks it was divided."""
    table = empty_table([0], 8)
    planner, hotness = planner_of(table, 1, 256)
    for ticket in range(5):
        planner.plan(0, ids_of([3]), ticket, NOTHING_MOVES)
    for ticket in range(5, 15):
        planner.plan(0, np.full((256, 1), 6, np.int32), ticket, NOTHING_MOVES, is_prompt=True)
    hotness.settle()
    assert hotness.counts[0].tolist() == [0, 0, 0, 5, 0, 0, MOST_PROMPT_TOKENS, 0]
    assert (hotness.last_used[0, 3], hotness.last_used[0, 6], hotness.last_used[0, 0]) == (4, 14, -1)


def test_short_prompts_are_prompts() -> None:
    """Questions are often of a dozen tokens, answers too: counted in full they push out each other's
    experts. Large windows, of many sequences, are none."""
    table = empty_table([0], 8)
    planner, hotness = planner_of(table, 1, 64)
    planner.plan(0, np.full((3, 1), 2, np.int32), 0, NOTHING_MOVES, is_prompt=True)
    planner.plan(0, np.full((64, 1), 3, np.int32), 1, NOTHING_MOVES)
    hotness.add(0, np.full((9, 1), 2, np.int32), 2, is_prompt=True)
    hotness.add(0, np.full((2, 1), 3, np.int32), 3)
    hotness.settle()
    assert hotness.counts[0].tolist() == [0, 0, MOST_PROMPT_TOKENS, 66, 0, 0, 0, 0]


def test_the_benchmark_measures_what_it_says() -> None:
    """One time for each layer of each step, and rounds in which something is exchanged."""
    assert len(plan_seconds(1, 2)) == 2 * NUM_LAYERS
    rounds, swaps = round_seconds(2)
    assert (len(rounds), len(swaps)) == (2, 2)
    assert len(lru_seconds(2)) == 2
