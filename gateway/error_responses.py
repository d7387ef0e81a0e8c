"""Errors as OpenAI clients expect them, before the first byte and after it."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.services import REQUEST_ID
from shared.errors import (
    GenerationError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestError,
)

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"


def error_object(message: str, error_type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The body of an error, and the payload of an error event."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def error_event(error: Exception, request_id: str) -> dict[str, Any]:
    """The event for an answer that fails after it began; its status can no longer change."""
    match error:
        case GenerationError():
            return error_object(f"{error} (request {request_id})", "server_error", None, error.code)
        case RequestError():
            return error_object(f"{error} (request {request_id})", error.error_type, error.param, error.code)
        case _:
            _log.error("%s: an unexpected error ends the stream", request_id, exc_info=error)
            return error_object(
                f"internal error (request {request_id})", "server_error", None, "internal_error"
            )


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
    """Gives every request its id, and every failure its error object."""
    request_id = request[REQUEST_ID]
    try:
        response = await handler(request)
    except web.HTTPException as error:
        return error_response(_from_http(error, request), request_id)
    except Exception as error:
        return error_response(error, request_id)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def _from_http(error: web.HTTPException, request: web.Request) -> Exception:
    """What aiohttp raises by itself, as our own errors."""
    match error:
        case web.HTTPNotFound():
            return NotFoundError(
                f"there is no {request.path} here; see /v1/models, /v1/chat/completions, /health"
            )
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowedError(f"{request.path} takes {allowed}, not {request.method}")
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLargeError(f"{error.text}; raise --max-body-mib to accept larger bodies")
        case _:
            failure = RequestError(error.text or error.reason)
            return failure
