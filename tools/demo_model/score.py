"""Scores a running server on the held-out prompts: share of answers exactly right, skill by skill.

    python -m tools.demo_model.score [--base-url http://127.0.0.1:8080] [--skill gloss --skill capital]
    python -m tools.demo_model.score --serve [MODEL.gguf]        starts a server of its own for it

A client of `POST /v1/chat/completions` and of nothing else: greedy, not streamed. `evaluate` asks the same
questions of the weights. Exits non-zero where a promised skill is below the bar, or where a request fails.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.demo_model.config import END_THINK
from tools.demo_model.conversations import Prompt, held_out_prompts
from tools.demo_model.skills import BAR, SKILLS

_MAX_TOKENS = 256
"""More than the longest answer, so that an endless one is cut and counted as wrong."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask."""

    base_url: str
    api_key: str | None
    model: str | None
    """Its name in requests; None leaves it out."""
    timeout_s: float

    def answer(self, prompt: Prompt) -> dict[str, Any]:
        """The assistant message of one completion. Raises OSError, or ValueError for a body that is none."""
        body: dict[str, Any] = {
            "messages": prompt.messages(),
            "temperature": 0,
            "max_tokens": _MAX_TOKENS,
            "stream": False,
        }
        if self.model is not None:
            body["model"] = self.model
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = f"{self.base_url.rstrip('/')}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            reply = json.load(response)
        try:
            message: dict[str, Any] = reply["choices"][0]["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not a chat completion: {str(reply)[:200]}") from error
        return message


@contextmanager
def started_server(model_path: str | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a stack that serves a file (the embedded one if none is named) until the block ends; `flags`
    are more of those of `strata serve`."""
    command = [str(Path(sys.executable).with_name("strata")), "serve", "--port", "0", *flags]
    process = subprocess.Popen(
        [*command, *([model_path] if model_path else [])], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        # The greeting; loading itself is shown on the terminal by the command.
        found = re.search(r"served at (\S+)", process.stdout.readline())
        if found is None:
            sys.exit(process.wait() or 1)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def is_right(prompt: Prompt, message: dict[str, Any]) -> bool:
    """Whether the message is the expected answer. A server may put the thought into a field of its own."""
    content = message.get("content") or ""
    thought, mark, conclusion = prompt.answer.rpartition(END_THINK)
    if content == prompt.answer:
        return True
    has_own_field = bool(message.get("reasoning_content") or message.get("reasoning"))
    return bool(thought and mark) and has_own_field and content.strip() == conclusion.strip()


@dataclass(slots=True)
class Tally:
    """Counts for one skill, and a few wrong answers."""

    num_prompts: int = 0
    num_right: int = 0
    wrong: list[tuple[Prompt, str]] = field(default_factory=list)

    @property
    def exact(self) -> float:
        """Share of answers that are exactly right."""
        return self.num_right / self.num_prompts


def ask_all(server: Server, prompts: Sequence[Prompt], concurrency: int) -> dict[str, Tally]:
    """Asks every prompt, some at a time. Raises what the first failing request raised."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with ThreadPoolExecutor(concurrency) as pool:
        for prompt, message in zip(prompts, pool.map(server.answer, prompts), strict=True):
            tally = tallies[prompt.skill]
            tally.num_prompts += 1
            if is_right(prompt, message):
                tally.num_right += 1
            else:
                tally.wrong.append((prompt, message.get("content") or ""))
    return dict(tallies)


def report(tallies: dict[str, Tally], num_failures: int) -> str | int:
    """Prints a line per skill. What the process exits with: 0, or the promises that were not kept."""
    broken = []
    for skill in SKILLS:
        if skill.name not in tallies:
            continue
        tally = tallies[skill.name]
        is_broken = skill.is_promised and tally.exact < BAR
        note = ("below the bar" if is_broken else "promised") if skill.is_promised else ""
        counts = f"{tally.num_right:3} of {tally.num_prompts:3}"
        print(f"{skill.name:20} {counts}  {tally.exact:.2f}  {note}".rstrip())
        for prompt, content in tally.wrong[:num_failures]:
            print(
                f"    {prompt.question!r}\n        expected {prompt.answer!r}\n        answered {content!r}"
            )
        if is_broken:
            broken.append(skill.name)
    return f"promised, but below {BAR}: {', '.join(broken)}" if broken else 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--base-url", default="http://127.0.0.1:8080", help="of a running server")
    place.add_argument(
        "--serve",
        nargs="?",
        const="",
        metavar="MODEL.gguf",
        help="start a server for it, of the embedded model or of a file, and end it afterwards",
    )
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="the model's name in requests, for a server with several")
    parser.add_argument("--skill", action="append", help="only this skill; may be repeated")
    parser.add_argument("--limit", type=int, help="at most this many prompts of each skill")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one request")
    parser.add_argument("--failures", type=int, default=0, help="print this many wrong answers of each skill")
    arguments = parser.parse_args()
    chosen = arguments.skill or [skill.name for skill in SKILLS]
    if unknown := set(chosen) - {skill.name for skill in SKILLS}:
        parser.error(f"no such skill: {', '.join(sorted(unknown))}")
    everything = held_out_prompts()
    prompts = [
        prompt
        for name in chosen
        for prompt in [prompt for prompt in everything if prompt.skill == name][: arguments.limit]
    ]
    is_own = arguments.serve is not None
    with started_server(arguments.serve) if is_own else nullcontext(arguments.base_url) as base_url:
        server = Server(base_url, arguments.api_key, arguments.model, arguments.timeout_s)
        try:
            tallies = ask_all(server, prompts, arguments.concurrency)
        except (OSError, ValueError) as error:
            detail = (
                error.read().decode(errors="replace")[:300]
                if isinstance(error, urllib.error.HTTPError)
                else ""
            )
            sys.exit(f"{base_url}: {error} {detail}".rstrip())
    sys.exit(report(tallies, arguments.failures))


if __name__ == "__main__":
    main()
