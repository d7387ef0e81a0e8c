"""One streamed completion over HTTP, with the client's own clock beside every event.

The same request for every server: `POST /v1/completions` with the prompt as token ids, greedy.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import BenchmarkError

_TIMEOUT_S = 1800.0


class AnswerError(BenchmarkError):
    """A contender does not answer as it should; the text says how."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What came back for one prompt, and when: seconds from sending the request to the arrival of each piece
    of text, which is a token."""

    num_prompt_tokens: int
    num_tokens: int
    arrived_s: tuple[float, ...]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    timings: dict[str, Any] | None = None
    """What the server says of it."""
    asked_at: float = 0.0
    """When the request was sent, by `time.perf_counter`."""

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.arrived_s[0]

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second until the first token is there."""
        return self.num_prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second from the first one to the last."""
        return (self.num_tokens - 1) / (self.arrived_s[-1] - self.arrived_s[0])


def complete(
    url: str,
    prompt_token_ids: Sequence[int],
    num_new: int,
    fields: Mapping[str, Any] | None = None,
    *,
    may_end: bool = False,
    stop: threading.Event | None = None,
) -> Generation:
    """Asks for exactly `num_new` tokens, or, where the answer `may_end` by itself, for as many at most;
    `fields` are added to the request. Once `stop` is set, the request is broken off with the next piece; its
    tokens are then the pieces that came. Raises AnswerError."""
    body = {
        "prompt": list(prompt_token_ids),
        "max_tokens": num_new,
        "temperature": 0,
        # Also has one token come any number of times, which would otherwise end an answer.
        "ignore_eos": not may_end,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(fields or {}),
    }
    num_prompt_tokens = len(prompt_token_ids)
    connection = _connection(url)
    arrived: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] | None = None
    began = time.perf_counter()
    try:
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        payload = json.dumps(body).encode()
        connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise AnswerError(f"{url} answers {response.status}: {response.read(500)!r}")
        for line in _lines(response):
            now = time.perf_counter() - began
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise AnswerError(f"{url} fails: {event['error']}")
            for choice in event.get("choices") or ():
                if choice["text"]:
                    arrived.append(now)
                    pieces.append(choice["text"])
            if stop is not None and stop.is_set():
                return Generation(
                    num_prompt_tokens, len(pieces), tuple(arrived), "".join(pieces), asked_at=began
                )
            usage = event.get("usage") or usage
            timings = event.get("timings") or timings
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise AnswerError(f"{url} does not answer as a server does: {error!r}") from error
    finally:
        connection.close()
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    is_as_asked = counted == (num_prompt_tokens, num_new)
    if may_end:
        is_as_asked = counted[0] == num_prompt_tokens and 0 < (counted[1] or 0) <= num_new
    if not is_as_asked or not arrived:
        raise AnswerError(
            f"{url}: {num_prompt_tokens} and {num_new} tokens were asked for, {counted} counted, "
            f"{len(arrived)} came as text"
        )
    return Generation(
        num_prompt_tokens, counted[1] or 0, tuple(arrived), "".join(pieces), timings=timings, asked_at=began
    )


def all_logits(url: str, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Strata's logits of every position [tokens, vocabulary], from a server with that endpoint. Raises
    AnswerError."""
    connection = _connection(url)
    try:
        payload = json.dumps({"prompt_token_ids": list(token_ids)}).encode()
        connection.request("POST", "/v1/logits", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise AnswerError(f"{url} answers {response.status}: {content[:500]!r}")
        shape = [int(extent) for extent in response.headers["x-logits-shape"].split(",")]
        logits: NDArray[np.float32] = np.frombuffer(content, "<f4").reshape(shape)
        return logits
    except (OSError, http.client.HTTPException) as error:
        raise AnswerError(f"{url} does not answer as a server does: {error!r}") from error
    finally:
        connection.close()


def get_json(url: str, path: str) -> dict[str, Any]:
    """What a server says of itself at a path. Raises AnswerError."""
    connection = _connection(url)
    try:
        connection.request("GET", path)
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise AnswerError(f"{url} does not answer as a server does: {error!r}") from error
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines as they arrive. Reading line by line would wait for full buffers."""
    rest = b""
    while part := response.read1():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
