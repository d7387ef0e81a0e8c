"""Conversations about one topic, then another: what changes which experts a model uses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.prompts import Prompts
from gateway.tokenizer import Tokenizer
from shared.gguf.model import GGUFModel
from tools.demo_model.topics import TOPICS, topic_prompts

DEMO_NAME = "strata-demo"
"""What the demo model calls itself."""
NUM_TOPICS = len(TOPICS)
# Of topics for a model that knows none: their words, of which the r-th is drawn 1/r as often as the first,
# and the tokens of a conversation.
_NUM_WORDS = 64
_PROMPT_TOKENS, _ANSWER_TOKENS = 16, 48


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids: a prompt, which is one step; and an answer, of which each token is a window. Both are given,
    so that everyone who is measured computes the same."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Conversations about one topic, one after the other."""

    topic: int
    conversations: tuple[Conversation, ...]

    @property
    def num_windows(self) -> int:
        """Tokens of all answers."""
        return sum(len(conversation.answer) for conversation in self.conversations)


Source = Callable[[int, int], Iterator[Conversation]]
"""Conversations without end, the same for one seed: of a topic, a number below `NUM_TOPICS`, and a seed."""


def source_of(model: GGUFModel) -> Source:
    """What to talk about with a model: with the demo model about what it was taught; with others, slices
    above all, in words without meaning, each topic's its own."""
    return _questions(model) if model.name == DEMO_NAME else _words(model)


def _questions(model: GGUFModel) -> Source:
    """Answers are the right ones, which greedy decoding writes nearly always."""
    tokenizer = Tokenizer.from_metadata(model.metadata, model.name)
    names = list(TOPICS)

    def conversations(topic: int, seed: int) -> Iterator[Conversation]:
        for prompt in topic_prompts(names[topic], seed):
            yield Conversation(tuple(tokenizer.encode(prompt.text())), tuple(tokenizer.encode(prompt.answer)))

    return conversations


def _words(model: GGUFModel) -> Source:
    weights = 1 / np.arange(1, _NUM_WORDS + 1)
    weights /= weights.sum()
    vocabulary = Prompts(model, seed=0).draw_distinct(NUM_TOPICS * _NUM_WORDS)

    def conversations(topic: int, seed: int) -> Iterator[Conversation]:
        words = vocabulary[topic * _NUM_WORDS : (topic + 1) * _NUM_WORDS]
        rng = np.random.default_rng((seed, topic))
        while True:
            drawn = rng.choice(words, _PROMPT_TOKENS + _ANSWER_TOKENS, p=weights).tolist()
            yield Conversation(tuple(drawn[:_PROMPT_TOKENS]), tuple(drawn[_PROMPT_TOKENS:]))

    return conversations


def changes(num_changes: int) -> list[int]:
    """The topics of so many changes and one stretch more, the first one 0. Each topic follows each other one
    once before anything comes again."""
    circuit = [topic for pair in combinations(range(NUM_TOPICS), 2) for topic in pair]
    return [circuit[number % len(circuit)] for number in range(num_changes + 1)]


def script(source: Source, topics: Sequence[int], seed: int, num_windows: int) -> list[Stretch]:
    """A stretch for each of these topics, of so many windows; a topic that comes again goes on."""
    running = {topic: source(topic, seed) for topic in set(topics)}
    return [Stretch(topic, _taken(running[topic], num_windows)) for topic in topics]


def _taken(conversations: Iterator[Conversation], num_windows: int) -> tuple[Conversation, ...]:
    """The next ones; the last answer is cut where there are more windows."""
    chosen: list[Conversation] = []
    left = num_windows
    while left:
        conversation = next(conversations)
        chosen.append(Conversation(conversation.prompt, conversation.answer[:left]))
        left -= len(chosen[-1].answer)
    return tuple(chosen)


def largest_step(stretches: Sequence[Stretch]) -> int:
    """Tokens of the longest prompt."""
    return max(len(talk.prompt) for part in stretches for talk in part.conversations)
