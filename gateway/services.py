"""What the request handlers work with, and the keys under which aiohttp keeps it."""

from dataclasses import dataclass, field

from aiohttp import web

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics
from gateway.text_model import TextModel
from shared.config import GatewayConfig
from shared.process import ProcessContext


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

    @property
    def config(self) -> GatewayConfig:
        """The gateway's settings."""
        return self.context.config

    @property
    def is_loaded(self) -> bool:
        """Whether requests are answered now."""
        return self.text is not None and self.engine.is_ready

    def loaded_text(self) -> TextModel:
        """Tokenizer and template. Raises ModelLoadingError while they are not there."""
        if self.text is None:
            raise self.engine.not_ready()
        return self.text


SERVICES = web.AppKey("services", Services)
REQUEST_ID = web.RequestKey("request_id", str)
