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
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import Report, describe_machine, median, say, table
from benchmarks.slices import PROFILES, default_directory, ensure_slice
from cpu_worker.expert_layer import ExpertLayer
from gpu_worker.device.cpu import CpuDevice
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.qwen4exp import Qwen4Exp
from shared.errors import StrataError
from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig, Qwen4ExpConfig, read_model_config
from shared.native.program import Program
from shared.native.team import Team
from shared.quants import ACTIVATIONS, choose_kernels, quantise_task
from shared.quants.jit import task_name
from shared.tensor_catalog import check_tensors
from stager.ngram_hash import NgramHash, windows_of
from stager.ngram_table import NgramTable

_NUM_WARM_UP = 4
_EXPERTS = "routed experts"
_HEAD = "output"
# The embedding serves as head in files without one; of its rows one is read otherwise.
_LEAST_HEAD_BYTES = 100_000


class TimedTeam(Team):
    """A team that runs a program step by step and notes how long each took."""

    def __init__(self, model: GGUFModel, num_threads: int) -> None:
        super().__init__(num_threads)
        self.steps: dict[str, Step] = defaultdict(Step)
        """By name."""
        self._tensors = {model.rows(name).ctypes.data: name for name in model}

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
            # The first two fields of a MATRIX; nothing else begins with the address of a tensor.
            weights, row_bytes = (ctypes.c_int64 * 2).from_address(int(entry["params"]))
            if weights in self._tensors:
                tensors.append(_short(self._tensors[weights]))
                num_bytes += row_bytes * int(entry["num_items"])
            elif entry["task"] == quantise_task():
                tasks.append("round")
            else:
                tasks.append(task_name(int(entry["task"])) or "?")
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
    """The routed experts, computed when they are submitted, on the same threads."""

    def __init__(self, model: GGUFModel, config: Qwen4ExpConfig, team: TimedTeam) -> None:
        self._layers = [ExpertLayer(model, layer) for layer in range(config.num_layers)]
        self._team = team
        sizes = [model.rows(name).nbytes for name in model if name.endswith("_exps.weight")]
        self._num_bytes = sum(sizes) * config.num_experts_used // config.num_experts // config.num_layers
        self._output = torch.empty(0)

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Computes the layer."""
        output = np.empty_like(x.numpy())
        routes = expert_ids.numpy().astype(np.int32), weights.numpy()
        began = time.perf_counter()
        self._layers[layer].compute(x.numpy(), *routes, output, self._team)
        self._team.note(_EXPERTS, self._num_bytes, time.perf_counter() - began)
        self._output = torch.from_numpy(output)
        return layer

    def collect(self, ticket: int) -> Tensor:
        """What the last `submit` computed."""
        return self._output


class Features:
    """The n-gram features of the last token that was set."""

    def __init__(self, model: GGUFModel, config: NgramConfig) -> None:
        self._hash = NgramHash(config)
        self._table = NgramTable(model, config)
        self._size = config.ngram_size
        self.token_ids: list[int] = []

    def collect(self) -> Tensor:
        """Hashed and read now."""
        windows = windows_of(np.array(self.token_ids[-self._size :], np.int32), self._size)
        return torch.from_numpy(self._table.features(self._hash.rows(windows[-1:])))


def profile(model: GGUFModel, num_threads: int, num_tokens: int) -> dict[str, Step]:
    """Decodes random tokens, one at a time: the steps by name."""
    config = read_model_config(model)
    check_tensors(model, config)
    device = CpuDevice(model, 1)
    team = device.team = TimedTeam(model, num_threads)
    has_own_head = "output.weight" in model
    computed = Qwen4Exp(device, config, has_own_head=has_own_head, report=lambda *_: None)
    experts = TimedExperts(model, config, team)
    features = Features(model, config.ngram) if config.ngram is not None else None
    state = computed.new_state()
    rng = np.random.default_rng(0)
    token_ids: list[int] = []
    for position in range(_NUM_WARM_UP + num_tokens):
        token_ids.append(int(rng.integers(config.vocab_size // 2)))
        if features is not None:
            features.token_ids = token_ids
        batch = Batch(torch.tensor(token_ids[-1:]), torch.tensor([position]), [Span(0, 1, state)])
        computed.logits(computed.forward(batch, experts, features))
        team.end_token(is_kept=position >= _NUM_WARM_UP)
    device.close()
    return dict(team.steps)


def claims(steps: Mapping[str, Step], num_layers: int) -> dict[str, float]:
    """In microseconds."""
    head = {
        name for name in steps if name in (_HEAD, "token_embd") and steps[name].num_bytes > _LEAST_HEAD_BYTES
    }
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
    parser.add_argument("--profile", choices=PROFILES, help="a slice to measure with")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="measure with this file instead")
    parser.add_argument("--layers", type=int, default=4, help="of a slice (default %(default)s)")
    parser.add_argument("--slice-dir", type=Path, default=default_directory(), help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="decoded and timed (default %(default)s)")
    parser.add_argument("--cpu-activations", default="int16", choices=ACTIVATIONS, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file that gets all results")
    parsed = parser.parse_args()
    if parsed.model is None and parsed.profile is None:
        parser.error(f"name a --profile ({', '.join(PROFILES)}) or a --model")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kernels = choose_kernels("auto", parsed.cpu_activations)
    settings = {"threads": parsed.threads, "tokens": parsed.tokens, "cpu_kernels": kernels}
    report = Report("step_profile", settings)
    try:
        path = parsed.model or ensure_slice(parsed.slice_dir, parsed.profile, parsed.layers)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads, {kernels}")
        with GGUFModel(path) as model:
            report.model = {"name": model.name, "fingerprint": model.fingerprint()}
            steps = profile(model, parsed.threads, max(1, parsed.tokens))
            num_layers = read_model_config(model).num_layers
    except (StrataError, OSError) as error:
        print(f"step_profile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(_as_table(steps))
    report.details["steps"] = {
        name: {"runs": step.num_runs, "us": 1e6 * step.seconds, "bytes_each": step.num_bytes}
        for name, step in steps.items()
    }
    for name, value in claims(steps, num_layers).items():
        report.claim(name, value)
    if parsed.json:
        report.write(parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
