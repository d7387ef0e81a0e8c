"""POST /v1/logits: the logits of every position of a prompt, for `strata logits`. Off unless switched on.

The gpu_worker appends them to a file in the run directory, since tensors do not travel in messages; the file
is then sent and removed.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from gateway.api.answering import Prompt, generate_request
from gateway.api.schema import GenerationFields, LogitsRequest, read_body
from gateway.engine_client import EngineClient
from gateway.services import REQUEST_ID, SERVICES
from shared.messages import GenerateRequest, RequestFinished

_PIECE_BYTES = 1 << 20


async def logits(request: web.Request) -> web.StreamResponse:
    """float32 rows [prompt tokens, vocabulary] as raw little-endian bytes; their number is in a header."""
    services = request.app[SERVICES]
    body, _ = await read_body(request, LogitsRequest, services)
    fields = GenerationFields()
    generate = generate_request(
        request[REQUEST_ID], Prompt(body.prompt_token_ids, 0.0), fields, services, min_answer_tokens=0
    )
    if not services.engine.is_ready:
        raise services.engine.not_ready()
    async with services.admission.enter() as place:
        await place.granted
        with _temporary_file(services.context.directory.path) as path:
            wanted = msgspec.structs.replace(generate, max_new_tokens=0, logits_path=str(path))
            await _compute(services.engine, wanted, partial(services.admission.give_back, place))
            return await _send(path, len(body.prompt_token_ids), request)


async def _compute(engine: EngineClient, generate: GenerateRequest, on_last_word: Callable[[], None]) -> None:
    engine.stage(generate.request_id, generate.prompt_token_ids)
    try:
        async with engine.open(generate, on_last_word) as answers:
            while not isinstance(await answers.next(), RequestFinished):
                continue
    finally:
        engine.forget(generate.request_id)


async def _send(path: Path, num_rows: int, request: web.Request) -> web.StreamResponse:
    num_bytes = os.stat(path).st_size
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/octet-stream",
            "Content-Length": str(num_bytes),
            "x-logits-shape": f"{num_rows},{num_bytes // 4 // num_rows}",
        }
    )
    await response.prepare(request)
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            await response.write(piece)
    await response.write_eof()
    return response


@contextmanager
def _temporary_file(directory: Path) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(prefix="strata-", suffix=".logits", dir=directory)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
