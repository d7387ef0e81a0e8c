"""The spans of a step as tasks see them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.model.batch import Span
from gpu_worker.native.script import Sizes
from shared.native.records import Record, RecordType
from shared.native.task import address_of

NUM_PARTS = 8
"""Parts of the context of each token."""
# In steps of few tokens parts are shared out among threads; in larger ones the tokens are enough.
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


class SnapshotRecords:
    """Records of int64 fields of the snapshots of one span, which tasks read: none, in nearly all steps."""

    def __init__(self, dtype: RecordType) -> None:
        self._num_fields = dtype.itemsize // 8
        self._kept: list[NDArray[np.int64]] = []

    def begin(self) -> None:
        """Lets go of those of the last step."""
        self._kept.clear()

    def put(self, rows: Sequence[Sequence[int]]) -> tuple[int, int]:
        """The address of records with these fields, and their number."""
        if not rows:
            return 0, 0
        self._kept.append(np.array(rows, np.int64).reshape(len(rows), self._num_fields))
        return address_of(self._kept[-1]), len(rows)


class StepSpans:
    """The spans of one step, to which of them a token belongs, `of_tokens` int64 [tokens], and in how many
    items attention takes the parts of each token's context."""

    def __init__(self, capacity: int) -> None:
        self.of_tokens: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.max_parts = min(capacity, _MAX_DIVIDED_TOKENS) * NUM_PARTS
        """Parts of all tokens of a step that are items of their own, at most."""
        self.all: Sequence[Span] = ()
        self.parts_per_token = 1

    def begin(self, spans: Sequence[Span], num_tokens: int) -> Sizes:
        """Takes the spans of the next step; how large it is."""
        self.all = spans
        self.parts_per_token = NUM_PARTS if num_tokens <= _MAX_DIVIDED_TOKENS else 1
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
