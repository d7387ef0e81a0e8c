"""Decides what the next step computes. Pure bookkeeping: no tensors, no clocks, no sockets.

A step takes one token of every sequence that generates, and one chunk of one prompt, oldest first. So prompts
are read without stopping the streams that already run, and each step's size is bounded.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from gpu_worker.chunk_size import ChunkSize
from gpu_worker.sequence import Sequence
from gpu_worker.state.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `start` to `stop` of one sequence."""

    sequence: Sequence
    start: int
    stop: int
    snapshots: list[Checkpoint] = field(default_factory=list)
    """Taken while it is computed."""

    @property
    def num_tokens(self) -> int:
        """How many tokens that is."""
        return self.stop - self.start

    def num_new_pages(self) -> int:
        """Pages of keys and values that the sequence needs for it and has not got."""
        assert self.sequence.state is not None
        return self.sequence.state.num_pages_for(self.stop)

    @property
    def reaches_end(self) -> bool:
        """Whether the next token follows from this work: nothing known is left uncomputed."""
        return self.stop == len(self.sequence.token_ids)


class Scheduler:
    """The sequences of one gpu_worker."""

    def __init__(self, max_running: int, prefill_tokens: int) -> None:
        """`prefill_tokens` is the size of the largest chunk of a prompt."""
        self._max_running = max_running
        self.chunk = ChunkSize(prefill_tokens)
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

    def admit(self) -> Sequence | None:
        """The next sequence that begins, if there is room for one; it runs from now on, and is to get its
        state."""
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        self._running.append(self._waiting.popleft())
        return self._running[-1]

    def schedule(self) -> list[Work]:
        """The next step, decoding first; empty where there is nothing to do."""
        decode = [
            Work(sequence, sequence.num_computed, len(sequence.token_ids))
            for sequence in self._running
            if not sequence.is_prefilling
        ]
        for sequence in self._running:
            if sequence.is_prefilling:
                start = sequence.num_computed
                stop = min(start + self.chunk.tokens, sequence.num_prompt_tokens)
                return [*decode, Work(sequence, start, stop)]
        return decode
