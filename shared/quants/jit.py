"""What this package uses of numba, with types: marking functions as compilable, and compiling kernels.

numba's decorators are untyped; everything else in the package goes through here.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import types
from numba.extending import register_jitable

from shared.quants.compile_cache import cache_folder, remove_cached

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Compiled = TypeVar("Compiled")

READONLY_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
READONLY_ROWS = types.Array(types.float32, 2, "C", readonly=True)
FLOATS = types.Array(types.float32, 1, "C")
ROWS = types.Array(types.float32, 2, "C")
INTEGER = types.int64

_log = logging.getLogger(__name__)
_compiling = threading.Lock()
# Their machine code is freed with them.
_kept_tasks: dict[int, Any] = {}


def jitable(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a module-level function callable from compiled code. Its arithmetic is kept as written."""
    marked: Callable[Parameters, Result] = register_jitable(function)
    return marked


def jitable_sum(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As `jitable`, for sums whose terms may be added in any order and fused with the products.

    Without this permission a sum cannot be vectorised. Not granted: assuming that no NaN or infinity occurs.
    """
    marked: Callable[Parameters, Result] = register_jitable(fastmath={"reassoc", "contract"})(function)
    return marked


def compile_kernel(
    function: Callable[Parameters, Result], name: str, *argument_types: types.Type
) -> Callable[Parameters, Result]:
    """Compiles `function` for exactly these types, or loads it from the cache; the result holds no GIL.

    `name` must be unique in the package. numba keeps one index file for each name, read and rewritten
    without a lock: kernels that shared a name could be given each other's machine code when two processes
    start at once. With one kernel to a file, both write the same.

    A cache that cannot be read or written costs time, never the start: the kernel is then compiled in memory.
    """
    function.__name__ = function.__qualname__ = name

    def compile_for(folder: Path | None) -> Callable[Parameters, Result]:
        with _settings(folder):
            dispatcher = numba.njit(nogil=True, cache=folder is not None)(function)
            dispatcher.compile(argument_types)
        # Other types would be compiled at their first call, for seconds, in the middle of someone's request.
        dispatcher.disable_compile()
        return cast("Callable[Parameters, Result]", dispatcher)

    return _cached(compile_for, function)


def compile_task(function: Callable[[int, int, int, int], None], name: str) -> int:
    """Compiles `function` as a task (`shared.native.task`), or loads it from the cache: its address.

    What was said of `compile_kernel` goes for this too. The code stays for the life of the process.
    """
    function.__name__ = function.__qualname__ = name

    def compile_for(folder: Path | None) -> Any:
        with _settings(folder):
            signature = types.void(*4 * (types.int64,))
            return numba.cfunc(signature, cache=folder is not None)(function)

    task = _cached(compile_for, function)
    _kept_tasks[int(task.address)] = task
    return int(task.address)


def task_name(address: int) -> str | None:
    """Under which name `compile_task` compiled it; None for what is not from there."""
    task = _kept_tasks.get(address)
    return None if task is None else str(task.__name__)


def _cached(compile_for: Callable[[Path | None], Compiled], function: Callable[..., Any]) -> Compiled:
    name = function.__name__
    with _compiling:
        sources = Path(function.__code__.co_filename).parent
        folder = cache_folder(None if sources == Path(__file__).parent else sources)
        if folder is not None:
            try:
                return compile_for(folder)
            except Exception as error:  # what numba raises depends on how a file is damaged
                what = type(error).__name__
                _log.warning(
                    "kernel %s: its cache in %s is not usable (%s), it is compiled anew", name, folder, what
                )
                remove_cached(folder, name)
        return compile_for(None)


@contextmanager
def _settings(folder: Path | None) -> Iterator[None]:
    """numba's process-wide settings as these kernels need them, put back afterwards.

    SLP_VECTORIZE: the short inner loops of a block are unrolled before LLVM's loop vectoriser sees them, and
    numba leaves off the pass that vectorises straight-line code (measured on Q8_0: 0.13 instead of 0.58 ns
    a weight).
    """
    config: Any = numba.config
    before = config.CACHE_DIR, config.SLP_VECTORIZE
    config.CACHE_DIR, config.SLP_VECTORIZE = str(folder or ""), 1
    try:
        yield
    finally:
        config.CACHE_DIR, config.SLP_VECTORIZE = before
