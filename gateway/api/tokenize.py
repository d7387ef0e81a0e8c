"""POST /tokenize and /detokenize."""

from aiohttp import web

from gateway.api.answering import check_model
from gateway.api.chat import check_parts, encode_chat
from gateway.api.schema import DetokenizeRequest, TokenizeRequest, read_body
from gateway.detokenizer import detokenize
from gateway.services import BODY_BYTES, SERVICES
from shared.errors import InvalidRequestError


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text, or of a chat as the model would see it."""
    services = request.app[SERVICES]
    body, plain = await read_body(request, TokenizeRequest, services)
    check_model(body.model, services)
    if [body.prompt, body.content, body.messages].count(None) != 2:
        raise InvalidRequestError(
            "give one of prompt (a text), content (the same) and messages (a chat)", param="prompt"
        )
    text = body.prompt if body.prompt is not None else body.content
    tokenizer = services.loaded_text().tokenizer
    if text is not None:
        token_ids = await services.off_loop(request[BODY_BYTES], tokenizer.encode, text, body.parse_special)
        if body.add_special_tokens is not False:
            token_ids = tokenizer.with_bos(token_ids)
    else:
        check_parts(body.messages or [])
        variables = body.chat_template_kwargs or {}
        prompt = await encode_chat(
            services, plain["messages"], variables, request[BODY_BYTES], body.add_generation_prompt
        )
        token_ids = prompt.token_ids
    answer = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": services.engine.max_context or None,
    }
    return web.json_response(answer)


async def detokenize_ids(request: web.Request) -> web.Response:
    """The text of token ids, control tokens included; under both names that servers use."""
    services = request.app[SERVICES]
    body, _ = await read_body(request, DetokenizeRequest, services)
    check_model(body.model, services)
    tokenizer = services.loaded_text().tokenizer
    if body.tokens and max(body.tokens) >= tokenizer.num_tokens:
        raise InvalidRequestError(
            f"the token id {max(body.tokens)} does not exist; the vocabulary has {tokenizer.num_tokens}",
            param="tokens",
        )
    text = await services.off_loop(request[BODY_BYTES], detokenize, tokenizer, body.tokens, show_control=True)
    return web.json_response({"prompt": text, "text": text})
