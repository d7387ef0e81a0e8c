"""The aiohttp application: routes, middlewares, limits."""

import logging
import re
import secrets
import time

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from gateway.api.chat import chat_completions
from gateway.api.completions import completions
from gateway.api.logits import logits
from gateway.api.models import get_model, list_models
from gateway.api.status import get_version, health, livez, metrics, readyz, status
from gateway.api.tokenize import detokenize_ids, tokenize
from gateway.error_responses import REQUEST_ID_HEADER, error_middleware
from gateway.services import ARRIVED_AT, REQUEST_ID, SERVICES, Services

_log = logging.getLogger(__name__)

_ACCEPTABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class _MalformedRequests(logging.Filter):
    """Makes one quiet line of what aiohttp reports, with a traceback, when something that is no HTTP request
    comes in: anyone who can reach the port could flood the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            _log.info("what came in is no HTTP request: %.200s", " ".join(error.message.split()))
            return False
        return True


logging.getLogger("aiohttp.server").addFilter(_MalformedRequests())


def build_app(services: Services) -> web.Application:
    """The application that serves these services."""
    app = web.Application(
        middlewares=[request_id_middleware, error_middleware],
        client_max_size=int(services.config.max_body_mib * 2**20),
    )
    app[SERVICES] = services
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/version", get_version),
            web.get("/metrics", metrics),
            web.get("/v1/status", status),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{name:.+}", get_model),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize_ids),
        ]
    )
    if services.config.logits_endpoint:
        app.router.add_post("/v1/logits", logits)
    return app


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the client's request id, made unique, or makes one: it is in every log line and error."""
    own = secrets.token_hex(8)
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[ARRIVED_AT] = time.monotonic()
    request[REQUEST_ID] = f"{given}-{own}" if _ACCEPTABLE_REQUEST_ID.fullmatch(given) else own
    return await handler(request)
