"""The spans of a step as tasks see them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.model.batch import Span
from gpu_worker.native.script import Sizes
from shared.native.records import Record, RecordType

# In steps of few tokens the context of each is divided into parts, for several threads; in larger ones the
# tokens are enough to divide.
_MAX_PARTS = 8
_MAX_DIVIDED_TOKENS = 16


class SpanRecords:
    """One record of int64 fields for each span of a step, which tasks read."""

    def __init__(self, dtype: RecordType, capacity: int) -> None:
        self.records: Record = np.zeros(capacity, dtype)
        # Single elements of a memoryview are written ten times as fast as those of an array.
        self._words = self.records.view(np.int64).data
        self._num_fields = dtype.itemsize // 8

    def put(self, number: int, values: Sequence[int]) -> None:
        """All fields of the span of that number."""
        at = number * self._num_fields
        for value in values:
            self._words[at] = value
            at += 1


class StepSpans:
    """The spans of one step, to which of them a token belongs, `of_tokens` int64 [tokens], and into how many
    parts attention divides the context of each token."""

    def __init__(self, capacity: int) -> None:
        self.of_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.max_parts = max(capacity, min(capacity, _MAX_DIVIDED_TOKENS) * _MAX_PARTS)
        """Parts of all tokens of a step, at most."""
        self.all: Sequence[Span] = ()
        self.parts_per_token = 1

    def begin(self, spans: Sequence[Span], num_tokens: int) -> Sizes:
        """Takes the spans of the next step; how large it is."""
        self.all = spans
        self.parts_per_token = _MAX_PARTS if num_tokens <= _MAX_DIVIDED_TOKENS else 1
        context = 1
        for number, span in enumerate(spans):
            self.of_tokens[span.start : span.stop] = number
            context = max(context, span.position + span.num_tokens)
        # Rounded up to a power of two: a new size has to be worked out by every program.
        part_length = 1 << (-(-context // self.parts_per_token) - 1).bit_length()
        return Sizes(num_tokens, len(spans), num_tokens * self.parts_per_token, part_length)

    def end(self) -> None:
        """Lets go of the sequences: their memory is free when they have ended."""
        self.all = ()
