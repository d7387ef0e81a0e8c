"""The gateway at work: HTTP from the first moment, the links to the workers, the text model, the drain."""

import asyncio
import logging
import resource
import time
from functools import partial

from aiohttp import web

from gateway.admission import Admission
from gateway.app import build_app
from gateway.engine_client import EngineClient
from gateway.metrics import Metrics, StackCollector
from gateway.services import Services
from gateway.text_model import load_text_model
from shared.config import LOOPBACK_HOSTS, GatewayConfig
from shared.errors import GenerationError, ResourceError
from shared.model_config import read_model_config
from shared.process import ProcessContext, ProcessState, load_in_thread

_log = logging.getLogger(__name__)

_DRAIN_LOOK_INTERVAL_S = 0.05
# What handlers get to send their last event once their requests were ended.
_LAST_WORDS_S = 1.0


def _allow_many_connections() -> None:
    """Takes as many file descriptors as the system lets this process have; the usual 1024 are for programs
    that use `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Gateway:
    """The process."""

    def __init__(self, context: ProcessContext[GatewayConfig]) -> None:
        read_model_config(context.model)
        config = context.config
        self._context = context
        model_name = config.model_name or context.model.name
        engine = EngineClient(context.identity, context.directory, config)
        admission = Admission(config.parallel, config.queue_size)
        metrics = Metrics(model_name)
        metrics.registry.register(StackCollector(engine, admission, context.heartbeat, model_name))
        self._services = Services(context, model_name, int(time.time()), engine, admission, metrics)

    async def run(self) -> None:
        """Runs until drained."""
        _allow_many_connections()
        context, services = self._context, self._services
        runner = web.AppRunner(
            build_app(services), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S
        )
        await runner.setup()
        try:
            await self._listen(runner)
            async with asyncio.TaskGroup() as group:
                links = group.create_task(services.engine.run(), name="worker links")
                try:
                    context.report("loading the tokenizer", 0.5)
                    services.text = await load_in_thread(partial(load_text_model, context.model))
                    context.state = ProcessState.READY
                    context.report("serving", 1.0)
                    await context.drain.wait()
                    context.state = ProcessState.DRAINING
                    services.admission.drain()
                    # Requests leave one by one; there is no event for the last of them.
                    while not services.admission.is_idle:  # noqa: ASYNC110
                        await asyncio.sleep(_DRAIN_LOOK_INTERVAL_S)
                finally:
                    services.admission.dismiss()
                    services.engine.stop(GenerationError("the server is stopping", code="draining"))
                    await runner.cleanup()
                    links.cancel()
        finally:
            await runner.cleanup()
            context.directory.url_path.unlink(missing_ok=True)

    async def _listen(self, runner: web.AppRunner) -> None:
        config = self._context.config
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
                "stop what uses the port, or choose another --port"
            ) from None
        host, port = runner.addresses[0][:2]
        shown_host = f"[{host}]" if ":" in host else host
        url = f"http://{shown_host}:{port}"
        self._context.directory.url_path.write_text(url, encoding="ascii")
        _log.info("listening on %s", url)
        if config.host not in LOOPBACK_HOSTS:
            _log.warning("%s is reachable from other machines, and there is no key to keep them out", url)
