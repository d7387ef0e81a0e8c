"""Prompts of conversations: of the demo model's skills, and of words without meaning for other models."""

from collections.abc import Iterator
from itertools import chain

from benchmarks.prompts import Prompts
from benchmarks.topics import DEMO_NAME
from gateway.tokenizer import Tokenizer
from shared.gguf.model import GGUFModel
from tools.demo_model.config import IM_END
from tools.demo_model.conversations import Prompt
from tools.demo_model.topics import TOPICS, topic_prompts


def skill_questions(tokenizer: Tokenizer, seed: int, per_topic: int) -> list[list[int]]:
    """Token ids of held-out questions to the demo model, of one topic after the other; answers end by
    themselves."""
    return [tokenizer.encode(prompt.text()) for topic in TOPICS for prompt in _taken(topic, seed, per_topic)]


def _taken(topic: str, seed: int, number: int) -> list[Prompt]:
    prompts = topic_prompts(topic, seed)
    return [next(prompts) for _ in range(number)]


class Dialogues:
    """Conversations that nobody has had before, as a client would send them: as token ids, turn by turn."""

    def __init__(self, model: GGUFModel, seed: int) -> None:
        self._tokenizer = Tokenizer.from_metadata(model.metadata, model.name)
        self._is_taught = model.name == DEMO_NAME
        self._words = Prompts(model, seed)
        self._seed = seed
        self._num_begun = 0
        self._questions: Iterator[Prompt] = iter(())
        self._ids_by_text: dict[str, int] = {}

    def begin(self, num_tokens: int) -> list[int]:
        """The first turn of one, of exactly so many tokens: questions to the demo model with their right
        answers, the oldest of them cut off, and one that is open."""
        if not self._is_taught:
            return self._words.draw(num_tokens)
        self._num_begun += 1
        seed = 1000 * self._seed + self._num_begun
        by_topic = [topic_prompts(topic, seed) for topic in TOPICS]
        self._questions = chain.from_iterable(zip(*by_topic, strict=True))
        history: list[int] = []
        while True:
            prompt = next(self._questions)
            whole = history + self._tokenizer.encode(prompt.text())
            if len(whole) >= num_tokens:
                return whole[-num_tokens:]
            history = whole + self._answered(prompt.answer)

    def go_on(self, prompt: list[int], answer: str, num_tokens: int) -> list[int]:
        """The next turn after an answer, with about so many tokens to ask: one question to the demo model."""
        if not self._is_taught:
            return prompt + self._word_by_word(answer) + self._words.draw(num_tokens)
        return prompt + self._answered(answer) + self._tokenizer.encode(next(self._questions).text())

    def _word_by_word(self, answer: str) -> list[int]:
        """The tokens of an answer of a slice, always the longest that fits: each is a word that no merges
        lead to, so that encoding gives others. Raises ValueError for an answer that is not of its words."""
        if not self._ids_by_text:
            token_bytes = self._tokenizer.token_bytes
            texts = (
                token_bytes(token_id).decode(errors="replace")
                for token_id in range(self._tokenizer.num_tokens)
            )
            self._ids_by_text = {text: token_id for token_id, text in enumerate(texts) if text}
        longest = max(map(len, self._ids_by_text))
        found: list[int] = []
        at = 0
        while at < len(answer):
            sizes = range(min(longest, len(answer) - at), 0, -1)
            size = next((size for size in sizes if answer[at : at + size] in self._ids_by_text), None)
            if size is None:
                raise ValueError(f"{answer[at]!r} is no token of the model")
            found.append(self._ids_by_text[answer[at : at + size]])
            at += size
        return found

    def _answered(self, answer: str) -> list[int]:
        return self._tokenizer.encode(f"{answer}{IM_END}\n")
