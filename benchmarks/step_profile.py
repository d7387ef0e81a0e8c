"""Where the time of a decoded token goes on the CPU, step by step.

    python -m benchmarks.step_profile --profile iq2_xs [--tokens 32] [--json FILE]
    python -m benchmarks.step_profile --model FILE.gguf

The forward pass of the gpu_worker and the experts of the cpu_worker, in one process and one after the other:
every step of every program is run and timed by itself, while a text is decoded, so that caches hold what they
would hold. What processes and threads cost each other is therefore not in it, and experts do not overlap with
the shared expert. A step is named by its matrices, or by its tasks where it has none.

Claims, medians over the tokens, in microseconds: `products_us_per_layer` (steps with matrices),
`other_us_per_layer` (those without), `experts_us_per_layer`, `head_us`.
"""

import argparse
import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.arguments import add_json_argument, positive
from benchmarks.in_process import InProcessModel
from benchmarks.page_cache import warm_page_cache
from benchmarks.read_limit import expert_bytes
from benchmarks.report import Report, describe_machine, measured, median, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from gpu_worker.model.interface import RoutedExperts
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.native.program import Program
from shared.native.team import Team
from shared.quants import ACTIVATIONS, choose_kernels, quantise_task
from shared.quants.jit import task_name

_NUM_WARM_UP = 4
_EXPERTS = "routed experts"
# The embedding serves as head in files without one.
_HEADS = {"output", "token_embd"}


class TimedTeam(Team):
    """A team that runs a program step by step and notes how long each took."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.steps: dict[str, Step] = defaultdict(Step)
        """By name."""
        self.tensors: dict[int, str] = {}
        """Their names by address."""

    def run(self, program: Program) -> None:
        """As of a team."""
        for number in np.unique(program.entries["step"]):
            step = Program()
            step.entries = program.entries[program.entries["step"] == number].copy()
            step.cost_ns = program.cost_ns
            step.seal()
            began = time.perf_counter()
            super().run(step)
            self.note(*self._described(step.entries), time.perf_counter() - began)

    def note(self, name: str, num_bytes: int, seconds: float) -> None:
        """One step was run; `num_bytes` of weights are read by it."""
        step = self.steps[name]
        step.num_bytes = num_bytes
        step.now.append(seconds)

    def end_token(self, is_kept: bool) -> None:
        """What was noted belongs to one token."""
        for step in self.steps.values():
            if is_kept:
                step.tokens.append(step.now)
            step.now = []

    def _described(self, entries: NDArray[np.void]) -> tuple[str, int]:
        """The name of a step and the bytes of weights that it reads."""
        num_bytes, tensors, tasks = 0, [], []
        for entry in entries:
            # The first two fields of a MATRIX; a GATHERED has the same, and its task a name.
            weights, row_bytes = (ctypes.c_int64 * 2).from_address(int(entry["params"]))
            name = "round" if entry["task"] == quantise_task() else task_name(int(entry["task"]))
            if weights in self.tensors and not (name or "").startswith("gather_"):
                tensors.append(_short(self.tensors[weights]))
                num_bytes += row_bytes * int(entry["num_items"])
            else:
                tasks.append(name or "?")
        return " ".join(tensors or tasks), num_bytes


@dataclass(slots=True)
class Step:
    """What was measured under one name."""

    num_bytes: int = 0
    """Of weights that one run reads; 0 for steps without."""
    now: list[float] = field(default_factory=list)
    """Seconds of the runs for the token at hand."""
    tokens: list[list[float]] = field(default_factory=list)

    @property
    def num_runs(self) -> int:
        """For a token."""
        return len(self.tokens[0])

    @property
    def seconds(self) -> float:
        """Of all runs for a token together, the median over the tokens."""
        return median([sum(runs) for runs in self.tokens])


class TimedExperts:
    """The routed experts, noting how long they took."""

    def __init__(self, experts: RoutedExperts, team: TimedTeam, num_bytes: int) -> None:
        """`num_bytes`: what a layer's experts read for a token."""
        self._experts = experts
        self._team = team
        self._num_bytes = num_bytes

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Computes the layer."""
        began = time.perf_counter()
        ticket = self._experts.submit(layer, x, expert_ids, weights)
        self._team.note(_EXPERTS, self._num_bytes, time.perf_counter() - began)
        return ticket

    def collect(self, ticket: int) -> Tensor:
        """What the last `submit` computed."""
        return self._experts.collect(ticket)


def profile(path: Path, num_threads: int, num_tokens: int) -> dict[str, Step]:
    """Decodes random tokens, one at a time: the steps by name."""
    team = TimedTeam(num_threads)
    computed = InProcessModel(path, team=team)
    model, config = computed.file, computed.config
    team.tensors = {model.rows(name).ctypes.data: name for name in model}
    computed.experts = TimedExperts(computed.experts, team, expert_bytes(model) // config.num_layers)
    sequence = computed.new_sequence()
    rng = np.random.default_rng(0)
    for position in range(_NUM_WARM_UP + num_tokens):
        computed.step([(sequence, [int(rng.integers(config.vocab_size // 2))])])
        team.end_token(is_kept=position >= _NUM_WARM_UP)
    team.close()
    return dict(team.steps)


def claims(steps: Mapping[str, Step], num_layers: int) -> dict[str, float]:
    """In microseconds."""
    head = steps.keys() & _HEADS
    rest = {name: step for name, step in steps.items() if name not in head and name != _EXPERTS}
    products = sum(step.seconds for step in rest.values() if step.num_bytes)
    others = sum(step.seconds for step in rest.values() if not step.num_bytes)
    return {
        "products_us_per_layer": 1e6 * products / num_layers,
        "other_us_per_layer": 1e6 * others / num_layers,
        "experts_us_per_layer": 1e6 * steps[_EXPERTS].seconds / num_layers,
        "head_us": 1e6 * sum(steps[name].seconds for name in head),
    }


def _short(tensor: str) -> str:
    """Its name without layer and suffix."""
    name = tensor.removesuffix(".weight")
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def _as_table(steps: Mapping[str, Step]) -> str:
    rows = []
    for name, step in sorted(steps.items(), key=lambda item: -item[1].seconds):
        each = step.seconds / step.num_runs
        reads = (
            (f"{step.num_bytes / 1e6:.1f}", f"{step.num_bytes / each / 1e9:.1f}")
            if step.num_bytes
            else ("", "")
        )
        rows.append([name, str(step.num_runs), f"{1e6 * each:.0f}", f"{1e6 * step.seconds:.0f}", *reads])
    return table(("step", "runs", "us each", "us a token", "MB", "GB/s"), rows)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser)
    parser.add_argument("--threads", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--tokens", type=positive, default=32, help="decoded and timed (default %(default)s)")
    parser.add_argument(
        "--cpu-activations", default=ACTIVATIONS[0], choices=ACTIVATIONS, help="default %(default)s"
    )
    add_json_argument(parser)
    parsed = parser.parse_args()
    check_model_arguments(parser, parsed)
    kernels = choose_kernels("auto", parsed.cpu_activations)
    settings = {
        "profile": parsed.profile,
        "threads": parsed.threads,
        "tokens": parsed.tokens,
        "cpu_kernels": kernels,
    }
    report = Report("step_profile", settings)

    def measure() -> int:
        path = model_path(parsed)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads, {kernels}")
        with GGUFModel(path) as model:
            report.model = {"name": model.name, "fingerprint": model.fingerprint()}
            num_layers = read_model_config(model).num_layers
            warm_page_cache(model, report)
        steps = profile(path, parsed.threads, parsed.tokens)
        say(_as_table(steps))
        report.details["steps"] = {
            name: {"runs": step.num_runs, "us": 1e6 * step.seconds, "bytes_each": step.num_bytes}
            for name, step in steps.items()
        }
        report.claim_all(claims(steps, num_layers))
        return 0

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
