"""POST /v1/completions."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.answer_text import Piece, TokenEntry
from gateway.api.answering import (
    Prompt,
    check_may_enter,
    check_model,
    encode_off_loop,
    max_counted_tokens,
)
from gateway.api.logprobs import completion_logprobs
from gateway.api.responding import WholeAnswer, respond
from gateway.api.schema import CompletionRequest, read_body, refuse_unsupported
from gateway.generation import Outcome
from gateway.services import BODY_BYTES, REQUEST_ID, SERVICES, Services
from gateway.tokenizer import Tokenizer
from shared.errors import InvalidRequestError


async def completions(request: web.Request) -> web.StreamResponse:
    """Continuations of a prompt, whole or streamed."""
    services = request.app[SERVICES]
    body, _ = await read_body(request, CompletionRequest, services)
    check_model(body.model, services)
    refuse_unsupported(body)
    check_may_enter(services, body.num_answers)
    prompt = await _encode(body, services, request[BODY_BYTES])
    answer_id, tokenizer = f"cmpl-{request[REQUEST_ID]}", services.loaded_text().tokenizer
    num_top = body.num_top_logprobs or 0
    shape = CompletionShape(answer_id, services.model_name, int(time.time()), tokenizer, num_top)
    return await respond(request, prompt, body, shape)


async def _encode(body: CompletionRequest, services: Services, num_bytes: int) -> Prompt:
    """Token ids of the one prompt. Special tokens are honoured: the client writes the whole structure."""
    text_or_ids = _single(body.prompt)
    started = time.monotonic()
    if isinstance(text_or_ids, str):
        tokenizer = services.loaded_text().tokenizer
        limit = max_counted_tokens(services)
        encode = partial(tokenizer.encode, text_or_ids, max_tokens=limit)
        token_ids = tokenizer.with_bos(await encode_off_loop(services, num_bytes, encode))
    else:
        token_ids = text_or_ids
    return Prompt(token_ids, time.monotonic() - started)


def _single(prompt: str | list[Any]) -> str | list[int]:
    """The one prompt in what the API allows: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(entry, int) for entry in prompt):
        return prompt
    if len(prompt) != 1:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts; one is supported in a request, send the others separately",
            param="prompt",
        )
    only: str | list[int] = prompt[0]
    return only


class CompletionShape:
    """Text completions, whole and in chunks."""

    def __init__(
        self, answer_id: str, model_name: str, created: int, tokenizer: Tokenizer, num_top_logprobs: int
    ) -> None:
        self._common = {"id": answer_id, "object": "text_completion", "created": created, "model": model_name}
        self._tokenizer = tokenizer
        self._num_top_logprobs = num_top_logprobs

    def opening(self, index: int) -> None:
        """Nothing comes before the text."""

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk(self._choice(index, piece.text, piece.entries or None))

    def closing(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """The chunk that says how it ended."""
        return self._chunk(self._choice(index, "", None) | _end(outcome))

    def usage(self) -> dict[str, Any]:
        """A chunk without choices."""
        return self._chunk()

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The answers in one piece."""
        return self._chunk(
            *(
                self._choice(index, answer.text, answer.entries) | _end(answer.outcome)
                for index, answer in enumerate(answers)
            )
        )

    def _choice(self, index: int, text: str, entries: Sequence[TokenEntry] | None) -> dict[str, Any]:
        logprobs = None
        if entries is not None:
            logprobs = completion_logprobs(entries, self._tokenizer, self._num_top_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return self._common | {"choices": list(choices)}


def _end(outcome: Outcome) -> dict[str, Any]:
    return {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}
