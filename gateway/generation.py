"""One answer: the tokens of a request become text, stop strings end it, and its figures are kept.

The text pieces come in order and never split a character. After the last one, `outcome` has the rest.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from gateway.attribution import by_file
from gateway.detokenizer import Detokenizer
from gateway.engine_client import EngineStream
from gateway.prompt_progress import PromptProgress
from gateway.stop_strings import StopStrings
from gateway.tokenizer import Tokenizer
from shared.messages import (
    GenerateRequest,
    PrefillProgress,
    PromptStaged,
    RequestFinished,
    RequestTimings,
    TokenChunk,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended: `finish_reason` is "stop" or "length", `stop_string` what it stopped at."""

    finish_reason: str
    stop_string: str | None
    num_output_tokens: int
    finished: RequestFinished
    timings: RequestTimings
    """The gpu_worker's, and all of the wait for a place in the queue, and all reads of files."""
    staged: PromptStaged | None
    ngram_wait_p95_s: float
    """Of the waits for n-gram rows of all tokens but the first, the 95th percentile; 0 for none."""


class Generation:
    """Reads the answers to one request as text."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._request = request
        self._num_known_tokens = tokenizer.num_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopStrings(stop_strings)
        self.prompt = PromptProgress(len(request.prompt_token_ids))
        # Whether the gpu_worker has been asked.
        self.has_begun = False
        self.num_output_tokens = 0
        self.first_token_at: float | None = None
        # What the request waited here, before the gpu_worker was asked.
        self.waited_s = 0.0
        # Times between consecutive tokens, for the metrics.
        self.gaps_s: list[float] = []
        # What the steps of these tokens waited for n-gram rows.
        self.ngram_waits_s: list[float] = []
        self._last_token_at = 0.0
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """How it ended; known once the text has been read to its end."""
        assert self._outcome is not None
        return self._outcome

    async def text(self, answers: EngineStream) -> AsyncGenerator[str, None]:
        """The pieces of the answer, none of them empty. Raises GenerationError."""
        self.has_begun = True
        while self._outcome is None:
            answer = await answers.next()
            match answer:
                case TokenChunk(token_ids=token_ids, ngram_wait_s=ngram_wait_s):
                    self._note_time(answers.answered_at, ngram_wait_s)
                    self.num_output_tokens += len(token_ids)
                    piece, matched = self._matcher.feed(self._detokenizer.feed(self._visible(token_ids)))
                    if piece:
                        yield piece
                    if matched is not None:
                        self._conclude(await answers.abort(), answers.staged, "stop", matched)
                case RequestFinished(finish_reason=reason):
                    piece, matched = self._matcher.feed(self._detokenizer.flush())
                    if matched is None:
                        rest, matched = self._matcher.flush()
                        piece += rest
                    if piece:
                        yield piece
                    ending = "stop" if matched is not None else reason
                    self._conclude(answer, answers.staged, ending, matched)
                case PrefillProgress(num_prefilled=num_read):
                    self.prompt.note(num_read, answers.answered_at)

    def _conclude(
        self, finished: RequestFinished, staged: PromptStaged | None, reason: str, stop_string: str | None
    ) -> None:
        own = finished.timings
        disk = by_file([*own.disk, *([staged.reads] if staged is not None else [])])
        timings = msgspec.structs.replace(own, queue_s=own.queue_s + self.waited_s, disk=disk)
        waits = sorted(self.ngram_waits_s)
        p95_s = waits[int(0.95 * (len(waits) - 1))] if waits else 0.0
        self._outcome = Outcome(reason, stop_string, self.num_output_tokens, finished, timings, staged, p95_s)

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        """Without the token that ended the answer, and without ids that the model has rows for but the
        tokenizer has no text for."""
        return [
            token_id
            for token_id in token_ids
            if token_id not in self._request.eos_token_ids and token_id < self._num_known_tokens
        ]

    def _note_time(self, now: float, ngram_wait_s: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            # The last piece of a prompt is not reported by itself.
            self.prompt.note(self.prompt.num_tokens, now)
        else:
            self.gaps_s.append(now - self._last_token_at)
            self.ngram_waits_s.append(ngram_wait_s)
        self._last_token_at = now
