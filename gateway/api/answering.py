"""From a prompt's token ids to the response: admission, generation, and either shape of answer.

Chat and text completions differ only in how their JSON looks, which a `Shape` knows.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from gateway.admission import Place
from gateway.api.schema import GenerationFields
from gateway.attribution import shares_of
from gateway.error_responses import REQUEST_ID_HEADER, code_of, error_event
from gateway.generation import Generation, Outcome
from gateway.request_progress import RequestProgress
from gateway.services import ARRIVED_AT, REQUEST_ID, SERVICES, Services
from gateway.sse import EventStream, event_stream
from gateway.tokenizer import TooManyTokensError
from shared.errors import ContextLengthError, InvalidRequestError, NotFoundError
from shared.messages import FileReads, GenerateRequest, Sampling

_log = logging.getLogger(__name__)

# How long an accepted request waits, at most at a time, for workers that are being restarted.
_RECOVERY_TIMEOUT_S = 60.0
_SEED_RANGE = 1 << 63
# Prompts up to this many contexts long are counted exactly.
_COUNTED_CONTEXTS = 4
# Of a name that a client made up, in an error.
_MAX_SHOWN_NAME = 100

Encoded = TypeVar("Encoded")


class Shape(Protocol):
    """How an answer looks."""

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text, if there is one."""

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with text."""

    def closing(self, outcome: Outcome) -> dict[str, Any]:
        """The chunk that says how it ended."""

    def usage(self) -> dict[str, Any]:
        """A chunk without choices, to which usage is added."""

    def whole(self, text: str, outcome: Outcome) -> dict[str, Any]:
        """The answer in one piece."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, and how long that took."""

    token_ids: list[int]
    tokenize_s: float


def check_model(name: str | None, services: Services) -> None:
    """Raises NotFoundError where a request names a model that is not served here."""
    served = (services.model_name, *services.config.aliases)
    if name is not None and name not in served:
        raise NotFoundError(
            f"the model {name[:_MAX_SHOWN_NAME]!r} does not exist here; served: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def check_may_enter(services: Services) -> None:
    """Raises what `answer` would raise now, before work is spent on a prompt that cannot be answered."""
    _check_ready(services)
    services.admission.check_room()


def _check_ready(services: Services) -> None:
    if not services.engine.is_ready and not services.admission.is_draining:
        raise services.engine.not_ready()


async def answer(
    request: web.Request, prompt: Prompt, body: GenerationFields, shape: Shape
) -> web.StreamResponse:
    """Generates and responds. Raises RequestError and GenerationError before the first byte only."""
    services = request.app[SERVICES]
    arrived_at = request[ARRIVED_AT]
    generate = generate_request(request[REQUEST_ID], prompt.token_ids, body, services)
    try:
        _check_ready(services)
        async with services.admission.enter() as place:
            generation = Generation(generate, services.loaded_text().tokenizer, body.stop_strings)
            job = _Job(services, prompt, generate, generation, body, shape, place, arrived_at)
            progress = RequestProgress(services.admission, place, generation, arrived_at)
            services.requests[generate.request_id] = progress
            try:
                services.engine.stage(generate.request_id, prompt.token_ids)
                if not body.stream:
                    return await job.whole()
                headers = {REQUEST_ID_HEADER: generate.request_id}
                interval_s = services.config.keepalive_interval_s
                async with event_stream(request, headers, interval_s, progress.sentence) as stream:
                    await job.streamed(stream)
                return stream.response
            finally:
                services.engine.forget(generate.request_id)
                del services.requests[generate.request_id]
    except (asyncio.CancelledError, ConnectionError):
        services.metrics.failed("client_closed")
        _log.info("%s: the client left", generate.request_id)
        raise


def generate_request(
    request_id: str,
    prompt_token_ids: list[int],
    body: GenerationFields,
    services: Services,
    min_answer_tokens: int = 1,
) -> GenerateRequest:
    """What the gpu_worker is asked, with defaults filled in. Raises as `check_prompt` does."""
    config, tokenizer = services.config, services.loaded_text().tokenizer
    check_prompt(prompt_token_ids, services, min_answer_tokens)
    room = services.engine.max_context - len(prompt_token_ids)
    limits = [limit for limit in (body.token_limit, config.max_new) if limit]
    seed = body.seed if body.seed is not None else config.seed
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_new_tokens=min([room, *limits]),
        eos_token_ids=sorted(config.eos_ids or tokenizer.eos_token_ids),
        sampling=Sampling(
            temperature=body.temperature if body.temperature is not None else config.temperature,
            # -1 is how some other servers say "all".
            top_k=max(0, body.top_k) if body.top_k is not None else config.top_k,
            top_p=body.top_p if body.top_p is not None else config.top_p,
            min_p=body.min_p if body.min_p is not None else config.min_p,
            seed=seed % _SEED_RANGE if seed is not None else secrets.randbelow(_SEED_RANGE),
        ),
    )


def check_prompt(token_ids: list[int], services: Services, min_answer_tokens: int) -> None:
    """Raises InvalidRequestError or ContextLengthError where the model cannot read these ids and then write
    that many."""
    num_known = services.loaded_text().tokenizer.num_tokens
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
    if max(token_ids) >= num_known:
        raise InvalidRequestError(
            f"the prompt has the token id {max(token_ids)}; the vocabulary has {num_known}", param="prompt"
        )
    max_context = services.engine.max_context
    if max_context and len(token_ids) + min_answer_tokens > max_context:
        raise _too_long(f"{len(token_ids)}", services, min_answer_tokens)


def max_counted_tokens(services: Services) -> int | None:
    """Up to how many tokens a prompt is encoded, though it is too long already: its client is told its true
    length, but not every length is worth the time. None while the context is not known."""
    return _COUNTED_CONTEXTS * services.engine.max_context or None


async def encode_off_loop(services: Services, num_bytes: int, encode: Callable[[], Encoded]) -> Encoded:
    """What `encode` makes of a prompt that came in a body of that length. Raises ContextLengthError where it
    finds more tokens than it may."""
    try:
        return await services.off_loop(num_bytes, encode)
    except TooManyTokensError as error:
        raise _too_long(f"more than {error.max_tokens}", services) from None


def _too_long(length: str, services: Services, min_answer_tokens: int = 1) -> ContextLengthError:
    """The error for a prompt of that many tokens."""
    max_context = services.engine.max_context
    answer = f", {min_answer_tokens} of them for the answer" if min_answer_tokens else ""
    is_set_lower = max_context == services.config.max_context
    remedy = (
        ", or raise --max-context"
        if is_set_lower
        else ": the model is made for no more, unless --rope-scaling"
    )
    return ContextLengthError(
        f"the prompt has {length} tokens, the context has room for {max_context}{answer}; shorten it{remedy}"
    )


def usage_of(num_prompt_tokens: int, outcome: Outcome) -> dict[str, Any]:
    """The `usage` object: true counts, the end-of-text token included."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": outcome.num_output_tokens,
        "total_tokens": num_prompt_tokens + outcome.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def timings_of(num_prompt_tokens: int, outcome: Outcome, tokenize_s: float) -> dict[str, Any]:
    """The `timings` object that llama-server's clients know, the waits behind it, and what was needed."""
    times = outcome.timings
    prompt_ms, predicted_ms = 1e3 * times.prefill_s, 1e3 * times.decode_s
    num_predicted = outcome.num_output_tokens
    timings: dict[str, Any] = {
        "cache_n": 0,
        "prompt_n": num_prompt_tokens,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / num_prompt_tokens, 3),
        "prompt_per_second": round(1e3 * num_prompt_tokens / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(predicted_ms / num_predicted, 3) if num_predicted else 0.0,
        "predicted_per_second": round(1e3 * num_predicted / predicted_ms, 3) if predicted_ms else 0.0,
        "queue_ms": round(1e3 * times.queue_s, 3),
        "tokenize_ms": round(1e3 * tokenize_s, 3),
        "ngram_wait_ms": round(1e3 * times.ngram_wait_s, 3),
        "ngram_read_ms": round(1e3 * times.ngram_read_s, 3),
        "ngram_wait_p95_ms": round(1e3 * outcome.ngram_wait_p95_s, 3),
        "expert_wait_ms": round(1e3 * times.expert_wait_s, 3),
        "transfer_wait_ms": round(1e3 * times.transfer_wait_s, 3),
        "device_wait_ms": round(1e3 * times.device_wait_s, 3),
        "ngram_n": times.ngram_rows,
        "ngram_hits_n": times.ngram_hits,
        "major_faults_n": times.major_faults,
        "disk_bytes_n": sum(reads.num_bytes for reads in times.disk),
    }
    routes = shares_of(times.routes)
    if routes:
        timings["expert_routes"] = {
            way: {"n": count, "share": round(share, 6)} for way, (count, share) in routes.items()
        }
    expert_bytes = {way: size for way, size in msgspec.structs.asdict(times.expert_bytes).items() if size}
    if expert_bytes:
        timings["expert_bytes_n"] = expert_bytes
    if times.disk:
        timings["disk"] = [_reads_of(reads) for reads in times.disk]
    staged = outcome.staged
    if staged is not None and staged.reads.num_reads:
        timings["staged"] = {
            "ngram_n": staged.num_rows,
            "ngram_hits_n": staged.num_hits,
            "ms": round(1e3 * staged.seconds, 3),
            "depth": round(staged.depth, 1),
            **_reads_of(staged.reads),
        }
    return timings


def _reads_of(reads: FileReads) -> dict[str, Any]:
    return {
        "file": reads.file,
        "reads_n": reads.num_reads,
        "bytes_n": reads.num_bytes,
        "wait_ms": round(1e3 * reads.wait_s, 3),
    }


@dataclass(slots=True)
class _Job:
    """One request on its way through the stack."""

    services: Services
    prompt: Prompt
    generate: GenerateRequest
    generation: Generation
    body: GenerationFields
    shape: Shape
    place: Place
    arrived_at: float
    timings: dict[str, Any] = field(default_factory=dict, init=False)

    async def whole(self) -> web.Response:
        """The answer in one JSON object."""
        async with aclosing(self._text()) as text:
            pieces = [piece async for piece in text]
        outcome = self.generation.outcome
        payload = self.shape.whole("".join(pieces), outcome)
        return web.json_response(payload | self._usage(outcome) | {"timings": self.timings})

    async def streamed(self, stream: EventStream) -> None:
        """The answer as events. What fails from here on is an event too."""
        try:
            await self._stream_text(stream)
        except ConnectionError:
            raise
        except Exception as error:
            self.services.metrics.failed(code_of(error))
            await stream.send(error_event(error, self.generate.request_id))
        await stream.done()

    async def _stream_text(self, stream: EventStream) -> None:
        # The official format has a null usage on every chunk but the last where usage was asked for.
        filler: dict[str, Any] = {"usage": None} if self.body.wants_usage_chunk else {}
        opening = self.shape.opening()
        if opening is not None:
            await stream.send(opening | filler)
        async with aclosing(self._text()) as text:
            async for piece in text:
                await stream.send(self.shape.piece(piece) | filler)
        outcome = self.generation.outcome
        await stream.send(self.shape.closing(outcome) | filler | {"timings": self.timings})
        if self.body.wants_usage_chunk:
            await stream.send(self.shape.usage() | self._usage(outcome))

    async def _turn(self) -> None:
        """Waits for the place: as long as it takes while the stack is well, a minute while it is not."""
        engine, granted = self.services.engine, self.place.granted
        while True:
            await engine.wait_ready(_RECOVERY_TIMEOUT_S)
            if granted.done():
                granted.result()
                return
            await engine.while_ready(granted)

    async def _text(self) -> AsyncGenerator[str, None]:
        """Runs the generation, in its turn: the pieces of its text. Notes in metrics and log how it ended."""
        engine, admission, generation = self.services.engine, self.services.admission, self.generation
        queued_at = time.monotonic()
        await self._turn()
        generation.waited_s = time.monotonic() - queued_at
        answers_of = engine.open(self.generate, partial(admission.give_back, self.place))
        async with answers_of as answers, aclosing(generation.text(answers)) as text:
            async for piece in text:
                yield piece
        self.services.metrics.finished(generation, self.arrived_at, self.prompt.tokenize_s)
        outcome = generation.outcome
        self.timings = timings_of(len(self.prompt.token_ids), outcome, self.prompt.tokenize_s)
        self.services.last_timings = self.timings
        _log.info(
            "%s: %d prompt tokens, %d generated, %s, %.3f s to the first token, %.3f s in all",
            self.generate.request_id,
            len(self.prompt.token_ids),
            outcome.num_output_tokens,
            outcome.finish_reason,
            (generation.first_token_at or self.arrived_at) - self.arrived_at,
            time.monotonic() - self.arrived_at,
        )

    def _usage(self, outcome: Outcome) -> dict[str, Any]:
        return {"usage": usage_of(len(self.prompt.token_ids), outcome)}
