"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.answer_text import Piece
from gateway.api.answering import (
    Prompt,
    check_may_enter,
    check_model,
    encode_off_loop,
    max_counted_tokens,
)
from gateway.api.logprobs import chat_logprobs
from gateway.api.responding import WholeAnswer, respond
from gateway.api.schema import ChatMessage, ChatRequest, read_body, refuse_unsupported
from gateway.chat_template import ChatTemplateError
from gateway.generation import Outcome
from gateway.services import BODY_BYTES, REQUEST_ID, SERVICES, Services
from gateway.tokenizer import Tokenizer
from shared.errors import InvalidRequestError


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers to a conversation, whole or streamed."""
    services = request.app[SERVICES]
    body, plain = await read_body(request, ChatRequest, services)
    check_model(body.model, services)
    refuse_unsupported(body)
    check_parts(body.messages)
    check_may_enter(services, body.num_answers)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    limit = max_counted_tokens(services)
    prompt = await encode_chat(services, plain["messages"], variables, request[BODY_BYTES], max_tokens=limit)
    tokenizer = services.loaded_text().tokenizer
    shape = ChatShape(f"chatcmpl-{request[REQUEST_ID]}", services.model_name, int(time.time()), tokenizer)
    return await respond(request, prompt, body, shape)


def check_parts(messages: list[ChatMessage]) -> None:
    """Raises InvalidRequestError for a part of a message that is not text."""
    for number, message in enumerate(messages):
        for part_number, part in enumerate(message.content if isinstance(message.content, list) else []):
            if part.type != "text" or part.text is None:
                param = f"messages[{number}].content[{part_number}]"
                hint = "vision is not supported" if "image" in part.type else "only text is supported"
                raise InvalidRequestError(f"{param} is a part of type {part.type!r}; {hint}", param=param)


async def encode_chat(
    services: Services,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    num_bytes: int,
    add_generation_prompt: bool = True,
    max_tokens: int | None = None,
) -> Prompt:
    """Renders and tokenises a conversation, which came in a body of that length, off the event loop.

    Raises InvalidRequestError, and ContextLengthError beyond `max_tokens`.
    """
    template = services.loaded_text().chat_template
    if template is None:
        raise InvalidRequestError(
            "the model file has no chat template (tokenizer.chat_template); use /v1/completions"
        )
    started = time.monotonic()
    try:
        encode = partial(
            template.encode_chat,
            [_with_known_role(message) for message in messages],
            template_kwargs=variables,
            add_generation_prompt=add_generation_prompt,
            max_tokens=max_tokens,
        )
        prompt = await encode_off_loop(services, num_bytes, encode)
    except ChatTemplateError as error:
        raise InvalidRequestError(
            f"the chat template refuses the messages: {error}", param="messages"
        ) from None
    return Prompt(prompt.token_ids, time.monotonic() - started, prompt.boundaries)


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """Templates know the older name of the developer's role."""
    return message | {"role": "system"} if message["role"] == "developer" else message


class ChatShape:
    """Chat completions, whole and in chunks."""

    def __init__(self, answer_id: str, model_name: str, created: int, tokenizer: Tokenizer) -> None:
        self._common = {"id": answer_id, "created": created, "model": model_name}
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that names the role."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk with text."""
        logprobs = chat_logprobs(piece.entries, self._tokenizer) if piece.entries else None
        return self._chunk(index, {"content": piece.text}, logprobs)

    def closing(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """The chunk that says how it ended."""
        chunk = self._chunk(index, {})
        chunk["choices"][0] |= {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}
        return chunk

    def usage(self) -> dict[str, Any]:
        """A chunk without choices."""
        return self._common | {"object": "chat.completion.chunk", "choices": []}

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The answers in one piece."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": (
                    chat_logprobs(answer.entries, self._tokenizer) if answer.entries is not None else None
                ),
                "finish_reason": answer.outcome.finish_reason,
                "stop_reason": answer.outcome.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return self._common | {"object": "chat.completion", "choices": choices}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._common | {"object": "chat.completion.chunk", "choices": [choice]}
