"""What the request handlers work with, and the keys under which aiohttp keeps it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics
from gateway.request_progress import RequestProgress
from gateway.text_model import TextModel
from shared.config import GatewayConfig
from shared.errors import QueueFullError
from shared.process import ProcessContext

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Bodies longer than this, in bytes, are worked on one after the other.
_LONG_BODY = 1 << 18
_RETRY_AFTER_S = 5


@dataclass(slots=True)
class Services:
    """One gateway's parts. `text` is loaded while the server already answers /health."""

    context: ProcessContext[GatewayConfig]
    model_name: str
    created: int
    engine: EngineClient
    admission: Admission
    metrics: Metrics
    text: TextModel | None = None
    # The answers being given, by request id.
    requests: dict[str, RequestProgress] = field(default_factory=dict)
    # The `timings` of the answer that ended last: many clients do not show theirs.
    last_timings: dict[str, Any] | None = None
    known_unknown_fields: set[str] = field(default_factory=set)
    _num_long: int = 0
    _long_bodies: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="long-body")
    )

    @property
    def config(self) -> GatewayConfig:
        """The gateway's settings."""
        return self.context.config

    @property
    def is_loaded(self) -> bool:
        """Whether requests are answered now."""
        return self.text is not None and self.engine.is_ready

    async def off_loop(
        self,
        num_bytes: int,
        function: Callable[Parameters, Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Runs work on what came in a body of that length in a thread. Long ones take turns, so that they
        leave threads and cores to short ones; one whose client leaves before its turn is never begun.

        Raises QueueFullError where as many wait for their turn as requests may wait for theirs.
        """
        work = partial(function, *arguments, **named)
        loop = asyncio.get_running_loop()
        if num_bytes <= _LONG_BODY:
            return await loop.run_in_executor(None, work)
        if self._num_long > self.config.queue_size:
            raise QueueFullError(
                f"{self._num_long} long texts wait to be read, more than --queue-size allows; try later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long_bodies, work)
        finally:
            self._num_long -= 1

    def loaded_text(self) -> TextModel:
        """Tokenizer and template. Raises ModelLoadingError while they are not there."""
        if self.text is None:
            raise self.engine.not_ready()
        return self.text


SERVICES = web.AppKey("services", Services)
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
"""`time.monotonic()` when the request's head had come."""
BODY_BYTES = web.RequestKey("body_bytes", int)
"""Length of the body, once it has been read."""
