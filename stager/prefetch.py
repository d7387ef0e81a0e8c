"""Brings the n-gram rows of prompts into memory before the gpu_worker asks for them.

The gateway sends the token ids of a prompt as soon as it is tokenised, while the request still waits for its
turn. One thread works these off in order, with a queue of its own, a chunk ahead of the step that needs them
or more. It is advice: what does not fit into the short queue, or whose request is over, is dropped, and the
rows are then read when they are needed.

What is staged must not push out what was staged before and is still to be used: no more is brought than half
of the cache holds beyond what steps have taken since.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.messages import FileReads, PromptStaged
from shared.model_config import NgramConfig
from stager.ngram_hash import windows_of
from stager.ngram_rows import RowReader

_log = logging.getLogger(__name__)

_MAX_QUEUED_PROMPTS = 64
# A prompt is worked off in pieces, so that one that is forgotten stops costing reads, and so that the rows of
# its begin are there first. As many tokens as one step computes by default.
TOKENS_PER_PIECE = 512
# How often a thread that is ahead looks whether steps have caught up.
_LOOK_INTERVAL_S = 0.02


@dataclass(slots=True)
class _Prompt:
    request_id: str
    token_ids: NDArray[np.int32]
    is_wanted: bool = True


class PromptPrefetcher:
    """A thread and its queue of prompts."""

    def __init__(
        self,
        reader: RowReader,
        config: NgramConfig,
        file_name: str,
        num_places: int,
        num_taken: Callable[[], int],
        post: Callable[[PromptStaged], None],
    ) -> None:
        """`reader` is this thread's own; `num_places` the rows that the cache holds; `num_taken` says how
        many rows steps have taken since the start; `post` is told of each prompt, from the thread."""
        self._reader = reader
        self._ngram_size = config.ngram_size
        self._file_name = file_name
        self._most_ahead = num_places // 2
        self._num_taken = num_taken
        self._post = post
        # Rows staged since staging was last not ahead, and what steps had taken by then.
        self._num_staged = self._taken_before = 0
        self._waiting: OrderedDict[str, _Prompt] = OrderedDict()
        self._current: _Prompt | None = None
        self._change = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def stage(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Queues a prompt; the oldest waiting one makes room where the queue is full."""
        with self._change:
            self._waiting[request_id] = _Prompt(request_id, np.array(token_ids, np.int32))
            if len(self._waiting) > _MAX_QUEUED_PROMPTS:
                self._waiting.popitem(last=False)
            self._change.notify()

    def forget(self, request_id: str) -> None:
        """Drops a prompt that waits; one that is being read stops after its current piece."""
        with self._change:
            self._waiting.pop(request_id, None)
            if self._current is not None and self._current.request_id == request_id:
                self._current.is_wanted = False

    def stop(self) -> None:
        """Ends the thread."""
        with self._change:
            self._is_stopped = True
            self._change.notify()
        self._reader.queue.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_stopped)
                if self._is_stopped:
                    return
                _, prompt = self._waiting.popitem(last=False)
                self._current = prompt
            try:
                self._stage(prompt)
            except Exception:
                # Advice may fail; the next prompt still wants its own.
                _log.exception("the n-gram rows of %s were not staged", prompt.request_id)

    def _stage(self, prompt: _Prompt) -> None:
        reader = self._reader
        started = time.monotonic()
        rows, hits, failures = reader.num_rows, reader.num_hits, reader.num_failures
        before = reader.queue.counts
        windows = np.ascontiguousarray(windows_of(prompt.token_ids, self._ngram_size))
        for start in range(0, len(windows), TOKENS_PER_PIECE):
            piece = windows[start : start + TOKENS_PER_PIECE]
            if not self._may_go_on(prompt, len(piece) * reader.num_heads):
                break
            reader.stage(piece)
        after = reader.queue.counts
        if reader.num_failures > failures:
            # The step that needs them tries again, and tells its client.
            _log.warning(
                "%d n-gram rows of %s could not be read from %s",
                reader.num_failures - failures,
                prompt.request_id,
                self._file_name,
            )
        busy_s = after.busy_s - before.busy_s
        self._post(
            PromptStaged(
                request_id=prompt.request_id,
                num_rows=reader.num_rows - rows,
                num_hits=reader.num_hits - hits,
                reads=FileReads(
                    file=self._file_name,
                    num_reads=after.num_reads - before.num_reads,
                    num_bytes=after.num_bytes - before.num_bytes,
                    # Nobody waits for what is staged; a step that does says so itself.
                    wait_s=0.0,
                ),
                seconds=time.monotonic() - started,
                depth=(after.depth_s - before.depth_s) / busy_s if busy_s > 0 else 0.0,
            )
        )

    def _may_go_on(self, prompt: _Prompt, num_rows: int) -> bool:
        """Waits until there is room for so many more rows; whether they are still wanted."""
        with self._change:
            while prompt.is_wanted and not self._is_stopped:
                num_taken = self._num_taken()
                num_ahead = self._num_staged - (num_taken - self._taken_before)
                if num_ahead <= 0:
                    self._num_staged, self._taken_before, num_ahead = 0, num_taken, 0
                # Steps take rows whether or not they were staged, so this does not wait for ever.
                if num_ahead == 0 or num_ahead + num_rows <= self._most_ahead:
                    self._num_staged += num_rows
                    return True
                self._change.wait(_LOOK_INTERVAL_S)
        return False
