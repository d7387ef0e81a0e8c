"""Decides what the next step computes. Pure bookkeeping: no tensors, no clocks, no sockets.

A step takes the next token of every sequence that generates, with its drafts, and one chunk of one prompt.
Prompts take turns, so that a short one does not wait for a long one to be read; while answers are written
they have no more than their share of the time (`prefill_share`). So no step is too large, and none of those
who run is stopped by another.
"""

from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from gpu_worker.chunk_size import ChunkSize
from gpu_worker.prefill_share import PrefillShare
from gpu_worker.sequence import Sequence
from gpu_worker.state.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `start` to `stop` of one sequence, and drafts that follow them."""

    sequence: Sequence
    start: int
    stop: int
    drafts: Items[int] = ()
    """Tokens that may follow, to be verified."""
    snapshots: list[Checkpoint] = field(default_factory=list)
    """Taken while it is computed."""

    @property
    def num_tokens(self) -> int:
        """How many tokens that is, drafts included."""
        return self.stop - self.start + len(self.drafts)

    def num_new_pages(self) -> int:
        """Pages of keys and values that the sequence needs for it and has not got."""
        assert self.sequence.state is not None
        return self.sequence.state.num_pages_for(self.stop + len(self.drafts))

    @property
    def reaches_end(self) -> bool:
        """Whether the next token follows from this work: nothing known is left uncomputed."""
        return self.stop == len(self.sequence.token_ids)


class Scheduler:
    """The sequences of one gpu_worker."""

    def __init__(self, max_running: int, prefill_tokens: int, share: PrefillShare) -> None:
        """`prefill_tokens` is the size of the largest chunk of a prompt."""
        self._max_running = max_running
        self.chunk = ChunkSize(prefill_tokens)
        self.share = share
        self._num_reads = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have state."""
        return len(self._running)

    @property
    def running(self) -> Collection[Sequence]:
        """Sequences that have state, or get it with the next step."""
        return self._running

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """A new request, behind all others."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over, for whatever reason."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The sequence of a request, running or waiting."""
        return next((sequence for sequence in self if sequence.request_id == request_id), None)

    def readers(self) -> list[Sequence]:
        """The sequences that have yet to read of their prompts, those first that have waited for the longest
        time; as many run as there is room for."""
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())
        prefilling = [sequence for sequence in self._running if sequence.is_prefilling]
        return sorted(prefilling, key=lambda sequence: sequence.last_read)

    def schedule(self, reader: Sequence | None) -> list[Work]:
        """The next step, decoding first; empty where there is nothing to do. `reader` is the sequence that
        reads of its prompt, if it may."""
        works = [
            Work(sequence, sequence.num_computed, len(sequence.token_ids), sequence.drafts.token_ids)
            for sequence in self._running
            if not sequence.is_prefilling
        ]
        if reader is None:
            return works
        most = self.share.limit(has_answers=bool(works))
        num_tokens = self.chunk.tokens if most is None else min(most, self.chunk.tokens)
        if num_tokens:
            self._num_reads += 1
            reader.last_read = self._num_reads
            start = reader.num_computed
            works.append(Work(reader, start, min(start + num_tokens, reader.num_prompt_tokens)))
        return works
