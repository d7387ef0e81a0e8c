"""From a prompt's token ids to the response: admission, generation, and either shape of answer.

A request is a `_Job` of one or several `_Answer`s, each with a place and a sequence of its own. Chat and text
completions differ only in how their JSON looks, which a `Shape` knows.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from gateway.admission import Place
from gateway.answer_text import Piece, TokenEntry
from gateway.api.answering import (
    Prompt,
    check_may_enter,
    generate_request,
    requests_of_answers,
    timings_of,
    usage_of,
)
from gateway.api.schema import GenerationFields
from gateway.error_responses import REQUEST_ID_HEADER, code_of, error_event
from gateway.generation import Generation, Outcome
from gateway.interleaving import interleaved
from gateway.request_progress import RequestProgress
from gateway.services import ARRIVED_AT, REQUEST_ID, SERVICES, Services
from gateway.sse import EventStream, event_stream
from shared.messages import GenerateRequest

_log = logging.getLogger(__name__)

# How long an accepted request waits, at most at a time, for workers that are being restarted.
_RECOVERY_TIMEOUT_S = 60.0


@dataclass(slots=True)
class WholeAnswer:
    """An answer in one piece; `entries` is None where nobody has asked for log-probabilities."""

    outcome: Outcome
    text: str
    entries: list[TokenEntry] | None
    timings: dict[str, Any]


class Shape(Protocol):
    """How answers look. `index` is an answer's number among those of its request."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before any text, if there is one."""

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with text, or with log-probabilities of tokens without text."""

    def closing(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """The chunk that says how it ended."""

    def usage(self) -> dict[str, Any]:
        """A chunk without choices, to which usage is added."""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """All answers in one piece."""


async def respond(
    request: web.Request, prompt: Prompt, body: GenerationFields, shape: Shape
) -> web.StreamResponse:
    """Generates and responds. Raises RequestError and GenerationError before the first byte only."""
    services = request.app[SERVICES]
    generate = generate_request(request[REQUEST_ID], prompt, body, services)
    requests = requests_of_answers(generate, body, services)
    try:
        async with AsyncExitStack() as places:
            # All or none: what follows does not give way to other requests until all have their places.
            check_may_enter(services, len(requests))
            answers = [
                _Answer.of(
                    services,
                    prompt,
                    one,
                    body,
                    await places.enter_async_context(services.admission.enter()),
                    request[ARRIVED_AT],
                )
                for one in requests
            ]
            job = _Job(services, prompt, generate.request_id, answers, body, shape)
            with job.announced():
                if not body.stream:
                    return await job.whole()
                headers = {REQUEST_ID_HEADER: generate.request_id}
                interval_s = services.config.keepalive_interval_s
                async with event_stream(request, headers, interval_s, job.sentence) as stream:
                    await job.streamed(stream)
                return stream.response
    except (asyncio.CancelledError, ConnectionError):
        services.metrics.failed("client_closed")
        _log.info("%s: the client left", generate.request_id)
        raise


@dataclass(slots=True)
class _Answer:
    """One answer on its way through the stack."""

    services: Services
    prompt: Prompt
    generate: GenerateRequest
    generation: Generation
    place: Place
    arrived_at: float
    timings: dict[str, Any] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        services: Services,
        prompt: Prompt,
        generate: GenerateRequest,
        body: GenerationFields,
        place: Place,
        arrived_at: float,
    ) -> "_Answer":
        """With a generation of its own."""
        generation = Generation(generate, services.loaded_text().tokenizer, body.stop_strings)
        return cls(services, prompt, generate, generation, place, arrived_at)

    @property
    def progress(self) -> RequestProgress:
        """How far it is."""
        return RequestProgress(self.services.admission, self.place, self.generation, self.arrived_at)

    async def parts(self) -> AsyncGenerator[Piece | Outcome]:
        """Runs the generation, in its turn: its pieces, then how it ended, which metrics and log note."""
        engine, admission, generation = self.services.engine, self.services.admission, self.generation
        queued_at = time.monotonic()
        await self._turn()
        generation.waited_s = time.monotonic() - queued_at
        answers_of = engine.open(self.generate, partial(admission.give_back, self.place))
        async with answers_of as answers, aclosing(generation.pieces(answers)) as pieces:
            async for piece in pieces:
                yield piece
        self._note_end()
        yield generation.outcome

    async def _turn(self) -> None:
        """Waits for the place: as long as it takes while the stack is well, a minute while it is not."""
        engine, granted = self.services.engine, self.place.granted
        while True:
            await engine.wait_ready(_RECOVERY_TIMEOUT_S)
            if granted.done():
                granted.result()
                return
            await engine.while_ready(granted)

    def _note_end(self) -> None:
        self.services.metrics.finished(self.generation, self.arrived_at, self.prompt.tokenize_s)
        outcome = self.generation.outcome
        self.timings = timings_of(len(self.prompt.token_ids), outcome, self.prompt.tokenize_s)
        self.services.last_timings = self.timings
        reason = outcome.finish_reason
        _log.info(
            "%s: %d prompt tokens, %d generated, %s, %.3f s to the first token, %.3f s in all",
            self.generate.request_id,
            len(self.prompt.token_ids),
            outcome.num_output_tokens,
            reason if outcome.stop_reason is None else f"{reason} ({outcome.stop_reason!r})",
            (self.generation.first_token_at or self.arrived_at) - self.arrived_at,
            time.monotonic() - self.arrived_at,
        )


@dataclass(slots=True)
class _Job:
    """One request: all of its answers, as one response."""

    services: Services
    prompt: Prompt
    request_id: str
    answers: list[_Answer]
    body: GenerationFields
    shape: Shape

    @contextmanager
    def announced(self) -> Iterator[None]:
        """While the context lasts, the status shows the answers, and the stager knows of the prompt: once,
        under the name of the first answer."""
        engine, shown = self.services.engine, self.services.requests
        first_id = self.answers[0].generate.request_id
        shown |= {answer.generate.request_id: answer.progress for answer in self.answers}
        try:
            engine.stage(first_id, self.prompt.token_ids)
            yield
        finally:
            engine.forget(first_id)
            for answer in self.answers:
                del shown[answer.generate.request_id]

    def sentence(self) -> str:
        """How far the first answer is that has not ended."""
        unfinished = (answer for answer in self.answers if not answer.generation.is_over)
        return next(unfinished, self.answers[-1]).progress.sentence()

    async def whole(self) -> web.Response:
        """The answers in one JSON object; the `timings` of several are each with its answer."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async with aclosing(self._parts()) as parts:
            async for index, part in parts:
                if isinstance(part, Piece):
                    pieces[index].append(part)
        wants_logprobs = self.body.num_top_logprobs is not None
        wholes = [
            WholeAnswer(
                answer.generation.outcome,
                "".join(piece.text for piece in own),
                [entry for piece in own for entry in piece.entries] if wants_logprobs else None,
                answer.timings,
            )
            for answer, own in zip(self.answers, pieces, strict=True)
        ]
        payload = self.shape.whole(wholes) | self._usage()
        if len(wholes) == 1:
            payload |= {"timings": wholes[0].timings}
        else:
            for choice, one in zip(payload["choices"], wholes, strict=True):
                choice["timings"] = one.timings
        return web.json_response(payload)

    async def streamed(self, stream: EventStream) -> None:
        """The answers as events. What fails from here on is an event too."""
        try:
            await self._stream_parts(stream)
        except ConnectionError:
            raise
        except Exception as error:
            self.services.metrics.failed(code_of(error))
            await stream.send(error_event(error, self.request_id))
        await stream.done()

    async def _stream_parts(self, stream: EventStream) -> None:
        # The official format has a null usage on every chunk but the last where usage was asked for.
        filler: dict[str, Any] = {"usage": None} if self.body.wants_usage_chunk else {}
        for index in range(len(self.answers)):
            opening = self.shape.opening(index)
            if opening is not None:
                await stream.send(opening | filler)
        async with aclosing(self._parts()) as parts:
            async for index, part in parts:
                if isinstance(part, Piece):
                    await stream.send(self.shape.piece(index, part) | filler)
                else:
                    timings = {"timings": self.answers[index].timings}
                    await stream.send(self.shape.closing(index, part) | filler | timings)
        if self.body.wants_usage_chunk:
            await stream.send(self.shape.usage() | self._usage())

    def _parts(self) -> AsyncGenerator[tuple[int, Piece | Outcome]]:
        return interleaved([answer.parts() for answer in self.answers])

    def _usage(self) -> dict[str, Any]:
        outcomes = [answer.generation.outcome for answer in self.answers]
        return {"usage": usage_of(len(self.prompt.token_ids), outcomes)}
