"""Where compiled kernels are kept between starts.

::

    the cache directory (`shared.cache_directory`)
        kernels/
            <digest of sources>-<versions>-<CPU>/
                ...                      written and read by numba

numba notices by itself that the file of a kernel changed, but not a file that the kernel calls into, nor the
gguf package whose tables are compiled in. So the versions are in the folder's name, and the sources of this
package, of `shared.native` and of the folder that the kernel's own file lies in; kernels call into nothing
else, and a folder never goes stale. A start that makes a new folder deletes those that no start has used
for a month.
"""

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numba
from llvmlite import binding

from shared.cache_directory import cache_directory

_UNUSED_FOR_S = 30 * 24 * 3600

_log = logging.getLogger(__name__)


@functools.cache
def cache_folder(sources: Path | None = None) -> Path | None:
    """This version's folder, created; or None, and a warning once, where it cannot be written.

    `sources` is the folder with the kernel's own file, where that is none of this package.
    """
    try:
        folder = cache_directory() / "kernels" / _folder_name(sources)
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _warn(f"{cache_directory()}: {error.strerror}")
        return None
    except RuntimeError as error:  # Path.home() knows no home
        _warn(str(error))
        return None
    if is_new:
        _delete_unused(folder.parent)
    return folder


def _delete_unused(kernels: Path) -> None:
    limit = time.time() - _UNUSED_FOR_S
    for folder in kernels.iterdir():
        # Another process may be doing the same.
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < limit:
                shutil.rmtree(folder)


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(
        "compiled kernels are not kept, every start compiles them again: %s; set STRATA_CACHE_DIR to a"
        " directory that can be written",
        reason,
    )


def remove_cached(folder: Path, kernel_name: str) -> None:
    """Deletes what numba keeps for one kernel, so that the next start writes it anew."""
    try:
        for path in folder.glob(f"*/*.{kernel_name}-*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("kernel %s: cannot delete its cache: %s", kernel_name, error)


def _folder_name(sources: Path | None) -> str:
    shared = Path(__file__).parents[1]
    paths = {*shared.glob("native/*.py"), *shared.glob("quants/**/*.py")}
    if sources is not None:
        paths |= {*sources.glob("*.py")}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    versions = f"numba{numba.__version__}-gguf{version('gguf')}"
    return f"{digest.hexdigest()[:16]}-{versions}-{binding.get_host_cpu_name()}"
