"""What the request handlers work with, and the keys under which aiohttp keeps it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from aiohttp import web

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics
from gateway.text_model import TextModel
from shared.config import GatewayConfig
from shared.process import ProcessContext

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Longer texts than this, in characters, wait for each other.
_LONG_TEXT = 1 << 18


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
    known_unknown_fields: set[str] = field(default_factory=set)
    _long_texts: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="long-text")
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
        num_characters: int,
        function: Callable[Parameters, Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Runs work on a text of that length in a thread. Long texts take turns, so that they leave threads
        and cores to short ones; one whose client leaves before its turn is never begun."""
        pool = self._long_texts if num_characters > _LONG_TEXT else None
        work = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def loaded_text(self) -> TextModel:
        """Tokenizer and template. Raises ModelLoadingError while they are not there."""
        if self.text is None:
            raise self.engine.not_ready()
        return self.text


SERVICES = web.AppKey("services", Services)
REQUEST_ID = web.RequestKey("request_id", str)
