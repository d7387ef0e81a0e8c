"""One answer: the tokens of a request become text, stop strings end it, and its figures are kept.

The pieces come in order. After the last one, `outcome` has the rest.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from gateway.answer_text import AnswerText, Piece
from gateway.attribution import by_file
from gateway.engine_client import EngineStream
from gateway.prompt_progress import PromptProgress
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
    """How an answer ended: `finish_reason` is "stop" or "length", `stop_reason` the stop string or the id of
    the stop token that it stopped at, or `REPETITION`; None for the end of text and for the limit."""

    finish_reason: str
    stop_reason: str | int | None
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
        self._text = AnswerText(request, tokenizer, stop_strings)
        self.prompt = PromptProgress(len(request.prompt_token_ids))
        # Whether the gpu_worker has been asked.
        self.has_begun = False
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
    def num_output_tokens(self) -> int:
        """Tokens so far, the one that ended it included."""
        return self._text.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has ended well."""
        return self._outcome is not None

    @property
    def outcome(self) -> Outcome:
        """How it ended; known once the text has been read to its end."""
        assert self._outcome is not None
        return self._outcome

    async def pieces(self, answers: EngineStream) -> AsyncGenerator[Piece]:
        """The pieces of the answer, none of them empty. Raises GenerationError."""
        self.has_begun = True
        text = self._text
        while self._outcome is None:
            answer = await answers.next()
            match answer:
                case TokenChunk():
                    self._note_time(answers.answered_at, len(answer.token_ids), answer.ngram_wait_s)
                    if piece := text.feed(answer):
                        yield piece
                    if text.stop_string is not None:
                        self._conclude(await answers.abort(), answers.staged, "stop", text.stop_string)
                case RequestFinished():
                    if piece := text.flush():
                        yield piece
                    if text.stop_string is not None:
                        self._conclude(answer, answers.staged, "stop", text.stop_string)
                    else:
                        self._conclude(answer, answers.staged, answer.finish_reason, answer.stop_reason)
                case PrefillProgress(num_prefilled=num_read):
                    self.prompt.note(num_read, answers.answered_at)

    def _conclude(
        self,
        finished: RequestFinished,
        staged: PromptStaged | None,
        reason: str,
        stop_reason: str | int | None,
    ) -> None:
        own = finished.timings
        disk = by_file([*own.disk, *([staged.reads] if staged is not None else [])])
        timings = msgspec.structs.replace(own, queue_s=own.queue_s + self.waited_s, disk=disk)
        waits = sorted(self.ngram_waits_s)
        p95_s = waits[int(0.95 * (len(waits) - 1))] if waits else 0.0
        self._outcome = Outcome(reason, stop_reason, self.num_output_tokens, finished, timings, staged, p95_s)

    def _note_time(self, now: float, num_tokens: int, ngram_wait_s: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            # The last piece of a prompt is not reported by itself.
            self.prompt.note(self.prompt.num_tokens, now)
        else:
            # Tokens that come together have an equal share each.
            self.gaps_s += num_tokens * [(now - self._last_token_at) / num_tokens]
            self.ngram_waits_s.append(ngram_wait_s)
        self._last_token_at = now
