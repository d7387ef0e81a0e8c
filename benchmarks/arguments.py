"""What the command lines of the benchmarks have in common."""

import argparse
import os
from pathlib import Path


def positive(text: str) -> int:
    """A count. Raises ArgumentTypeError where it is no number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Several, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def new_file(text: str) -> Path:
    """A file to be written at the end. Raises ArgumentTypeError where that would fail, which is better known
    before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def add_match_arguments(
    parser: argparse.ArgumentParser, *, rounds: int, patience_s: float, who_waits: str
) -> None:
    """What a match between contenders is told: `rounds` is the default of a full one, `who_waits` what waits
    for a quiet machine, and `patience_s` how long."""
    parser.add_argument(
        "--threads", type=positive, default=2, help="and CPUs, for each (default %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, help=f"default {rounds}; a quick run has one")
    parser.add_argument(
        "--patience",
        type=float,
        default=patience_s,
        metavar="SECONDS",
        help=f"how long {who_waits} (default %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default %(default)s)")
    parser.add_argument("--strata-flags", default="", metavar="FLAGS", help="more flags for `strata serve`")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, where a report goes."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="file that gets all results")
