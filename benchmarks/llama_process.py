"""How the processes of llama.cpp begin: what they are told, and where their answers go."""

import argparse
import os
from typing import TextIO


def begin(description: str | None) -> tuple[argparse.Namespace, TextIO]:
    """`model`, `threads` and `context` of the command line, and the process's output for its answers alone:
    whatever else llama.cpp prints goes to standard error from now on."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parsed = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return parsed, answers
