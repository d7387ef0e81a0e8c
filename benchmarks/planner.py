"""What placement costs the engine's thread: plans of layers, and rounds of exchanges.

    python -m benchmarks.planner [--quick] [--json FILE]

At the model's size: 48 layers of 512 experts, half of them resident, 10 used by a token; routes are drawn
here, no model is needed. Claims:

- `plan_us`, `plan_5_us`: the median microseconds of the plan of one layer, for a step of 1 token, and of 5.
- `round_ms`, `lru_ms`: the median milliseconds of a round of the adaptive policy, of a window of the least
  recently used.
- `begin_swap_us`: of beginning and publishing one exchange, in the mean of a round.
"""

import argparse
import itertools
import sys
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import add_json_argument
from benchmarks.report import Report, describe_machine, measured, median, say, table
from shared.placement.hotness import Hotness
from shared.placement.planner import LayerPlanner, PlanRules
from shared.placement.policies import AdaptivePolicy, LruPolicy
from shared.placement.swaps import begin_swap
from shared.placement.table import ResidencyTable

NUM_LAYERS, NUM_EXPERTS, NUM_USED, SHARE_RESIDENT = 48, 512, 10, 0.5
WINDOWS = (1, 5)
_SKEW = 0.7  # How likely an expert is falls with its rank to that power (`benchmarks.replacement`).
_RULES = PlanRules(transfer_share=0.35, most_transfers=8, skip_rank=7)


class Bench:
    """A table at the model's size, and routes."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        per_layer = int(NUM_EXPERTS * SHARE_RESIDENT)
        layers = np.repeat(np.arange(NUM_LAYERS, dtype=np.int32), per_layer)
        self.table = ResidencyTable(layers, NUM_LAYERS, NUM_EXPERTS)
        for layer in range(NUM_LAYERS):
            experts = self._rng.permutation(NUM_EXPERTS)[:per_layer].tolist()
            for slot, expert in zip(self.table.slots_of_layer(layer).tolist(), experts, strict=True):
                self.table.begin_load(slot, expert)
                self.table.publish(slot)
        self.hotness = Hotness(NUM_LAYERS, NUM_EXPERTS, NUM_USED)
        self.planner = LayerPlanner(self.table, self.hotness, NUM_USED, max(WINDOWS))
        weights = np.arange(1, NUM_EXPERTS + 1) ** -_SKEW
        self._logs = np.log([self._rng.permutation(weights) for _ in range(NUM_LAYERS)])
        self._ticket = 0

    def routes(self, num_tokens: int) -> NDArray[np.int32]:
        """Of one step: int32 [layers, tokens, NUM_USED]."""
        shape = NUM_LAYERS, num_tokens, NUM_EXPERTS
        keys = self._logs[:, None] - np.log(self._rng.exponential(size=shape))
        return np.ascontiguousarray(np.argsort(-keys, axis=2)[:, :, :NUM_USED].astype(np.int32))

    def step(self, num_tokens: int) -> list[float]:
        """Plans a step; returns the seconds of each layer."""
        routes, seconds = self.routes(num_tokens), []
        for layer in range(NUM_LAYERS):
            start = time.perf_counter()
            self.planner.plan(layer, routes[layer], self._ticket, _RULES)
            seconds.append(time.perf_counter() - start)
        self.table.finished(self._ticket)
        self._ticket += 1
        return seconds


def plan_seconds(num_tokens: int, num_steps: int) -> list[float]:
    """Of each plan of a layer."""
    bench = Bench()
    bench.step(num_tokens)
    return list(itertools.chain.from_iterable(bench.step(num_tokens) for _ in range(num_steps)))


def round_seconds(num_rounds: int) -> tuple[list[float], list[float]]:
    """Of each round of the adaptive policy, 4 windows apart, and of beginning and publishing one exchange in
    the mean of each."""
    bench = Bench()
    policy = AdaptivePolicy(bench.hotness, every=1)
    rounds, swaps = [], []
    for _ in range(num_rounds):
        for _ in range(4):
            bench.step(WINDOWS[-1])
        start = time.perf_counter()
        found = policy.after_window(bench.table)
        proposed = time.perf_counter()
        for swap in found:
            if begin_swap(bench.table, swap):
                bench.table.publish(swap.slot)
        rounds.append(proposed - start)
        if found:
            swaps.append((time.perf_counter() - proposed) / len(found))
    return rounds, swaps


def lru_seconds(num_windows: int) -> list[float]:
    """Of each window of the least recently used."""
    bench = Bench()
    policy, seconds = LruPolicy(bench.hotness), []
    for _ in range(num_windows):
        bench.step(WINDOWS[-1])
        start = time.perf_counter()
        found = policy.after_window(bench.table)
        seconds.append(time.perf_counter() - start)
        for swap in found:
            if begin_swap(bench.table, swap):
                bench.table.publish(swap.slot)
    return seconds


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    add_json_argument(parser)
    parsed = parser.parse_args()
    num_steps = 20 if parsed.quick else 200
    settings = {
        "layers": NUM_LAYERS,
        "experts": NUM_EXPERTS,
        "used": NUM_USED,
        "share_resident": SHARE_RESIDENT,
        "steps": num_steps,
        "is_quick": parsed.quick,
    }
    report = Report("planner", settings)

    def measure() -> int:
        say(describe_machine())
        found = {f"plan of {count} token(s)": plan_seconds(count, num_steps) for count in WINDOWS}
        found["adaptive round"], found["one exchange"] = round_seconds(num_steps // 2)
        found["lru window"] = lru_seconds(num_steps // 2)
        rows = [
            (name, *(f"{1e6 * value:.1f}" for value in np.percentile(seconds, (5, 50, 95))))
            for name, seconds in found.items()
        ]
        say(table(("microseconds", "5 %", "median", "95 %"), rows))
        one, five, rounds, swaps, lru = (median(seconds) for seconds in found.values())
        report.claim_all(
            {
                "plan_us": 1e6 * one,
                "plan_5_us": 1e6 * five,
                "round_ms": 1e3 * rounds,
                "lru_ms": 1e3 * lru,
                "begin_swap_us": 1e6 * swaps,
            }
        )
        return 0

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
