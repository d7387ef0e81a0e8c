"""Errors as OpenAI clients expect them, before the first byte and after it."""

import logging
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from gateway.services import REQUEST_ID, SERVICES
from shared.errors import (
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
)

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"

_INTERNAL_ERROR = "internal_error"
# As other servers log a client that hung up; nobody gets to see it.
_CLIENT_CLOSED = 499
_MAX_SHOWN_PATH = 100


def error_object(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The body of an error, and the payload of an error event."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def code_of(error: Exception) -> str:
    """The stable word for what went wrong, as the metrics count it."""
    match error:
        case GenerationError():
            return error.code
        case RequestError():
            return error.code or "invalid_request"
        case _:
            return _INTERNAL_ERROR


def error_event(error: Exception, request_id: str) -> dict[str, Any]:
    """The body of an error's response, and its event where an answer fails after it began: then the status
    can no longer change. Logs it."""
    if not isinstance(error, GenerationError | RequestError):
        _log.error("%s: an unexpected error", request_id, exc_info=error)
        return error_object(f"internal error (request {request_id})", "server_error", None, _INTERNAL_ERROR)
    _log.info("%s: failed: %s", request_id, error)
    message = f"{error} (request {request_id})"
    if isinstance(error, GenerationError):
        return error_object(message, "server_error", None, error.code)
    return error_object(message, error.error_type, error.param, error.code)


def error_response(error: Exception, request_id: str) -> web.Response:
    """The response for an error that comes before the first byte."""
    if isinstance(error, RequestError):
        status, retry_after_s = error.status, error.retry_after_s
    elif isinstance(error, GenerationError):
        # The request was good; another try may well succeed.
        status, retry_after_s = 503, 5
    else:
        status, retry_after_s = 500, None
    headers = {REQUEST_ID_HEADER: request_id}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return web.json_response(error_event(error, request_id), status=status, headers=headers)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every failure its error object and its place in the metrics."""
    request_id = request[REQUEST_ID]
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = _failed(request, _from_http(error, request))
        if hdrs.ALLOW in error.headers:
            response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    except ConnectionError:
        # The client left; aiohttp notices when it tries to send this.
        response = web.Response(status=_CLIENT_CLOSED)
    except Exception as error:
        if request.writer.output_size > 0:
            # Part of another response is already out, this one cannot be: aiohttp logs it, and hangs up.
            raise
        response = _failed(request, error)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def _failed(request: web.Request, error: Exception) -> web.StreamResponse:
    request.app[SERVICES].metrics.failed(code_of(error))
    response = error_response(error, request[REQUEST_ID])
    if request.content.exception() is not None:
        # The body could not be read, so where the next request begins is not known. aiohttp would wait for
        # the rest of it, and log the same once more as an error of its own.
        request.content.feed_eof()
        response.force_close()
    return response


def _from_http(error: web.HTTPException, request: web.Request) -> Exception:
    """What aiohttp raises by itself, as our own errors."""
    match error:
        case web.HTTPNotFound():
            path = request.path[:_MAX_SHOWN_PATH]
            return NotFoundError(f"there is no {path!r} here; see /v1/models, /v1/chat/completions, /health")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowedError(f"{request.path} takes {allowed}, not {request.method}")
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLargeError(
                f"the body is larger than {request.client_max_size / 2**20:g} MiB; "
                "raise --max-body-mib to accept larger ones"
            )
        case web.HTTPClientError():
            return InvalidRequestError(error.text or error.reason)
        case _:
            return RequestError(error.text or error.reason)
