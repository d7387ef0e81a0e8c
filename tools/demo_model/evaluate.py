"""Scores a checkpoint on the held-out prompts: share of answers exactly right, skill by skill.

    python -m tools.demo_model.evaluate CHECKPOINT_OR_GGUF

An answer counts when every token of it, the end of turn included, is the most likely one after the right
tokens before it: then, and only then, greedy decoding writes exactly that answer. So one forward pass
scores a prompt. With a prediction block, the share of accepted drafts is printed too. Exits non-zero where
a promised skill is below the bar.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.config import IM_END
from tools.demo_model.conversations import Prompt, held_out_prompts
from tools.demo_model.delta_net import CHUNK
from tools.demo_model.kernels import uncompiled
from tools.demo_model.model import DemoModel, Trace
from tools.demo_model.prediction import PredictionBlock
from tools.demo_model.skills import BAR, SKILLS
from tools.demo_model.to_transformers import load_checkpoint

_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer as token ids."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(slots=True)
class Score:
    """Counts for one skill."""

    num_prompts: int = 0
    num_exact: int = 0
    num_tokens: int = 0
    num_right_tokens: int = 0

    @property
    def exact(self) -> float:
        """Share of answers that are exactly right."""
        return self.num_exact / self.num_prompts

    @property
    def token(self) -> float:
        """Share of answer tokens that are right."""
        return self.num_right_tokens / self.num_tokens


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Example]:
    """Token ids of prompts and answers, the end of turn included."""
    return [
        Example(
            prompt,
            tuple(tokenizer.encode(prompt.text()).ids),
            tuple(tokenizer.encode(prompt.answer + IM_END).ids),
        )
        for prompt in prompts
    ]


def batched(examples: Sequence[Example], padding_id: int) -> Iterator[tuple[list[Example], torch.Tensor]]:
    """Examples of like length together, with their padded token ids `[B, S]`."""
    by_length: dict[int, list[Example]] = defaultdict(list)
    for example in examples:
        length = len(example.prompt_ids) + len(example.answer_ids)
        by_length[-(-length // CHUNK) * CHUNK].append(example)
    for length, group in sorted(by_length.items()):
        size = max(1, _BATCH_TOKENS // length)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            token_ids = torch.full((len(part), length), padding_id)
            for row, example in enumerate(part):
                ids = (*example.prompt_ids, *example.answer_ids)
                token_ids[row, : len(ids)] = torch.tensor(ids)
            yield part, token_ids


@torch.no_grad()
@uncompiled()
def score(
    model: DemoModel, examples: Sequence[Example]
) -> tuple[dict[str, Score], list[tuple[Example, list[int]]]]:
    """Scores by skill, and the examples that failed with what the model preferred at each answer token."""
    scores: dict[str, Score] = defaultdict(Score)
    failures: list[tuple[Example, list[int]]] = []
    for part, token_ids in batched(examples, model.config.eos_token_id):
        hidden = model.hidden(token_ids).view(*token_ids.shape, -1)
        for row, example in enumerate(part):
            start = len(example.prompt_ids)
            stop = start + len(example.answer_ids)
            chosen = model.lm_head(hidden[row, start - 1 : stop - 1]).argmax(-1).tolist()
            num_right = sum(map(int.__eq__, chosen, example.answer_ids))
            entry = scores[example.prompt.skill]
            entry.num_prompts += 1
            entry.num_tokens += len(chosen)
            entry.num_right_tokens += num_right
            entry.num_exact += num_right == len(chosen)
            if num_right < len(chosen):
                failures.append((example, chosen))
    return dict(scores), failures


@dataclass(slots=True)
class Acceptance:
    """How often the first drafts are all what the model goes on to write; index 0 counts the first draft."""

    num_drafted: list[int]
    num_accepted: list[int]

    def rates(self) -> list[float]:
        """Share of positions where the first draft, the first two, … are right."""
        return [
            accepted / drafted for accepted, drafted in zip(self.num_accepted, self.num_drafted, strict=True)
        ]


@torch.no_grad()
@uncompiled()
def acceptance(
    model: DemoModel, block: PredictionBlock, examples: Sequence[Example], depth: int = 4
) -> Acceptance:
    """Drafts from every token of every answer that the model gets right, as greedy decoding would."""
    result = Acceptance([0] * depth, [0] * depth)
    for part, token_ids in batched(examples, model.config.eos_token_id):
        streams = model.streams(token_ids)
        choices = (
            model.lm_head(model.model.hyper_connection_mixer.read(streams)).argmax(-1).view(token_ids.shape)
        )
        embedded = model.model.embed_tokens(token_ids.flatten())
        drafts = [
            model.lm_head(hidden).argmax(-1).view(token_ids.shape)
            for hidden in block.chain(embedded, streams, len(part), depth, Trace())
        ]
        for row, example in enumerate(part):
            start = len(example.prompt_ids)
            stop = start + len(example.answer_ids)
            if choices[row, start - 1 : stop - 1].tolist() != list(example.answer_ids):
                continue
            for last_accepted in range(start, stop - 1):
                for order in range(min(depth, stop - 1 - last_accepted)):
                    place = last_accepted + order
                    result.num_drafted[order] += 1
                    if drafts[order][row, place] != token_ids[row, place + 1]:
                        # Whatever follows a wrong draft is rejected with it.
                        for later in range(order + 1, min(depth, stop - 1 - last_accepted)):
                            result.num_drafted[later] += 1
                        break
                    result.num_accepted[order] += 1
    return result


def table(scores: dict[str, Score]) -> str:
    """The results as a markdown table; promised skills are marked."""
    lines = ["| skill | promised | n | exact | token |", "|---|---|---|---|---|"]
    for skill in SKILLS:
        if skill.name in scores:
            entry = scores[skill.name]
            mark = "yes" if skill.is_promised else ""
            lines.append(
                f"| {skill.name} | {mark} | {entry.num_prompts} | {entry.exact:.2f} | {entry.token:.3f} |"
            )
    return "\n".join(lines)


def broken_promises(scores: dict[str, Score]) -> list[str]:
    """Promised skills below the bar."""
    return [skill.name for skill in SKILLS if skill.is_promised and scores[skill.name].exact < BAR]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint directory or GGUF file")
    parser.add_argument("--failures", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    arguments = parser.parse_args()
    source: Path = arguments.source
    checkpoint = Checkpoint.load(source) if source.is_dir() else load_checkpoint(source)
    model = DemoModel(checkpoint.config)
    model.load_state_dict(checkpoint.trunk)
    examples = encode(held_out_prompts(), checkpoint.tokenizer)
    scores, failures = score(model, examples)
    print(table(scores))
    if checkpoint.has_prediction:
        block = PredictionBlock(checkpoint.config)
        block.load_state_dict(checkpoint.prediction)
        rates = acceptance(model, block, examples).rates()
        print(
            "first drafts all accepted:",
            ", ".join(f"{count}: {rate:.3f}" for count, rate in enumerate(rates, 1)),
        )
    for example, chosen in failures[: arguments.failures]:
        print(f"{example.prompt.skill}: {example.prompt.question!r}")
        print(f"    expected {example.prompt.answer!r}\n    likely   {checkpoint.tokenizer.decode(chosen)!r}")
    if arguments.json:
        results = {name: {"exact": entry.exact, "token": entry.token} for name, entry in scores.items()}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if broken := broken_promises(scores):
        sys.exit(f"promised, but below {BAR}: {', '.join(broken)}")


if __name__ == "__main__":
    main()
