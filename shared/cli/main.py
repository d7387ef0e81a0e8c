"""The command `strata`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from shared.errors import StrataError

# Modules of this package; only the one that is asked for is imported, so that each starts as fast as it can.
_COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a running server",
    "inspect": "show what a model file holds",
    "plan": "say what will fit, before anything is loaded",
    "logits": "write the logits of a token sequence",
    "simulate": "replay a routing trace with other slots and policies",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 well, 1 failed, 2 not started, 130 interrupted."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        # What is still buffered would otherwise be written, and fail, where nobody can catch it.
        sys.stdout.flush()
    except StrataError as error:
        print(f"strata: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of our output, a pager perhaps, has enough; the interpreter shall not try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="strata",
        description="Serves a mixture-of-experts model that is far larger than the graphics card.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"strata {version('strata-inference')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        if name not in arguments[:1]:
            subparsers.add_parser(name, help=summary)
            continue
        command = import_module(f"shared.cli.{name}")
        subparser = subparsers.add_parser(name, help=summary, description=command.__doc__, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code
