"""Where sequences begin, and what they leave behind: the engine's dealings with kept conversations."""

from collections.abc import Iterable

from torch import Tensor

from gpu_worker.conversations import ConversationCache, num_agreeing
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.scheduler import Work
from gpu_worker.sequence import Sequence
from gpu_worker.state.checkpoint import Checkpoint
from shared.window import WINDOW_TOKENS

# Tokens that make up for waiting until somebody else has read them.
_WORTH_WAITING = 64


class Checkpointing:
    """The checkpoints of the sequences of one engine."""

    def __init__(self, model: Qwen4Exp, conversations: ConversationCache) -> None:
        self._model = model
        self.conversations = conversations

    def awaits(self, sequence: Sequence, readers: Iterable[Sequence]) -> bool:
        """Whether a sequence that has not begun had better wait: what it begins with is being read from the
        disk; or another one is reading its prompt, which begins so too, and will leave a checkpoint there."""
        request = sequence.request
        if request.logits_path:
            return False
        if self.conversations.is_coming(sequence.prompt, request.cache_salt):
            return True
        coming = max((_coming_of(sequence, other) for other in readers), default=0)
        if coming < _WORTH_WAITING:
            return False
        kept = self.conversations.find(sequence.prompt, request.cache_salt).num_tokens
        return coming - kept >= _WORTH_WAITING

    def begin(self, sequence: Sequence) -> Checkpoint | None:
        """Gives a sequence its state; what it goes on from, if not from its begin."""
        request, state = sequence.request, self._model.new_state()
        sequence.state = state
        if request.logits_path:
            # They are wanted of all positions.
            return None
        prompt, salt = sequence.prompt, request.cache_salt
        sequence.reuse = self.conversations.find(prompt, salt)
        checkpoint = sequence.reuse.checkpoint
        if checkpoint is not None:
            checkpoint.restore(state, self._model.pages)
        wanted = self.conversations.wanted(prompt, request.boundaries, salt)
        sequence.wanted = [position for position in wanted if position > state.position]
        return checkpoint

    def prepare(self, works: Iterable[Work]) -> None:
        """Before a step: makes the checkpoints that are to be filled in on its way."""
        for work in works:
            state = work.sequence.state
            assert state is not None
            if work.num_tokens > WINDOW_TOKENS:
                inner = [position for position in work.sequence.wanted if work.start < position < work.stop]
                work.snapshots.extend(Checkpoint(state, position) for position in inner)

    def keep(self, work: Work, streams: Tensor) -> None:
        """After a step: keeps what it has left of a prompt; `streams` [tokens, streams, hidden] are those of
        the work."""
        sequence, state = work.sequence, work.sequence.state
        assert state is not None
        if not sequence.wanted:
            return
        filled = {snapshot.position: snapshot for snapshot in work.snapshots}
        for position in sequence.wanted:
            if not work.start < position <= work.stop:
                continue
            # What no snapshot was made for could still be taken back.
            checkpoint = filled.get(position) or Checkpoint.of(state, position)
            checkpoint.keep_pages(state)
            if sequence.drafts.predicts:
                last = position - work.start - 1
                checkpoint.streams = streams[last : last + 1].clone()
            self.conversations.keep(sequence.token_ids, checkpoint, sequence.request.cache_salt)
        sequence.wanted = [position for position in sequence.wanted if position > work.stop]

    def keep_end(self, sequence: Sequence) -> None:
        """Keeps what a sequence has computed that is over, where it was not for its logits alone."""
        if sequence.state is not None and sequence.reuse is not None:
            drafts, salt = sequence.drafts, sequence.request.cache_salt
            streams = drafts.streams if drafts.predicts and not drafts.is_behind else None
            self.conversations.keep_end(sequence.token_ids, sequence.state, salt, streams)


def _coming_of(sequence: Sequence, other: Sequence) -> int:
    """How much of the prompt of a sequence will be in a checkpoint that another one has yet to leave."""
    if other.state is None or not other.wanted or other.request.cache_salt != sequence.request.cache_salt:
        return 0
    shared = num_agreeing(sequence.prompt, other.prompt)
    return max((position for position in other.wanted if position <= shared), default=0)
