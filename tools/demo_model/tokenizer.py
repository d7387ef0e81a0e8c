"""Trains the byte-pair tokenizer on the text of training conversations.

    python -m tools.demo_model.tokenizer TOKENIZER.json

Text is cut as llama.cpp's `qwen35` pre-tokenizer cuts it (`metadata.QWEN35_PATTERN`). That pattern joins a
word with any one sign before it; merges are learned with a stricter one that joins only a space, so that no
token such as `(animal` or `=word` comes about.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.config import END_THINK, ENDOFTEXT, IM_END, IM_START, IMAGE_PAD, THINK, DemoConfig
from tools.demo_model.conversations import conversation
from tools.demo_model.facts import facts
from tools.demo_model.metadata import byte_level_tokenizer

_STRICT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKENS = (ENDOFTEXT, IM_START, IM_END, THINK, END_THINK, IMAGE_PAD)
"""In the order of their ids, from `DemoConfig.eos_token_id` on."""

_NUM_EXAMPLES = 60_000


def training_text(num_examples: int, seed: int) -> Iterator[str]:
    """Conversations without their marks; then the listed words, with and without a space before them."""
    dialogue = conversation(Random(seed))
    for segments in islice(dialogue, num_examples):
        for segment in segments:
            text = segment.text
            for mark in ADDED_TOKENS:
                text = text.replace(mark, "\n")
            yield text
    for word in facts().common_words:
        yield from [" " + word] * 12 + [word] * 4
    for name in facts().names:
        yield from [" " + name] * 80


def train(vocab_size: int, num_examples: int = _NUM_EXAMPLES, seed: int = 1) -> Tokenizer:
    """A tokenizer with `vocab_size` learned tokens, then the added ones."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_STRICT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    learner.train_from_iterator(training_text(num_examples, seed), trainer)
    return with_added_tokens(learner)


def with_added_tokens(learner: Tokenizer) -> Tokenizer:
    """The learned vocabulary under the pattern that the model is served with."""

    model = json.loads(learner.to_str())["model"]
    merges = [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]
    ]
    return byte_level_tokenizer(model["vocab"], merges, ADDED_TOKENS)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    config = DemoConfig()
    tokenizer = train(config.eos_token_id)
    if tokenizer.token_to_id(ENDOFTEXT) != config.eos_token_id:
        raise ValueError(f"the text yields only {tokenizer.get_vocab_size() - len(ADDED_TOKENS)} tokens")
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output))
    sample = "What is a pelican? My name is Jasmine. 47 * 8 = 376"
    print(tokenizer.get_vocab_size(), tokenizer.encode(sample).tokens)


if __name__ == "__main__":
    main()
