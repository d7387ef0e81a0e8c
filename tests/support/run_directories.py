"""Run directories for tests: short paths, since a socket's path may have about 100 bytes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.run_directory import RunDirectory


@contextmanager
def temporary_run_directory() -> Iterator[RunDirectory]:
    """A run directory of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="strata-test-") as parent:
        yield RunDirectory(Path(parent) / "run")
