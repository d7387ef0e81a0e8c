"""Talks to a running server in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit ends the chat."""

import argparse
import contextlib
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shared.cli.progress import ProgressLine
from shared.config import LOOPBACK_HOSTS
from shared.errors import ConfigError, StrataError
from shared.messages import REPETITION

_HELP = "/new begins a new conversation, /undo takes back the last turn, /exit ends"
_CONNECT_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata chat`."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", metavar="URL", help="server (default %(default)s)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt (default none)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes answers repeatable (default none)")
    parser.add_argument(
        "--reasoning-effort",
        metavar="EFFORT",
        help="for models that think; none turns it off (default: theirs)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Reads lines and prints answers until the end of input."""
    with contextlib.suppress(ImportError):
        # Gives `input` its editing keys and history.
        import readline  # noqa: F401
    options = {
        name: value
        for name, value in (
            ("temperature", parsed.temperature),
            ("max_tokens", parsed.max_tokens),
            ("seed", parsed.seed),
            ("reasoning_effort", parsed.reasoning_effort),
        )
        if value is not None
    }
    opening = [{"role": "system", "content": parsed.system}] if parsed.system else []
    # Other clients are given the address with /v1.
    chat = Chat(_checked(parsed.url).rstrip("/").removesuffix("/v1"), opening, options)
    model = chat.model_name()
    is_interactive = sys.stdin.isatty()
    has_failed = False
    if is_interactive:
        print(f"{model} at {parsed.url}. {_HELP}.")
    while True:
        try:
            line = input("> " if is_interactive else "").strip()
        except EOFError:
            if is_interactive:
                print()
            break
        except KeyboardInterrupt:
            print()
            continue
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/new":
                chat.begin_anew()
            case "/undo":
                chat.undo()
            case "/help":
                print(_HELP)
            case _:
                has_failed |= not chat.say(line)
    # Someone at a terminal has seen the error; a script looks at the code.
    return int(has_failed and not is_interactive)


class Chat:
    """One conversation with a server."""

    def __init__(self, url: str, opening: list[dict[str, str]], options: dict[str, Any]) -> None:
        self._url = url
        self._opening = opening
        self._options = options
        self._messages = list(opening)
        # A proxy is for other machines than this one.
        is_here = urlsplit(url).hostname in LOOPBACK_HOSTS
        proxies = urllib.request.ProxyHandler({} if is_here else None)
        self._opener = urllib.request.build_opener(proxies)

    def model_name(self) -> str:
        """The model that is served. Raises StrataError where there is no server."""
        with self._open("/v1/models", None) as response:
            try:
                name: str = json.load(response)["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise StrataError(f"{self._url} answers, but not as a server of models does") from None
            return name

    def begin_anew(self) -> None:
        """Forgets everything but the system prompt."""
        self._messages = list(self._opening)

    def undo(self) -> None:
        """Forgets the last question and its answer."""
        del self._messages[max(len(self._opening), len(self._messages) - 2) :]

    def say(self, text: str) -> bool:
        """Sends a message and prints the answer as it comes; on a terminal, before that how far it is. False
        where it failed; then it is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self._answer(messages):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except StrataError as error:
            if pieces:
                print()
            print(f"strata: {error}", file=sys.stderr)
            return False
        print()
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return True

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"messages": messages, "stream": True} | self._options
        with self._open("/v1/chat/completions", body) as response:
            line = ""
            progress = ProgressLine()
            # Comments are for people, and only until text has come: a line that is rewritten would damage it.
            has_room = sys.stderr.isatty()
            try:
                for raw in response:
                    line = raw.decode("utf-8").strip()
                    if line == "data: [DONE]":
                        return
                    if has_room and line.startswith(": "):
                        progress.show(line.removeprefix(": "))
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise StrataError(event["error"]["message"])
                    for choice in event.get("choices") or ():
                        text = choice["delta"].get("content") or ""
                        if choice.get("stop_reason") == REPETITION:
                            # For people; no part of the conversation.
                            print(" [ended: it repeats itself]", end="")
                        if text:
                            progress.done()
                            has_room = False
                        yield text
            except ValueError:
                raise StrataError(f"the server sends what is no event of a chat: {line[:100]!r}") from None
            except (OSError, http.client.HTTPException):
                raise StrataError("the server ended in the middle of its answer") from None
            finally:
                progress.done()
        raise StrataError("the server ended in the middle of its answer")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            return self._opener.open(request, timeout=_CONNECT_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise StrataError(_message(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise StrataError(
                f"no answer from {self._url} ({reason}); "
                "start a server with `strata serve`, or name one with --url"
            ) from None


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or re.search(r"\s", url):
        raise ConfigError(f"--url {url} is not the URL of a server, such as http://127.0.0.1:8080")
    return url


def _message(error: urllib.error.HTTPError) -> str:
    try:
        text: str = json.load(error)["error"]["message"]
        return text
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}"
