"""Can the experts of the next layer be guessed, so that they could be read one layer earlier?

    python -m benchmarks.foresight [--model FILE.gguf] [--json FILE]

The guess is what the next layer's router says of the activations that this layer's experts are given: all
that is known by then. A guess is worth something only for experts that are not in memory, and costs a read
whether it is right or not. So the tokens that a model decodes are replayed against a pool of a layer's last
used experts, a quarter of them, in steps of one token.

Claims, means over the layers, for guesses of as many experts as a token uses and (`_wide`) of twice as many:
`recall`, the share of a layer's experts that were guessed; `foreseen`, that of those which were not in the
pool; `right`, the share of guesses beyond the pool that were needed; `reads`, blobs read for every one that
would be read without guessing. Needs a model that was trained: a slice with random weights has routers that
know nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.arguments import add_json_argument, positive
from benchmarks.in_process import InProcessModel
from benchmarks.report import Report, describe_machine, measured, say, table
from gateway.tokenizer import Tokenizer
from gpu_worker.model.interface import RoutedExperts
from shared.demo_model import DEMO_MODEL_PATH
from shared.tensor_catalog import block_prefix

PROMPTS = (
    "Question: What is the capital of France?",
    "Write a short story about a pelican.",
    "A spoon is used to",
    "Please count from one to ten.",
    "The weather today is",
)
_POOL_SHARE = 0.25

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(slots=True)
class Tap:
    """Experts that keep what they are given."""

    experts: RoutedExperts
    activations: dict[int, list[Floats]] = field(default_factory=dict)
    chosen: dict[int, list[Ids]] = field(default_factory=dict)

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Hands it on."""
        self.activations.setdefault(layer, []).append(x.numpy().copy())
        self.chosen.setdefault(layer, []).append(expert_ids.numpy().astype(np.int32))
        return self.experts.submit(layer, x, expert_ids, weights)

    def collect(self, ticket: int) -> Tensor:
        """As it comes."""
        return self.experts.collect(ticket)


@dataclass(frozen=True, slots=True)
class Guess:
    """What guessing one layer would have been worth."""

    recall: float
    foreseen: float
    right: float
    reads: float


_CLAIMS = tuple(part.name for part in fields(Guess))


def replay(scores: Floats, chosen: Ids, num_guessed: int, num_places: int) -> Guess:
    """Guesses of the highest of scores [tokens, experts] against what was chosen [tokens, used], with the
    `num_places` last used experts in memory."""
    num_tokens, num_experts = scores.shape
    guesses = np.argsort(-scores, axis=1)[:, :num_guessed]
    last_used = np.full(num_experts, -1)
    found = num_missed = num_foreseen = num_guessed_beyond = 0
    for token in range(num_tokens):
        in_pool = np.argsort(-last_used, kind="stable")[:num_places]
        in_pool = in_pool[last_used[in_pool] >= 0]
        missed = np.setdiff1d(chosen[token], in_pool)
        beyond = np.setdiff1d(guesses[token], in_pool)
        found += len(np.intersect1d(chosen[token], guesses[token]))
        num_missed += len(missed)
        num_foreseen += len(np.intersect1d(missed, beyond))
        num_guessed_beyond += len(beyond)
        last_used[chosen[token]] = token
    return Guess(
        recall=found / chosen.size,
        foreseen=num_foreseen / max(1, num_missed),
        right=num_foreseen / max(1, num_guessed_beyond),
        reads=(num_missed - num_foreseen + num_guessed_beyond) / max(1, num_missed),
    )


def guesses(path: Path, prompts: Sequence[str], num_new: int) -> dict[str, list[Guess]]:
    """For each width of a guess those of all layers but the first."""
    model = InProcessModel(path, torch_device=torch.device("cpu"))
    config, tap = model.config, Tap(model.experts)
    model.experts = tap
    tokenizer = Tokenizer.from_metadata(model.file.metadata, path.name)
    for prompt in prompts:
        turn = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        model.greedy(tokenizer.encode(turn), num_new)
    found: dict[str, list[Guess]] = {"": [], "_wide": []}
    for layer in range(1, config.num_layers):
        router = model.file.rows(f"{block_prefix(layer)}ffn_gate_inp.weight").view(np.float32)
        scores = np.concatenate(tap.activations[layer - 1]) @ router.T
        chosen = np.concatenate(tap.chosen[layer])
        for name, factor in (("", 1), ("_wide", 2)):
            num_guessed = factor * config.num_experts_used
            places = int(_POOL_SHARE * config.num_experts)
            found[name].append(replay(scores, chosen, num_guessed, places))
    return found


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_PATH, help="(default: the demo model)")
    parser.add_argument(
        "--new-tokens", type=positive, default=120, metavar="N", help="of each answer (default %(default)s)"
    )
    add_json_argument(parser)
    parsed = parser.parse_args()
    report = Report("foresight", {"new_tokens": parsed.new_tokens, "pool_share": _POOL_SHARE})

    def measure() -> int:
        say(f"{describe_machine()}; {parsed.model.name}")
        report.model = {"name": parsed.model.name}
        found = guesses(parsed.model, PROMPTS, parsed.new_tokens)
        for name, layers in found.items():
            rows = [
                [f"layer {number}{name}", *(f"{value:.2f}" for value in astuple(guess))]
                for number, guess in enumerate(layers, 1)
            ]
            say(table(("", *_CLAIMS), rows))
            means = np.mean([astuple(guess) for guess in layers], axis=0)
            report.claim_all({f"{claim}{name}": mean for claim, mean in zip(_CLAIMS, means, strict=True)})
        return 0

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
