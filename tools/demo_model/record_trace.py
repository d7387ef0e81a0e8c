"""Records the routing trace that `strata simulate` replays where it is given none.

    python -m tools.demo_model.record_trace [FILE]

A server of its own for the shipped model (`strata serve --record-routing FILE`) is asked questions one after
the other, greedily: first about one topic, then about the next. Prints how many windows, steps in which a
token is decoded, each topic has, in the order in which they are in the file.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.demo_model import DEMO_TRACE_PATH
from shared.placement.trace import TraceReader
from tools.demo_model.score import Server, started_server
from tools.demo_model.topics import TOPICS, topic_prompts

_SEED = 2026


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a stretch of the trace is about."""

    topic: str
    num_prompts: int
    num_windows: int


def record(path: Path, num_windows: int) -> list[Recorded]:
    """Asks about each topic until there are so many windows of it. Raises OSError, or ValueError for an
    answer that is none."""
    found = []
    with started_server(None, ["--record-routing", str(path)]) as url:
        server = Server(url, None, None, timeout_s=60.0)
        begun = 0
        for topic in TOPICS:
            num_prompts = 0
            for prompt in topic_prompts(topic, _SEED):
                server.answer(prompt)
                num_prompts += 1
                if (count := count_windows(path)) >= begun + num_windows:
                    break
            found.append(Recorded(topic, num_prompts, count - begun))
            begun = count
    return found


def count_windows(path: Path) -> int:
    """Steps of a trace without tokens of prompts."""
    with TraceReader(path) as reader:
        return sum(not step.num_prefill_tokens for step in reader)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=DEMO_TRACE_PATH, help="(default: the shipped one)"
    )
    parser.add_argument(
        "--windows", type=int, default=400, help="of each topic, at least (default %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        stretches = record(arguments.file, arguments.windows)
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.file}: {error}")
    for stretch in stretches:
        print(f"{stretch.topic:10} {stretch.num_prompts:4} questions  {stretch.num_windows:4} windows")
    print(f"{arguments.file}: {arguments.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
