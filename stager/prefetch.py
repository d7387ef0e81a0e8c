"""Brings the n-gram rows of prompts near before the gpu_worker asks for them.

The gateway sends the token ids of a prompt as soon as it is tokenised, while the request still waits for its
turn. One thread works these off in order. It is advice: what does not fit into the short queue, or whose
request is over, is dropped, and the rows are then read when they are needed.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from shared.model_config import NgramConfig
from stager.ngram_hash import NgramHash, windows_of
from stager.ngram_table import NgramTable

_log = logging.getLogger(__name__)

_MAX_QUEUED_PROMPTS = 64
# A prompt is worked off in pieces, so that one that is forgotten stops costing reads.
_TOKENS_PER_PIECE = 4096


class PromptPrefetcher:
    """A thread and its queue of prompts."""

    def __init__(self, table: NgramTable, ngram_hash: NgramHash, config: NgramConfig) -> None:
        self._table = table
        self._hash = ngram_hash
        self._ngram_size = config.ngram_size
        self._prompts: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._forgotten: set[str] = set()
        self._change = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def stage(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Queues a prompt; the oldest waiting one makes room where the queue is full."""
        with self._change:
            self._prompts[request_id] = token_ids
            if len(self._prompts) > _MAX_QUEUED_PROMPTS:
                self._prompts.popitem(last=False)
            self._change.notify()

    def forget(self, request_id: str) -> None:
        """Drops a prompt that waits; one that is being read stops after its current piece."""
        with self._change:
            if self._prompts.pop(request_id, None) is None:
                self._forgotten.add(request_id)

    def stop(self) -> None:
        """Ends the thread."""
        with self._change:
            self._is_stopped = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._prompts or self._is_stopped)
                if self._is_stopped:
                    return
                request_id, token_ids = self._prompts.popitem(last=False)
                self._forgotten.clear()
            try:
                self._bring_near(request_id, token_ids)
            except Exception:
                # Advice may fail; the next prompt still wants its own.
                _log.exception("the n-gram rows of %s were not brought near", request_id)

    def _bring_near(self, request_id: str, token_ids: Sequence[int]) -> None:
        windows = windows_of(np.array(token_ids, np.int32), self._ngram_size)
        num_ranges = 0
        for start in range(0, len(windows), _TOKENS_PER_PIECE):
            if request_id in self._forgotten or self._is_stopped:
                return
            rows = self._hash.rows(windows[start : start + _TOKENS_PER_PIECE])
            num_ranges += self._table.bring_near(rows)
        _log.debug("%s: asked for %d ranges of the n-gram table", request_id, num_ranges)
