"""Conversations that are kept: checkpoints of sequences, and which of them a new prompt can go on from.

A chat client sends the whole conversation with every turn. What of it has been computed before is found by
its token ids: the longest kept beginning of the prompt is where the sequence goes on. So a follow-up, an
edited last message, a shared system prompt and an exact repeat read only what is new.

Checkpoints are taken where prompts are likely to part: at the end of the first message, before the last two,
and, of long prompts, at intervals; and where an answer has ended. Their number is bounded by their memory;
who was not used for the longest time goes first, to the disk, where files are kept (`conversation_files`).
"""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.conversation_files import ConversationFiles, Leaving
from gpu_worker.state.checkpoint import Checkpoint
from gpu_worker.state.pages import Page, PagePool
from gpu_worker.state.sequence_state import SequenceState

_log = logging.getLogger(__name__)

MIN_TOKENS = 16
"""A checkpoint has to save so many tokens against the last one before it."""
_INTERVAL_TOKENS = 4096
# Checkpoints at intervals have this share of the memory, at most, of one prompt.
_INTERVALS_SHARE = 4
# Of how many that had to go it is remembered that they were there.
_NUM_REMEMBERED = 256

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt goes on from: `checkpoint`, None for nothing; its first `num_agreeing` tokens are those
    of a conversation that is kept; `why` it was not more, for people."""

    checkpoint: Checkpoint | None
    num_agreeing: int
    why: str

    @property
    def num_tokens(self) -> int:
        """Tokens that are not computed again."""
        return self.checkpoint.position if self.checkpoint is not None else 0


@dataclass(slots=True, eq=False)
class _Kept:
    """One checkpoint: of a sequence that began with these tokens. `salt` is what its client set it apart
    by."""

    salt: str
    token_ids: TokenIds
    checkpoint: Checkpoint
    last_used: int


class ConversationCache:
    """Checkpoints of one model, within a bound. Used by the engine's thread."""

    def __init__(
        self,
        pool: PagePool,
        max_bytes: int,
        files: ConversationFiles | None = None,
        new_state: Callable[[], SequenceState] | None = None,
    ) -> None:
        """Copies and pages together take no more than `max_bytes`. Where there are `files`, what has to leave
        goes there, and comes back; `new_state` makes any state of the model, which that needs."""
        self._pool = pool
        self._max_bytes = max_bytes
        self._files = files
        self._new_state = new_state
        self._kept: list[_Kept] = []
        self._pages: Counter[Page] = Counter()
        self._copied_bytes = 0
        self._clock = 0
        self._gone: deque[tuple[int, bytes]] = deque(maxlen=_NUM_REMEMBERED)
        self.num_evicted = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept. Pages that running sequences have too are counted."""
        return self._copied_bytes + len(self._pages) * self._pool.page_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, token_ids: Sequence[int] | TokenIds, salt: str = "") -> Reuse:
        """What a prompt can go on from. At least its last token is computed anew: the next one follows from
        it."""
        prompt = np.asarray(token_ids, np.int32)
        candidates = [kept for kept in self._kept if kept.salt == salt]
        best, longest = None, 0
        for kept in candidates:
            agreeing = num_agreeing(prompt, kept.token_ids)
            longest = max(longest, agreeing)
            is_beginning = agreeing == len(kept.token_ids) < len(prompt)
            if is_beginning and (best is None or len(best.token_ids) < agreeing):
                best = kept
        if best is None:
            return Reuse(None, longest, self._why_none(prompt, longest, candidates, salt))
        self._clock += 1
        best.last_used = self._clock
        why = self._why_no_more(prompt, len(best.token_ids), longest, salt)
        return Reuse(best.checkpoint, longest, why)

    def wanted(
        self, token_ids: Sequence[int] | TokenIds, boundaries: Iterable[int], salt: str = ""
    ) -> list[int]:
        """The positions of a prompt at which checkpoints are to be taken, rising; `boundaries` are those at
        which its messages begin."""
        if not self._max_bytes:
            return []
        num_tokens = len(token_ids)
        inner = sorted({position for position in boundaries if 0 < position < num_tokens})
        positions = {*inner[:1], *inner[-2:]} if inner else {num_tokens - 1}
        positions.update(self._at_intervals(num_tokens, inner))
        present = [0, *self._kept_lengths(np.asarray(token_ids, np.int32), salt)]
        chosen: list[int] = []
        # The last ones first: they save the most.
        for position in sorted(positions, reverse=True):
            if all(abs(position - other) >= MIN_TOKENS for other in (*present, *chosen)):
                chosen.append(position)
        return sorted(chosen)

    def keep(self, token_ids: Sequence[int], checkpoint: Checkpoint, salt: str = "") -> None:
        """Takes a checkpoint of a sequence that begins with these tokens, as many as it has positions, unless
        it would save too little."""
        beginning = np.array(token_ids[: checkpoint.position], np.int32)
        nearest = max(self._kept_lengths(beginning, salt), default=0)
        if not self._max_bytes or checkpoint.position - nearest < MIN_TOKENS:
            return
        self._add(salt, beginning, checkpoint)

    def is_coming(self, prompt: TokenIds, salt: str = "") -> bool:
        """Whether more of a prompt than is in memory is being read from the disk."""
        if self._files is None:
            return False
        self._take_loaded(self._files)
        longer_than = self.find(prompt, salt).num_tokens + MIN_TOKENS - 1
        return self._files.is_coming(prompt, salt, longer_than, self._max_bytes)

    def close(self) -> None:
        """Forgets all, but for what files keep."""
        if self._files is not None:
            self._take_loaded(self._files)
            for kept in sorted(self._kept, key=lambda kept: kept.last_used):
                self._files.save(self._leaving(kept), is_last=True)
            self._files.close()
        self.clear()

    def _take_loaded(self, files: ConversationFiles) -> None:
        for saved in files.take_loaded():
            assert self._new_state is not None
            try:
                checkpoint = Checkpoint.from_arrays(
                    self._new_state(), self._pool, saved.arrays, len(saved.token_ids), saved.num_pending
                )
            except (KeyError, RuntimeError) as error:
                _log.error("a conversation of %d tokens cannot be used: %s", len(saved.token_ids), error)
                continue
            self._add(saved.salt, saved.token_ids, checkpoint)

    def _add(self, salt: str, beginning: TokenIds, checkpoint: Checkpoint) -> None:
        num_bytes = checkpoint.num_bytes + beginning.nbytes + len(checkpoint.pages) * self._pool.page_bytes
        if num_bytes > self._max_bytes:
            # It would drive out all others first, and then itself.
            self._remember(salt, beginning)
            return
        self._clock += 1
        self._kept.append(_Kept(salt, beginning, checkpoint, self._clock))
        self._pages.update(checkpoint.pages)
        self._copied_bytes += checkpoint.num_bytes + beginning.nbytes
        while self.num_bytes > self._max_bytes:
            self._evict(min(self._kept, key=lambda kept: kept.last_used))

    def keep_end(
        self,
        token_ids: Sequence[int],
        state: SequenceState,
        salt: str = "",
        streams: Tensor | None = None,
    ) -> None:
        """Takes a checkpoint of a sequence that is over, with `Checkpoint.streams`."""
        if self._max_bytes and state.position >= MIN_TOKENS:
            checkpoint = Checkpoint.of(state)
            checkpoint.streams = streams
            self.keep(token_ids, checkpoint, salt)

    def clear(self) -> None:
        """Forgets all that is in memory, at once."""
        while self._kept:
            self._evict(self._kept[-1], saves=False)

    def _kept_lengths(self, prompt: TokenIds, salt: str) -> list[int]:
        """The lengths of all beginnings of a prompt that are kept, the whole of it included."""
        return [
            len(kept.token_ids)
            for kept in self._kept
            if kept.salt == salt and num_agreeing(prompt, kept.token_ids) == len(kept.token_ids)
        ]

    def _at_intervals(self, num_tokens: int, boundaries: Sequence[int]) -> Iterable[int]:
        """Positions of a long prompt, where messages begin if that is not far."""
        if num_tokens <= _INTERVAL_TOKENS:
            return
        of_state = self._pool.state_bytes
        most = max(1, self._max_bytes // (_INTERVALS_SHARE * max(1, of_state)))
        interval = max(_INTERVAL_TOKENS, -(-num_tokens // most))
        for position in range(interval, num_tokens, interval):
            near = [at for at in boundaries if 0 <= position - at < _INTERVAL_TOKENS // 4]
            yield near[-1] if near else position

    def _leaving(self, kept: _Kept) -> Leaving:
        checkpoint = kept.checkpoint
        arrays = partial(checkpoint.arrays, self._pool)
        return Leaving(kept.salt, kept.token_ids, checkpoint.num_pending, arrays)

    def _evict(self, kept: _Kept, *, saves: bool = True) -> None:
        if saves and self._files is not None:
            self._files.save(self._leaving(kept))
        self._kept.remove(kept)
        self._pages.subtract(kept.checkpoint.pages)
        for page in kept.checkpoint.pages:
            if not self._pages[page]:
                del self._pages[page]
        self._copied_bytes -= kept.checkpoint.num_bytes + kept.token_ids.nbytes
        self._remember(kept.salt, kept.token_ids)
        self.num_evicted += 1

    def _remember(self, salt: str, token_ids: TokenIds) -> None:
        """That so many tokens had no room."""
        digest = _hash(salt)
        digest.update(token_ids.tobytes())
        self._gone.append((len(token_ids), digest.digest()))

    def _was_there(self, prompt: TokenIds, beyond: int, salt: str) -> int:
        """The longest beginning of a prompt that had to go, if it was longer than that; else 0."""
        found, hashed = 0, 0
        digest = _hash(salt)
        for length, gone in sorted(self._gone):
            if beyond < length < len(prompt):
                digest.update(prompt[hashed:length].tobytes())
                hashed = length
                found = length if digest.digest() == gone else found
        return found

    def _why_none(self, prompt: TokenIds, num_agreeing: int, candidates: Sequence[_Kept], salt: str) -> str:
        if not self._max_bytes:
            return "nothing is kept: --conversation-cache-mib is 0"
        if gone := self._was_there(prompt, 0, salt):
            return f"its first {gone} tokens were kept, and had to go: --conversation-cache-mib was full"
        if not candidates:
            return "nothing is kept yet"
        if num_agreeing == len(prompt):
            return "a longer conversation is kept, which has no checkpoint in this prompt"
        return f"it differs from all that is kept from token {num_agreeing} on"

    def _why_no_more(self, prompt: TokenIds, num_reused: int, num_agreeing: int, salt: str) -> str:
        if gone := self._was_there(prompt, num_reused, salt):
            return f"its first {gone} tokens were kept, and had to go: --conversation-cache-mib was full"
        if num_agreeing > num_reused:
            return f"{num_agreeing} tokens agree with what is kept; the last checkpoint is at {num_reused}"
        return ""


def num_agreeing(first: TokenIds, second: TokenIds) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length


def _hash(salt: str) -> "hashlib.blake2b":
    return hashlib.blake2b(salt.encode(), digest_size=16)
