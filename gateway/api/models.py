"""GET /v1/models and /v1/models/{name}."""

from typing import Any

from aiohttp import web

from gateway.api.answering import check_model
from gateway.services import SERVICES, Services


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served, and its aliases."""
    services = request.app[SERVICES]
    names = (services.model_name, *services.config.aliases)
    return web.json_response({"object": "list", "data": [_model(name, services) for name in names]})


async def get_model(request: web.Request) -> web.Response:
    """One of them by name."""
    services = request.app[SERVICES]
    name = request.match_info["name"]
    check_model(name, services)
    return web.json_response(_model(name, services))


def _model(name: str, services: Services) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "strata",
        "root": services.model_name,
        "max_model_len": services.engine.max_context or None,
    }
