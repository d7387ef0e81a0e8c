"""What the tokens of one answer say: its text in pieces, up to a stop string, and their log-probabilities.

Pure: knows nothing of messages' times or of clients. A piece never splits a character. Log-probabilities go
out with the piece in which the text of their token goes out, or ends; there is exactly one entry for each
token that counts, also for those without text, such as the one that ends the answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from shared.messages import GenerateRequest, TokenChunk, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token and its log-probabilities; its text begins at `text_offset`, in characters of the answer."""

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer; `entries` are none where nobody has asked for log-probabilities."""

    text: str
    entries: list[TokenEntry]

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.text or self.entries)


class AnswerText:
    """The text of one answer as its tokens come."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        # Ids that the model has rows for may be more than the tokenizer has text for.
        self._num_known_tokens = tokenizer.num_tokens
        self._ending_ids = {*request.eos_token_ids, *request.stop_token_ids}
        # No stop string is looked for in what so many tokens say.
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopStrings(stop_strings)
        # Entries whose text has not gone out, each with the length of the text at whose end it has.
        self._pending: deque[tuple[int, TokenEntry]] = deque()
        self._num_decoded = 0
        self._num_emitted = 0
        self.num_tokens = 0
        self.stop_string: str | None = None

    def feed(self, chunk: TokenChunk) -> Piece:
        """What can be said now. Where a stop string is found, that is kept, and whatever follows the token
        that completes it is neither said nor counted; not called again after that."""
        emitted = ""
        for place, token_id in enumerate(chunk.token_ids):
            self.num_tokens += 1
            start = self._num_decoded
            text = self._detokenizer.feed([token_id]) if self._has_text(token_id) else ""
            self._num_decoded += len(text)
            if chunk.logprobs:
                end = self._num_decoded + self._detokenizer.holds_bytes
                self._pending.append((end, TokenEntry(token_id, start, chunk.logprobs[place])))
            if self.num_tokens > self._min_tokens:
                text, self.stop_string = self._matcher.feed(text)
            emitted += text
            if self.stop_string is not None:
                return self._last(emitted)
        return self._piece(emitted)

    def flush(self) -> Piece:
        """What was held back, once there are no more tokens; a stop string may be found in it."""
        emitted, self.stop_string = self._matcher.feed(self._detokenizer.flush())
        if self.stop_string is None:
            rest, self.stop_string = self._matcher.flush()
            emitted += rest
        return self._last(emitted)

    def _has_text(self, token_id: int) -> bool:
        return token_id < self._num_known_tokens and token_id not in self._ending_ids

    def _piece(self, text: str) -> Piece:
        self._num_emitted += len(text)
        entries: list[TokenEntry] = []
        while text and self._pending and self._pending[0][0] <= self._num_emitted:
            entries.append(self._pending.popleft()[1])
        return Piece(text, entries)

    def _last(self, text: str) -> Piece:
        entries = [entry for _, entry in self._pending]
        self._pending.clear()
        return Piece(text, entries)
