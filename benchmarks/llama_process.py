"""How the processes of llama.cpp begin: what they are told, and where their answers go."""

import argparse
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TextIO

KEEP = "--keep"
"""Switch of the server."""


def begin(
    description: str | None,
    switches: Mapping[str, str] = MappingProxyType({}),
    counts: Mapping[str, tuple[int, str]] = MappingProxyType({}),
) -> tuple[argparse.Namespace, TextIO]:
    """`model`, `threads`, `context`, and the switches and numbers of the command line, which are given with
    their help, numbers with their default before it; and the process's output for its answers alone: whatever
    else llama.cpp prints goes to standard error from now on."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    for name, meaning in switches.items():
        parser.add_argument(name, action="store_true", help=meaning)
    for name, (default, meaning) in counts.items():
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default %(default)s)")
    parsed = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return parsed, answers
