"""Errors before the first byte and after it: status, object, headers, log, metrics."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.app import request_id_middleware
from gateway.error_responses import code_of, error_event, error_middleware, error_response
from gateway.metrics import Metrics
from gateway.services import SERVICES, Services
from shared import errors

Client = TestClient[web.Request, web.Application]


def subclasses(kind: type[errors.StrataError]) -> list[type[errors.StrataError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in subclasses(child))]


@pytest.mark.parametrize("kind", subclasses(errors.RequestError))
def test_every_refusal_has_its_status_and_object(kind: type[errors.RequestError]) -> None:
    response = error_response(kind("why", param="p", code="c", retry_after_s=3), "id-1")
    assert response.status == kind.status
    assert 400 <= response.status < 600
    assert response.headers["Retry-After"] == "3"
    assert response.headers["x-request-id"] == "id-1"
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {
        "error": {"message": "why (request id-1)", "type": kind.error_type, "param": "p", "code": "c"}
    }


@pytest.mark.parametrize("kind", subclasses(errors.GenerationError))
def test_every_failure_of_a_generation_may_be_tried_again(kind: type[errors.GenerationError]) -> None:
    error = kind("why")
    response = error_response(error, "id-1")
    assert response.status == 503
    assert response.headers["Retry-After"]
    assert error_event(error, "id-1")["error"]["code"] == kind.default_code == code_of(error)


def test_an_unexpected_error_tells_the_client_nothing_but_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = error_response(ZeroDivisionError("secret"), "id-1")
    assert response.status == 500
    assert isinstance(response.body, bytes)
    assert b"secret" not in response.body
    assert b"id-1" in response.body
    assert "secret" in caplog.text
    assert "id-1" in caplog.text


def test_a_refusal_without_a_code_counts_as_an_invalid_request() -> None:
    assert code_of(errors.InvalidRequestError("why")) == "invalid_request"


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[tuple[Client, Metrics]]:
    """A server with the gateway's middlewares and one page."""
    metrics = Metrics("m")
    app = web.Application(middlewares=[request_id_middleware, error_middleware], client_max_size=100)
    app[SERVICES] = cast("Services", SimpleNamespace(metrics=metrics))
    app.add_routes([web.get("/", handler), web.post("/", handler)])
    async with TestClient(TestServer(app)) as client:
        yield client, metrics


def count(metrics: Metrics, code: str) -> float | None:
    labels = {"model_name": "m", "code": code}
    return metrics.registry.get_sample_value("strata_request_failure_total", labels)


async def test_what_aiohttp_refuses_looks_like_our_own() -> None:
    async def page(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    async with serving(page) as (client, metrics):
        for method, path, status, code in (
            ("GET", "/nowhere", 404, "not_found"),
            ("PUT", "/", 405, "method_not_allowed"),
            ("POST", "/", 413, "request_too_large"),
        ):
            response = await client.request(method, path, data=b"x" * 1000)
            body = await response.json()
            assert (response.status, body["error"]["code"]) == (status, code)
            assert response.headers["x-request-id"] in body["error"]["message"]
            assert count(metrics, code) == 1
        allowed = (await client.put("/")).headers["Allow"]
        assert set(allowed.split(",")) >= {"GET", "POST"}


async def test_an_error_is_counted_once() -> None:
    async def page(request: web.Request) -> web.Response:
        raise errors.InvalidRequestError("no")

    async with serving(page) as (client, metrics):
        assert (await client.get("/")).status == 400
        assert count(metrics, "invalid_request") == 1


async def test_an_error_after_the_first_byte_closes_the_connection() -> None:
    """A second response in the middle of the first would be taken for a part of it."""

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        raise errors.GenerationError("the rest is missing")

    async with serving(page) as (client, _):
        response = await client.get("/")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_client_that_hung_up_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("the client is gone")

    caplog.set_level("WARNING")
    async with serving(page) as (client, metrics):
        assert (await client.get("/")).status == 499
        assert count(metrics, "internal_error") is None
    assert caplog.text == ""
