"""Where compiled kernels are kept between starts.

::

    $STRATA_CACHE_DIR, else $XDG_CACHE_HOME/strata, else ~/.cache/strata
        kernels/
            <digest of this package's sources>-<versions>-<CPU>/
                ...                      written and read by numba

numba notices by itself that the file of a kernel changed, but not a file that the kernel calls into, nor the
gguf package whose tables are compiled in. So all of these are in the folder's name, and a folder never goes
stale. Folders of earlier versions stay (about 3 MB each) until someone deletes them.
"""

import functools
import hashlib
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import numba
from llvmlite import binding

_log = logging.getLogger(__name__)


@functools.cache
def cache_folder() -> Path | None:
    """This version's folder, created; or None, and a warning once, where it cannot be written."""
    try:
        folder = _cache_root() / "kernels" / _folder_name()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() knows no home
        _log.warning(
            "compiled kernels are not kept, every start compiles them again: %s; set STRATA_CACHE_DIR to a"
            " directory that can be written",
            error,
        )
        return None
    return folder


def remove_cached(folder: Path, kernel_name: str) -> None:
    """Deletes what numba keeps for one kernel, so that the next start writes it anew."""
    try:
        for path in folder.glob(f"*/*.{kernel_name}-*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("kernel %s: cannot delete its cache: %s", kernel_name, error)


def _cache_root() -> Path:
    if chosen := os.environ.get("STRATA_CACHE_DIR"):
        return Path(chosen)
    if user_caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_caches) / "strata"
    return Path.home() / ".cache" / "strata"


def _folder_name() -> str:
    sources = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    versions = f"numba{numba.__version__}-gguf{version('gguf')}"
    return f"{digest.hexdigest()[:16]}-{versions}-{binding.get_host_cpu_name()}"
