"""GET /health, /v1/status, /livez, /readyz, /version and /metrics: how the stack is doing."""

import time
from importlib.metadata import version
from typing import Any

from aiohttp import web

from gateway.services import SERVICES, Services
from shared.link import Peer, PeerState
from shared.messages import Heartbeat


async def health(request: web.Request) -> web.Response:
    """Always answers, also while the model loads; `loaded` says whether requests are served.

    `progress` is the slowest worker's start-up work, from 0 to 1, and what it is doing.
    """
    services = request.app[SERVICES]
    return web.json_response(
        {
            "status": _status(services),
            "loaded": services.is_loaded,
            "model": services.model_name,
            "max_context": services.engine.max_context or None,
            "images": False,
            "api_key": False,
            "service": "strata",
            "progress": _progress(services),
            "running": services.admission.num_running,
            "waiting": services.admission.num_waiting,
            "processes": _processes(services),
        }
    )


async def status(request: web.Request) -> web.Response:
    """What `health` says in short, in full: every request that is being answered, and all that the processes
    found out about themselves and their machine."""
    services = request.app[SERVICES]
    return web.json_response(
        {
            "service": "strata",
            "status": _status(services),
            "loaded": services.is_loaded,
            "model": services.model_name,
            "max_context": services.engine.max_context or None,
            "parallel": services.config.parallel,
            "queue_size": services.config.queue_size,
            "progress": _progress(services),
            "requests": [
                {"id": request_id} | progress.fields() for request_id, progress in services.requests.items()
            ],
            "last_timings": services.last_timings,
            "processes": _processes_in_full(services),
        }
    )


async def livez(request: web.Request) -> web.Response:
    """200 as long as the gateway itself answers."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 when requests are served, 503 otherwise: for probes that look at nothing but the status."""
    services = request.app[SERVICES]
    is_ready = services.is_loaded and not services.admission.is_draining
    return web.json_response({"status": _status(services)}, status=200 if is_ready else 503)


async def get_version(request: web.Request) -> web.Response:
    """The version of Strata."""
    return web.json_response({"version": version("strata-inference")})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus metrics of all processes."""
    body, content_type = request.app[SERVICES].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": content_type})


def _status(services: Services) -> str:
    if services.admission.is_draining:
        return "draining"
    if services.is_loaded:
        return "ok"
    has_lost_one = any(peer.num_losses for peer in services.engine.peers.values())
    return "recovering" if has_lost_one else "loading"


def _progress(services: Services) -> dict[str, Any]:
    if services.text is None:
        return {"fraction": 0.0, "activity": "gateway: loading the tokenizer"}
    slowest = {"fraction": 1.0, "activity": "serving"}
    for role, peer in services.engine.peers.items():
        if peer.heartbeat is None:
            return {"fraction": 0.0, "activity": f"{role}: starting"}
        if peer.heartbeat.progress < slowest["fraction"]:  # type: ignore[operator]
            slowest = {
                "fraction": round(peer.heartbeat.progress, 3),
                "activity": f"{role}: {peer.heartbeat.activity}",
            }
    return slowest


def _processes(services: Services) -> dict[str, Any]:
    now = time.monotonic()
    own = services.context.heartbeat()
    described = {
        "gateway": _describe(own, services.context.identity.pid, services.context.identity.incarnation)
    }
    for role, peer in services.engine.peers.items():
        described[role] = _describe_peer(peer, now)
    return described


def _processes_in_full(services: Services) -> dict[str, Any]:
    described = _processes(services)
    described["gateway"]["gauges"] = services.context.heartbeat().gauges
    for role, peer in services.engine.peers.items():
        if peer.heartbeat is not None:
            described[role]["gauges"] = peer.heartbeat.gauges
        # One that has yet to load has none; those of its predecessor are not its own.
        if peer.state is PeerState.READY:
            described[role]["capabilities"] = dict(peer.capabilities)
    return described


# What a process finds out while it loads: the instructions its CPU products use, the device it computes on,
# how experts are kept.
_FOUND = ("kernels", "device", "experts", "expert_places", "expert_pool_gib")


def _describe_peer(peer: Peer, now: float) -> dict[str, Any]:
    if peer.heartbeat is None:
        return {"state": "absent", "losses": peer.num_losses}
    described = _describe(peer.heartbeat, peer.pid, peer.incarnation)
    described |= {"heartbeat_age_s": round(peer.silence_s(now), 3), "losses": peer.num_losses}
    return described | {name: peer.capabilities[name] for name in _FOUND if name in peer.capabilities}


def _describe(heartbeat: Heartbeat, pid: int, incarnation: str) -> dict[str, Any]:
    return {
        "state": heartbeat.state,
        "activity": heartbeat.activity,
        "progress": round(heartbeat.progress, 3),
        "pid": pid,
        "incarnation": incarnation,
        "resident_memory_bytes": int(heartbeat.gauges.get("resident_memory_bytes", 0)),
        "resident_file_bytes": int(heartbeat.gauges.get("resident_file_bytes", 0)),
        "locked_memory_bytes": int(heartbeat.gauges.get("locked_memory_bytes", 0)),
    }
