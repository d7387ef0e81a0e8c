"""Training batches: conversations as token ids, with a weight for each token that says whether it is trained.

A sequence is one conversation from its start, as many turns as fit, then padding: the model never sees a
conversation begin in the middle of a sequence, because none does in use.
"""

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.config import DemoConfig
from tools.demo_model.conversations import Segment, conversation
from tools.demo_model.metadata import token_id_of
from tools.demo_model.recall import recall_exercise

LENGTHS = {64: 0.2, 128: 0.38, 256: 0.3, 512: 0.09, 1024: 0.02, 2048: 0.01}
"""Sequence lengths and how often a batch has each. Short ones are mostly first turns, as most chats are."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal-length sequences, all `[B, S]`."""

    token_ids: Tensor
    targets: Tensor
    """The next token at each position."""
    weights: Tensor
    """1 where the target is part of an answer, else 0."""
    is_text: Tensor
    """False on padding."""


class BatchSource:
    """Draws batches; the same `Random` draws the same batch."""

    def __init__(self, tokenizer: Tokenizer, config: DemoConfig, num_tokens: int) -> None:
        """`num_tokens` is the size of every batch, whatever its sequence length."""
        self._tokenizer = tokenizer
        self._padding_id = config.eos_token_id
        self._num_tokens = num_tokens
        self._word_ids = sorted(
            token_id
            for token, token_id in tokenizer.get_vocab().items()
            if token.lstrip("Ġ").isascii() and token.lstrip("Ġ").isalnum()
        )
        self._separator_id = token_id_of(tokenizer, "Ċ")

    def draw(self, random: Random, length: int, recall_share: float = 0.0) -> Batch:
        """One batch; a share of its sequences are recall exercises instead of conversations."""
        rows = []
        for _ in range(self._num_tokens // length):
            if random.random() < recall_share:
                ids, flags = recall_exercise(random, self._word_ids, self._separator_id, length)
            else:
                ids, flags = self._conversation(random, length)
            rows.append((ids, flags))
        return self._assemble(rows, length)

    def _conversation(self, random: Random, length: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        flags: list[bool] = []
        misses = 0
        for segments in conversation(random):
            more_ids, more_flags = self.encode(segments)
            if len(ids) + len(more_ids) <= length:
                ids += more_ids
                flags += more_flags
            else:
                misses += 1
            if misses >= 2 and ids:
                break
        return ids, flags

    def encode(self, segments: list[Segment]) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is to be predicted."""
        ids: list[int] = []
        flags: list[bool] = []
        for segment in segments:
            more = self._tokenizer.encode(segment.text).ids
            ids += more
            flags += [segment.is_answer] * len(more)
        return ids, flags

    def _assemble(self, rows: list[tuple[list[int], list[bool]]], length: int) -> Batch:
        token_ids = torch.full((len(rows), length + 1), self._padding_id)
        is_answer = torch.zeros(len(rows), length + 1, dtype=torch.bool)
        is_text = torch.zeros(len(rows), length, dtype=torch.bool)
        for row, (ids, flags) in enumerate(rows):
            token_ids[row, : len(ids)] = torch.tensor(ids)
            is_answer[row, : len(ids)] = torch.tensor(flags)
            is_text[row, : len(ids)] = True
        return Batch(token_ids[:, :-1], token_ids[:, 1:], is_answer[:, 1:].float(), is_text)
