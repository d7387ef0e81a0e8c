"""A model file opened by Strata, beside the reference that says what it computes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.in_process import InProcessModel
from tests.support.reference_model import ReferenceModel, random_tokens


@dataclass(slots=True)
class Prepared:
    """One model, ready to be compared."""

    reference: ReferenceModel
    model: InProcessModel
    _expected: dict[tuple[int, ...], NDArray[np.float32]] = field(default_factory=dict)

    def expected(self, token_ids: list[int]) -> NDArray[np.float32]:
        """The reference's logits, computed once for each prompt."""
        key = tuple(token_ids)
        if key not in self._expected:
            self._expected[key] = self.reference.logits(token_ids)
        return self._expected[key]

    def prompt(self, num_tokens: int, seed: int = 1) -> list[int]:
        """Random ordinary tokens."""
        return random_tokens(self.reference.shape, num_tokens, seed)

    @property
    def prompt_with_ends(self) -> list[int]:
        """A prompt with ends of text where n-grams could go wrong: first, last, in a row, near each other."""
        token_ids = self.prompt(40)
        for place in (0, 5, 6, 9, 11, 20, 23, 39):
            token_ids[place] = self.reference.shape.eos_token_id
        return token_ids
