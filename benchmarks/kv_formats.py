"""What it costs to keep keys and values in fewer bits (`--kv-type`), and what it saves.

    python -m benchmarks.kv_formats [--model FILE.gguf | --profile iq2_xs] [--quick] [--json FILE]

By default of the demo model. Each type reads the same tokens, the right one whatever it would have said:
conversations of the demo model's held-out prompts one after the other, up to `--tokens`, or random tokens for
a slice (`benchmarks.slices`; a few experts, of which keys and values know nothing). Its predictions are
compared with those of f16, and of f32. Speed is that of single tokens behind contexts of `--contexts` tokens,
whose keys and values are random, in turns of a few tokens for each type, so that what else the machine does
meets all of them.

Claims, for each type: `bytes_per_1k_tokens`, `memory_ratio` (of f16's), `kl` and `top1` (mean
Kullback-Leibler divergence in nats, and how often the likeliest token is the same) against f16, `kl_f32`
against f32, and `decode_tokens_per_s` by length of the context. The exit code is 1 where int8 or k8v4 are
further from f16 than any effect on text (`benchmarks.quality`).
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.arguments import add_json_argument, positive, positives
from benchmarks.in_process import InProcessModel, RunningSequence
from benchmarks.prompts import Prompts
from benchmarks.quality import NEGLIGIBLE, divergences
from benchmarks.report import Report, describe_machine, measured, median, say, table
from benchmarks.slices import add_model_arguments, check_model_arguments, model_path
from gateway.tokenizer import Tokenizer
from shared.config import GpuWorkerConfig
from shared.demo_model import DEMO_MODEL_PATH
from shared.gguf.model import GGUFModel
from shared.kv_format import KV_FORMATS
from shared.native.team import Team
from shared.placement.sizes import context_bytes
from tools.demo_model.config import IM_END
from tools.demo_model.conversations import held_out_prompts

_SLICE_EXPERTS = 32
# Tokens that are compared at a time: logits of all types are there at once.
_CHUNK = 64
# Tokens of one type before it is another's turn, of which the first is not timed.
_TURN = 5

Models = dict[str, InProcessModel]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    num_texts: int
    num_tokens: int
    """Of a text, at most."""
    contexts: tuple[int, ...]
    rounds: int


FULL = Plan(num_texts=8, num_tokens=2048, contexts=(8192, 32768), rounds=24)
QUICK = Plan(num_texts=1, num_tokens=256, contexts=(1024, 4096), rounds=3)


@dataclass(slots=True)
class Distance:
    """How far predictions are from others."""

    kl: float = 0.0
    num_same: int = 0
    num_tokens: int = 0

    def add(self, expected: NDArray[np.float32], given: NDArray[np.float32]) -> None:
        """Of logits [tokens, vocabulary]."""
        self.kl += float(divergences(expected, given).sum())
        self.num_same += int((expected.argmax(-1) == given.argmax(-1)).sum())
        self.num_tokens += len(expected)

    @property
    def mean_kl(self) -> float:
        """In nats per token."""
        return self.kl / self.num_tokens

    @property
    def top1(self) -> float:
        """How often the likeliest token is the same."""
        return self.num_same / self.num_tokens


def open_models(path: Path, team: Team) -> Models:
    """One of each type, which compute with one team."""
    return {
        kv_type: InProcessModel(path, team=team, settings=GpuWorkerConfig(kv_type=kv_type))
        for kv_type in KV_FORMATS
    }


def conversations(model: GGUFModel, path: Path, num_texts: int, num_tokens: int) -> Iterator[list[int]]:
    """Texts of so many tokens, of the demo model's held-out questions and answers in any order."""
    tokenizer = Tokenizer.from_metadata(model.metadata, path.name)
    prompts = held_out_prompts()
    Random(0).shuffle(prompts)
    token_ids: list[int] = []
    for prompt in prompts:
        token_ids += tokenizer.encode(f"{prompt.text()}{prompt.answer}{IM_END}\n")
        if len(token_ids) >= num_tokens:
            yield token_ids[:num_tokens]
            token_ids, num_texts = [], num_texts - 1
        if num_texts == 0:
            return


def distances(models: Models, texts: Sequence[Sequence[int]]) -> dict[tuple[str, str], Distance]:
    """Of each type from f16 and from f32: by (that, type)."""
    found: dict[tuple[str, str], Distance] = defaultdict(Distance)
    for token_ids in texts:
        sequences = {kv_type: model.new_sequence() for kv_type, model in models.items()}
        for first in range(0, len(token_ids), _CHUNK):
            chunk = token_ids[first : first + _CHUNK]
            logits = {
                kv_type: model.step([(sequences[kv_type], chunk)])[0] for kv_type, model in models.items()
            }
            for reference in ("f16", "f32"):
                for kv_type in models:
                    found[reference, kv_type].add(logits[reference], logits[kv_type])
    return found


def filled_sequence(model: InProcessModel, num_tokens: int, token_ids: Sequence[int]) -> RunningSequence:
    """A sequence as if it had read so many tokens, these over and over: keys and values of all positions, and
    the indexer's, are random."""
    sequence = model.new_sequence()
    sequence.token_ids += np.resize(token_ids, num_tokens).tolist()
    state = sequence.state
    # And for those that are decoded then.
    state.reserve(num_tokens + 1024)
    rows = state.rows(num_tokens)
    config, generator = model.config, torch.Generator().manual_seed(0)
    for attention in state.attention.values():
        store = attention.store
        for first in range(0, num_tokens, 1024):
            part = rows[first : first + 1024]
            shape = (2, len(part), config.num_kv_heads, config.head_dim)
            store.put(part, *torch.randn(shape, generator=generator))
        store.block_keys[:] = torch.randn(store.block_keys.shape, generator=generator)
    state.position = num_tokens
    return sequence


def decode_speeds(models: Models, num_tokens: int, rounds: int, token_ids: Sequence[int]) -> dict[str, float]:
    """Tokens per second of each type behind a context of so many: by the median of its tokens' times."""
    sequences = {kv_type: filled_sequence(model, num_tokens, token_ids) for kv_type, model in models.items()}
    seconds: dict[str, list[float]] = {kv_type: [] for kv_type in models}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        turn = [int(token_id) for token_id in rng.choice(token_ids, _TURN)]
        # Each comes after each other one: caches have what the one before has left there.
        for kv_type in rng.permutation(list(models)):
            model = models[kv_type]
            for number, token_id in enumerate(turn):
                began = time.perf_counter()
                model.step([(sequences[kv_type], [token_id])])
                if number:
                    seconds[kv_type].append(time.perf_counter() - began)
    return {kv_type: 1 / median(times) for kv_type, times in seconds.items()}


def claims(
    models: Models,
    found: dict[tuple[str, str], Distance],
    speeds: dict[int, dict[str, float]],
) -> dict[str, float]:
    """By their names."""
    config = models["f16"].config
    of_1k = {kv_type: context_bytes(config, 1024, kept) for kv_type, kept in KV_FORMATS.items()}
    made: dict[str, float] = {}
    for kv_type in models:
        made[f"bytes_per_1k_tokens_{kv_type}"] = of_1k[kv_type]
        made[f"memory_ratio_{kv_type}"] = of_1k[kv_type] / of_1k["f16"]
        made[f"kl_{kv_type}"] = found["f16", kv_type].mean_kl
        made[f"top1_{kv_type}"] = found["f16", kv_type].top1
        made[f"kl_f32_{kv_type}"] = found["f32", kv_type].mean_kl
        for context, by_type in speeds.items():
            made[f"decode_tokens_per_s_{kv_type}_{context}"] = by_type[kv_type]
    return made


def _as_table(made: dict[str, float], contexts: Sequence[int]) -> str:
    rows = [
        [
            kv_type,
            f"{made[f'bytes_per_1k_tokens_{kv_type}'] / 2**20:.2f}",
            f"{made[f'memory_ratio_{kv_type}']:.2f}",
            f"{made[f'kl_{kv_type}']:.1e}",
            f"{made[f'top1_{kv_type}']:.2%}",
            f"{made[f'kl_f32_{kv_type}']:.1e}",
            *(f"{made[f'decode_tokens_per_s_{kv_type}_{context}']:.1f}" for context in contexts),
        ]
        for kv_type in KV_FORMATS
    ]
    speeds = (f"tokens/s at {context}" for context in contexts)
    return table(("", "MiB per 1024", "of f16", "KL to f16", "top-1", "KL to f32", *speeds), rows)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_model_arguments(parser, experts=_SLICE_EXPERTS)
    parser.add_argument("--threads", type=positive, default=2, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="less of everything, in seconds")
    parser.add_argument("--texts", type=positive, metavar="N", help=f"default {FULL.num_texts}")
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help=f"of a text, at most (default {FULL.num_tokens})"
    )
    parser.add_argument(
        "--contexts",
        type=positives,
        metavar="N,N",
        help=f"whose speed is measured (default {','.join(map(str, FULL.contexts))})",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"of speed (default {FULL.rounds})")
    add_json_argument(parser)
    parsed = parser.parse_args()
    is_random = parsed.model is None and parsed.profile is not None
    if parsed.model is None and parsed.profile is None:
        parsed.model = DEMO_MODEL_PATH
    check_model_arguments(parser, parsed)
    usual = QUICK if parsed.quick else FULL
    plan = Plan(
        parsed.texts or usual.num_texts,
        parsed.tokens or usual.num_tokens,
        parsed.contexts or usual.contexts,
        parsed.rounds or usual.rounds,
    )
    report = Report("kv_formats", {"profile": parsed.profile, "threads": parsed.threads})

    def measure() -> int:
        path = model_path(parsed)
        say(f"{describe_machine()}; {path.name}, {parsed.threads} threads")
        with GGUFModel(path) as model:
            report.model = {"name": model.name, "fingerprint": model.fingerprint()}
            random = Prompts(model, seed=0)
            if is_random:
                texts = [random.draw(plan.num_tokens) for _ in range(plan.num_texts)]
            else:
                texts = list(conversations(model, path, plan.num_texts, plan.num_tokens))
            token_ids = random.draw(256)
        team = Team(parsed.threads)
        try:
            models = open_models(path, team)
            found = distances(models, texts)
            speeds = {
                context: decode_speeds(models, context, plan.rounds, token_ids) for context in plan.contexts
            }
        finally:
            team.close()
        made = claims(models, found, speeds)
        report.details["num_tokens"] = found["f32", "f16"].num_tokens
        say(_as_table(made, plan.contexts))
        report.claim_all(made)
        return int(max(made["kl_int8"], made["kl_k8v4"]) > NEGLIGIBLE)

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
