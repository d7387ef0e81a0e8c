"""POST /v1/completions."""

import time
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api.answering import (
    Prompt,
    answer,
    check_may_enter,
    check_model,
    encode_off_loop,
    max_counted_tokens,
)
from gateway.api.schema import CompletionRequest, read_body, refuse_unsupported
from gateway.generation import Outcome
from gateway.services import BODY_BYTES, REQUEST_ID, SERVICES, Services
from shared.errors import InvalidRequestError


async def completions(request: web.Request) -> web.StreamResponse:
    """One continuation of a prompt, whole or streamed."""
    services = request.app[SERVICES]
    body, _ = await read_body(request, CompletionRequest, services)
    check_model(body.model, services)
    refuse_unsupported(body)
    check_may_enter(services)
    prompt = await _encode(body, services, request[BODY_BYTES])
    shape = CompletionShape(f"cmpl-{request[REQUEST_ID]}", services.model_name, int(time.time()))
    return await answer(request, prompt, body, shape)


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

    def __init__(self, answer_id: str, model_name: str, created: int) -> None:
        self._common = {"id": answer_id, "object": "text_completion", "created": created, "model": model_name}

    def opening(self) -> None:
        """Nothing comes before the text."""

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._with_choice(text, None)

    def closing(self, outcome: Outcome) -> dict[str, Any]:
        """The chunk that says how it ended."""
        return self._with_choice("", outcome.finish_reason)

    def usage(self) -> dict[str, Any]:
        """A chunk without choices."""
        return self._common | {"choices": []}

    def whole(self, text: str, outcome: Outcome) -> dict[str, Any]:
        """The answer in one piece."""
        return self._with_choice(text, outcome.finish_reason)

    def _with_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._common | {"choices": [choice]}
