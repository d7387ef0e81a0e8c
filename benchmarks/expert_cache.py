"""Is a cache of half of the experts worth more when it follows what is used, and how soon does it follow?

    python -m benchmarks.expert_cache [--quick] [--json FILE]
    python -m benchmarks.expert_cache --profile iq2_xs --windows 150 --rounds 1
    python -m benchmarks.expert_cache --model FILE.gguf --slots 25%

A model is talked to about one topic and then about another, until each topic has followed each other one
(`benchmarks.topics`). It computes in this process, with slots that RAM plays the device for
(`benchmarks.placed_model`): placement, plans, policy, staging and cache are the gpu_worker's. All policies
are given the same tokens. A window is a step that decodes one token; a hit rate is the share of all windows'
routes whose expert was in a slot. Shares are from 0 to 1.

Claims, medians over rounds, each of which has other conversations:

- `adaptive_hit_rate`, `lru_hit_rate`: of the policies that exchange experts, over the whole round. They begin
  with the profile of the first topic.
- `static_hit_rate`: of slots that keep what the profile of the first topic says, learned from other
  conversations about it; `static_mixed_hit_rate`: from conversations about all topics;
  `static_uniform_hit_rate`: without a profile.
- `hindsight_hit_rate`: of the best choice that stays, made with what the round's windows used. Where it is
  near the share of experts in slots, routes are not skewed, and there is little to be gained.
- `hit_rate_gain`, `hit_rate_gain_over_mixed`: adaptive less static, and less static of all topics.
- `first_topic_gain`: adaptive less static in the first stretch, where the static profile is the right one.
- `recovery_windows`: after a change of topic, windows until the adaptive hit rate (a mean over the last 8
  windows and over all changes) is within 0.02 of its steady value, that of the second half of a stretch.
- `replay_difference`: how far the adaptive hit rate is from the one that `strata simulate` has for the routes
  that were recorded meanwhile.

How fast windows are with and without the cache is printed, and no claim: the device is played.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import add_json_argument, positive
from benchmarks.placed_model import PlacedModel, placed_model
from benchmarks.report import Report, describe_machine, measured, median, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from benchmarks.topics import NUM_TOPICS, Source, Stretch, changes, largest_step, script, source_of
from gpu_worker.experts.profile_store import ProfileStore
from shared.cli.simulate import SlotCount
from shared.config import GpuWorkerConfig
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement import profile
from shared.placement.replay import Replay, Scenario
from shared.placement.sizes import expert_sizes
from shared.placement.trace import TraceReader

AVERAGED = 8
"""Windows that a hit rate after a change is averaged over."""
NEAR = 0.02
"""How near its steady value it has recovered."""
_STRETCHES_SHOWN = (0, 8, 16, 32, 64, 128)
# Learned from other conversations than those that are measured.
_PROFILE_SEED = 1_000_000

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    num_changes: int
    num_windows: int
    """Of each stretch."""


FULL = Plan(rounds=3, num_changes=NUM_TOPICS * (NUM_TOPICS - 1), num_windows=300)
QUICK = Plan(rounds=1, num_changes=3, num_windows=80)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy in one round."""

    rates: Rates
    """[stretches, windows] of each window the share of its routes whose expert was in a slot."""
    seconds: Rates
    """[stretches, windows] that it took."""
    num_swaps: int

    @property
    def hit_rate(self) -> float:
        """Of all windows, whose routes are equally many."""
        return float(self.rates.mean())


def run(model: PlacedModel, stretches: Sequence[Stretch]) -> Outcome:
    """Talks about one topic after the other, as soon as all slots are filled."""
    model.load()
    rates, seconds = [], []
    for part in stretches:
        for talk in part.conversations:
            sequence = model.new_sequence()
            model.step(sequence, talk.prompt, is_prompt=True)
            for token_id in talk.answer:
                began = perf_counter()
                routes = model.step(sequence, [token_id], is_prompt=False)
                seconds.append(perf_counter() - began)
                rates.append(routes.device / routes.total)
    shape = len(stretches), -1
    num_swaps = model.placement.cache.counts.num_swaps if model.placement is not None else 0
    return Outcome(np.reshape(rates, shape), np.reshape(seconds, shape), num_swaps)


def recovery(rates: Rates) -> int:
    """Windows from a change until its consequences are over: `rates` [stretches, windows], the first stretch
    follows no change. All windows of a stretch where they never are."""
    after = rates[1:].mean(0)
    steady = after[len(after) // 2 :].mean()
    averages = np.convolve(after, np.ones(AVERAGED) / AVERAGED, "valid")
    near = np.flatnonzero(averages >= steady - NEAR)
    return int(near[0]) + AVERAGED if len(near) else len(after)


@dataclass(frozen=True, slots=True)
class Cache:
    """What all runs of a report have in common."""

    path: Path
    num_slots: int
    threads: int
    directory: Path

    def settings(self, policy: str, learned: Path | None, num_slots: int | None = None) -> GpuWorkerConfig:
        """Of a gpu_worker; those that are not named are the defaults."""
        return GpuWorkerConfig(
            device="cpu",
            expert_cache=f"{self.num_slots if num_slots is None else num_slots}",
            expert_policy=policy,
            # Not the user's own.
            expert_profile=learned or self.directory / "none.profile",
        )

    def learn(self, stretches: Sequence[Stretch], name: str) -> Path:
        """A profile of these conversations."""
        path = self.directory / f"{name}.profile"
        with placed_model(
            self.path, self.settings("static", None), largest_step(stretches), threads=self.threads
        ) as model:
            run(model, stretches)
            with GGUFModel(self.path) as file:
                model.save_profile(ProfileStore(path, file, model.config))
        return path

    def outcome(
        self,
        policy: str,
        learned: Path | None,
        stretches: Sequence[Stretch],
        *,
        num_slots: int | None = None,
        trace: Path | None = None,
    ) -> Outcome:
        """Of a policy that begins with a profile."""
        settings = self.settings(policy, learned, num_slots)
        with placed_model(
            self.path, settings, largest_step(stretches), threads=self.threads, trace=trace
        ) as model:
            return run(model, stretches)

    def replayed(self, policy: str, learned: Path, trace: Path) -> float:
        """The hit rate of a replay."""
        with TraceReader(trace) as reader, GGUFModel(self.path) as file:
            header, sizes = reader.header, expert_sizes(file, read_model_config(file))
            counts = profile.load(learned, header.identity)
            scenario = Scenario(policy, self.num_slots)
            replay = Replay(header, scenario, np.array(sizes.slot_bytes, np.int64), counts)
            for step in reader:
                replay.step(step)
        return replay.hit_rate()

    def hindsight(self, trace: Path, count: int) -> float:
        """The hit rate of the `count` experts that the windows of a trace have used most."""
        with TraceReader(trace) as reader:
            header = reader.header
            uses = np.zeros((header.num_layers, header.num_experts), np.int64)
            for step in reader:
                if not step.num_prefill_tokens:
                    for layer, expert_ids in enumerate(step.expert_ids):
                        uses[layer] += np.bincount(expert_ids.ravel(), minlength=header.num_experts)
        return float(np.sort(uses, axis=None)[::-1][:count].sum() / uses.sum())


def measure_round(
    cache: Cache, source: Source, plan: Plan, seed: int
) -> tuple[dict[str, float], dict[str, Outcome]]:
    """The claims of one round, and what they are made of."""
    topics = changes(plan.num_changes)
    stretches = script(source, topics, seed, plan.num_windows)
    own = script(source, topics[:1], _PROFILE_SEED + seed, plan.num_windows)
    mixed = script(source, sorted(set(topics)), _PROFILE_SEED + seed, plan.num_windows)
    one, many = cache.learn(own, "one-topic"), cache.learn(mixed, "mixed")
    trace = cache.directory / "adaptive.trace"
    found = {
        "adaptive": cache.outcome("adaptive", one, stretches, trace=trace),
        "lru": cache.outcome("lru", one, stretches),
        "static": cache.outcome("static", one, stretches),
        "static_mixed": cache.outcome("static", many, stretches),
        "static_uniform": cache.outcome("static", None, stretches),
    }
    claims = {f"{name}_hit_rate": outcome.hit_rate for name, outcome in found.items()}
    adaptive, static = found["adaptive"], found["static"]
    claims["hindsight_hit_rate"] = cache.hindsight(trace, cache.num_slots)
    claims["hit_rate_gain"] = adaptive.hit_rate - static.hit_rate
    claims["hit_rate_gain_over_mixed"] = adaptive.hit_rate - found["static_mixed"].hit_rate
    claims["first_topic_gain"] = float(adaptive.rates[0].mean() - static.rates[0].mean())
    claims["recovery_windows"] = recovery(adaptive.rates)
    claims["replay_difference"] = abs(adaptive.hit_rate - cache.replayed("adaptive", one, trace))
    return claims, found


def _after_changes(rounds: Sequence[dict[str, Outcome]]) -> str:
    """Mean hit rates by how long ago the topic has changed."""
    num_windows = rounds[0]["adaptive"].rates.shape[1]
    edges = [*(edge for edge in _STRETCHES_SHOWN if edge < num_windows), num_windows]
    spans = list(pairwise(edges))
    rows = []
    for name in rounds[0]:
        after = np.concatenate([found[name].rates[1:] for found in rounds])
        first = np.mean([found[name].rates[0].mean() for found in rounds])
        cells = (after[:, start:stop].mean() for start, stop in spans)
        swaps = np.mean([found[name].num_swaps / found[name].rates.size for found in rounds])
        rows.append([name, f"{first:.3f}", *(f"{cell:.3f}" for cell in cells), f"{swaps:.2f}"])
    header = ("hit rate in windows", "first topic", *(f"{a + 1} to {b}" for a, b in spans), "swaps a window")
    return table(header, rows)


def run_all(path: Path, parsed: argparse.Namespace, plan: Plan, report: Report) -> int:
    """Measures and prints; returns the exit code. Raises BenchmarkError, StrataError, OSError."""
    with GGUFModel(path) as model, tempfile.TemporaryDirectory() as directory:
        config, source = read_model_config(model), source_of(model)
        num_pairs = config.num_layers * config.num_experts
        num_slots = min(parsed.slots(num_pairs), num_pairs)
        report.model = {"name": model.name, "fingerprint": model.fingerprint()}
        report.settings["num_slots"] = num_slots
        cache = Cache(path, num_slots, parsed.threads, Path(directory))
        say(f"{num_slots} slots for {num_pairs} experts of {model.name}")
        rounds: list[dict[str, Outcome]] = []
        all_claims: list[dict[str, float]] = []
        for number in range(plan.rounds):
            say(f"round {number + 1} of {plan.rounds}")
            claims, found = measure_round(cache, source, plan, parsed.seed + number)
            all_claims.append(claims)
            rounds.append(found)
        without = cache.outcome(
            "static", None, script(source, [0], parsed.seed, plan.num_windows), num_slots=0
        )
    say(_after_changes(rounds))
    speeds = {name: np.concatenate([found[name].seconds for found in rounds]) for name in rounds[0]}
    say(
        f"a window takes {1e3 * np.median(without.seconds):.2f} ms without slots, "
        f"{1e3 * np.median(speeds['adaptive']):.2f} ms adaptive, {1e3 * np.median(speeds['static']):.2f} ms "
        "static; the device is played by RAM"
    )
    report.details["rounds"] = all_claims
    report.details["ms_per_window"] = {name: 1e3 * float(np.median(times)) for name, times in speeds.items()}
    report.claim_all({name: median(claims[name] for claims in all_claims) for name in all_claims[0]})
    return 0


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--slots",
        type=SlotCount,
        default="50%",
        metavar="N|N%",
        help="slots, or their share of all experts (default 50%%)",
    )
    parser.add_argument("--windows", type=positive, help=f"of each stretch (default {FULL.num_windows})")
    parser.add_argument("--changes", type=positive, help=f"of the topic (default {FULL.num_changes})")
    parser.add_argument("--rounds", type=positive, help=f"default {FULL.rounds}")
    parser.add_argument("--threads", type=positive, default=2, help="of each team (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round with fewer and shorter stretches")
    add_json_argument(parser)
    parsed = parser.parse_args()
    if parsed.model is None and parsed.profile is None:
        parsed.model = DEMO_MODEL_PATH
    check_model_arguments(parser, parsed)
    asked = {"rounds": parsed.rounds, "num_changes": parsed.changes, "num_windows": parsed.windows}
    plan = replace(QUICK if parsed.quick else FULL, **{name: n for name, n in asked.items() if n is not None})
    if plan.num_windows < 2 * AVERAGED:
        parser.error(f"argument --windows: {plan.num_windows} is too few, {2 * AVERAGED} is the least")
    settings = asdict(plan) | {"threads": parsed.threads, "seed": parsed.seed, "is_quick": parsed.quick}
    report = Report("expert_cache", settings)

    def measure() -> int:
        path = model_path(parsed)
        say(f"{describe_machine()}; {path.name}")
        return run_all(path, parsed, plan, report)

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
