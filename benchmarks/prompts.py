"""Prompts that nobody has had before, so that nothing of them is known or in memory already."""

import numpy as np
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel

_NORMAL_TOKEN = 1


class Prompts:
    """Random prompts of ordinary tokens, each a different one."""

    def __init__(self, model: GGUFModel, seed: int) -> None:
        kinds = np.asarray(model.metadata["tokenizer.ggml.token_type"])
        self._ordinary: NDArray[np.int64] = np.flatnonzero(kinds == _NORMAL_TOKEN)
        self._rng = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> list[int]:
        """One prompt."""
        return [int(token_id) for token_id in self._rng.choice(self._ordinary, num_tokens)]

    def draw_distinct(self, num_tokens: int) -> list[int]:
        """Tokens of which none comes twice. Raises ValueError where there are not as many."""
        return [int(token_id) for token_id in self._rng.choice(self._ordinary, num_tokens, replace=False)]
