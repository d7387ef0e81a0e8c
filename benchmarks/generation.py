"""Generation beyond one answer: drafts, conversations that go on, several requests at once, long contexts.

    python -m benchmarks.generation [--quick] [--only speculation,reuse,parallel,context] [--json FILE]
    python -m benchmarks.generation --profile iq2_xs --only parallel

What is measured, always through HTTP by the client's clock, unless it says otherwise:

speculation  the demo model answers held-out questions about its topics, with drafts and without, in turns;
             texts have to be the same; speeds are the server's, from each answer's first token to its last
reuse        the time to the first token of a second turn, over that of the first, and beside llama.cpp's
             server, which keeps prompts as it does by default
parallel     1, 2, 4, 8 requests at once beside llama.cpp's server with as many slots; and the gaps between
             tokens of two running answers while a long prompt is read
context      what a token costs after 1K, 8K and 32K others

Models are the demo model, and but for speculation a slice of the real one (`benchmarks.slices`; it is written
first where it is missing). A quick run measures the demo model alone unless a slice or file is named. Claims
of one model end with `_demo` or `_slice`; without that they are the worst of the models.

Nothing else may run on the machine meanwhile: every measurement waits a while for quiet, one that was
disturbed counts only where none was not, and is then noted as DISTURBED. The exit code is 1 where answers
with drafts differ from those without.

Claims: `speculation_ratio`, `accepted_per_window`; `turn2_ttft_fraction` (under 1: the second turn is
sooner), `turn2_vs_llama_cpp`; `parallel_1_ratio` to `parallel_8_ratio` (over 1: Strata is faster),
`shared_reads_gain_8`, `itl_p95_ms_during_prefill`; `context_8k_ratio`, `context_32k_ratio` (1: a token costs
the same); and what they are made of.
"""

import argparse
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.arguments import add_match_arguments
from benchmarks.context_cost import ContextPlan, measure_context
from benchmarks.ggml import library_path
from benchmarks.interference import InterferencePlan, measure_interference
from benchmarks.page_cache import warm_page_cache
from benchmarks.parallel import ParallelPlan, measure_parallel
from benchmarks.report import Report, describe_machine, measured, say
from benchmarks.reuse import ReusePlan, measure_reuse
from benchmarks.slices import add_model_arguments, check_slice_arguments, model_path
from benchmarks.speculation import SpeculationPlan, measure_speculation
from benchmarks.undisturbed import Bench
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel

SECTIONS = ("speculation", "reuse", "parallel", "context")
_DEFAULT_PROFILE = "iq2_xs"
_DEMO, _SLICE = "demo", "slice"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured in each section."""

    speculation: SpeculationPlan
    reuse: ReusePlan
    parallel: ParallelPlan
    interference: InterferencePlan
    context: ContextPlan

    def with_rounds(self, rounds: int) -> "Plan":
        """The same, each measurement so many times."""
        return Plan(
            replace(self.speculation, rounds=rounds),
            replace(self.reuse, rounds=rounds),
            replace(self.parallel, rounds=rounds),
            replace(self.interference, rounds=rounds),
            replace(self.context, rounds=rounds),
        )


FULL = Plan(
    SpeculationPlan(rounds=5, per_topic=20, warm_up_rounds=2),
    ReusePlan(rounds=3, history_tokens=2048),
    ParallelPlan(rounds=3, numbers=(1, 2, 4, 8), prompt_tokens=100, num_new=128, one_start=False),
    InterferencePlan(rounds=3, prompt_tokens=4096, calm_s=4.0),
    ContextPlan(rounds=3, contexts=(1024, 8192, 32768), num_new=64),
)
QUICK = Plan(
    SpeculationPlan(rounds=1, per_topic=10, warm_up_rounds=1),
    ReusePlan(rounds=1, history_tokens=1024),
    ParallelPlan(rounds=1, numbers=(1, 2, 4, 8), prompt_tokens=100, num_new=64, one_start=True),
    InterferencePlan(rounds=1, prompt_tokens=1024, calm_s=1.5),
    ContextPlan(rounds=1, contexts=(1024, 8192, 32768), num_new=48),
)


def worst(by_model: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Claims of each model under its name, and as the worst of them: ratios to somebody else and gains are
    the better the larger they are, and so is what ends with `per_s`; all others the smaller."""
    found: dict[str, float] = {}
    values: defaultdict[str, list[float]] = defaultdict(list)
    for model, claims in by_model.items():
        for name, value in claims.items():
            found[f"{name}_{model}"] = value
            values[name].append(value)
    for name, of_models in values.items():
        is_better_larger = name.startswith(
            ("parallel_", "shared_reads_gain", "turn2_vs", "llama_cpp_parallel")
        )
        found[name] = min(of_models) if is_better_larger else max(of_models)
    return found


def run(
    models: Mapping[str, Path], sections: Sequence[str], plan: Plan, bench: Bench, flags: list[str]
) -> int:
    """Measures and prints; returns the exit code. Raises AnswerError, StrataError, OSError."""
    code = 0
    if "speculation" in sections:
        code |= measure_speculation(bench, models[_DEMO], flags, plan.speculation)

    def of_each(measure: Callable[[Path], dict[str, float]]) -> None:
        bench.report.claim_all(worst({name: measure(path) for name, path in models.items()}))

    if "reuse" in sections:
        of_each(lambda path: measure_reuse(bench, path, flags, plan.reuse))
    if "parallel" in sections:
        of_each(lambda path: measure_parallel(bench, path, flags, plan.parallel))
        of_each(lambda path: measure_interference(bench, path, flags, plan.interference))
    if "context" in sections:
        of_each(lambda path: measure_context(bench, path, flags, plan.context))
    return code


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SECTIONS)}")
    return names


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only",
        type=_sections,
        action="extend",
        metavar="NAME,NAME",
        help=f"measure these alone: {', '.join(SECTIONS)}; may be given several times",
    )
    parser.add_argument(
        "--quick", action="store_true", help="under two minutes with the demo model alone, wider error"
    )
    add_model_arguments(parser)
    add_match_arguments(
        parser,
        rounds=FULL.reuse.rounds,
        patience_s=20.0,
        who_waits="a measurement waits for a quiet machine",
    )
    parsed = parser.parse_args()
    check_slice_arguments(parser, parsed)
    plan = QUICK if parsed.quick else FULL
    if parsed.rounds is not None and not parsed.quick:
        plan = plan.with_rounds(parsed.rounds)
    sections = parsed.only or SECTIONS
    has_slice = not parsed.quick or parsed.profile is not None or parsed.model is not None
    if parsed.profile is None:
        parsed.profile = _DEFAULT_PROFILE
    settings = asdict(plan) | {
        "sections": list(sections),
        "is_quick": parsed.quick,
        "profile": parsed.profile if has_slice else None,
        "threads": parsed.threads,
        "strata_flags": parsed.strata_flags,
    }
    report = Report("generation", settings)

    def measure() -> int:
        library_path()
        models = {_DEMO: DEMO_MODEL_PATH}
        if has_slice and set(sections) != {"speculation"}:
            models[_SLICE] = model_path(parsed)
        cpus = set(sorted(os.sched_getaffinity(0))[: parsed.threads])
        for name, path in models.items():
            with GGUFModel(path) as model:
                warm_page_cache(model, report)
                described = {"name": model.name, "bytes": model.num_bytes, "fingerprint": model.fingerprint()}
                report.model[name] = described
        say(f"{describe_machine()}; {', '.join(path.name for path in models.values())}, {len(cpus)} threads")
        bench = Bench(cpus, parsed.patience, report)
        return run(models, sections, plan, bench, shlex.split(parsed.strata_flags))

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
