"""Keeps all experts of a model in RAM: reads them, and locks their pages where that is allowed.

Pages of a mapped file are the same ones in every process: locked here, they stay in RAM for the cpu_worker
too. They are released when it is lost, so that its successor decides by the memory there is, wherever it
runs.
"""

import logging
import threading
from collections.abc import Callable

from shared.errors import ModelFileError
from shared.expert_blobs import expert_tensors
from shared.gguf.file import GGUFFile, TensorInfo
from shared.gguf.model import GGUFModel
from shared.locked_memory import lock_refusal, may_lock, not_permitted, resident_refusal

_log = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
# So many pieces are being read while one is waited for.
_PIECES_AHEAD = 4
_GIB = 1 << 30


class RamResidency:
    """The experts of one model."""

    def __init__(self, model: GGUFModel, num_layers: int, report: Callable[[str, float], None]) -> None:
        """`report` is told what is being done, and how far it is."""
        infos = {name: model.info(name) for name in expert_tensors(num_layers)}
        self._pieces = [piece for name, info in infos.items() for piece in _pieces(model.home(name), info)]
        self._num_bytes = sum(info.num_bytes for info in infos.values())
        self._report = report
        self._is_held = False
        # Held while pages are locked or released; the event asks whoever locks to leave it.
        self._turn = threading.Lock()
        self._is_released = threading.Event()

    def hold(self, *, is_required: bool) -> None:
        """Reads all experts, and locks them; returns early where they are released meanwhile. Does nothing
        where they are held already.

        Where they may not be locked: raises ResourceError if that `is_required`, else notes it and goes on.
        Raises ModelFileError where they cannot be read.
        """
        with self._turn:
            if not self._is_held:
                self._hold(is_required)

    def _hold(self, is_required: bool) -> None:
        locks = may_lock(self._num_bytes)
        if not locks:
            self._not_locked(not_permitted(), is_required)
        for number, (file, start, num_bytes) in enumerate(self._pieces):
            if self._is_released.is_set():
                return
            self._report("reading experts into RAM", number / len(self._pieces))
            for ahead, first, count in self._pieces[number : number + _PIECES_AHEAD]:
                ahead.will_need(first, count)
            try:
                file.populate(start, num_bytes)
            except OSError as error:
                raise ModelFileError(
                    f"{file.path}: bytes {start} to {start + num_bytes} cannot be read: {error.strerror}"
                ) from None
            try:
                if locks:
                    file.lock(start, num_bytes)
            except OSError as error:
                locks = False
                self._not_locked(error, is_required)
        self._is_held = True
        how = "locked" if locks else "not locked"
        _log.info("all experts are in RAM: %.2f GiB, %s", self._num_bytes / _GIB, how)

    def release(self) -> None:
        """Locks nothing any more. What was read stays as long as there is room for it."""
        self._is_released.set()
        with self._turn:
            for file, start, num_bytes in self._pieces:
                file.unlock(start, num_bytes)
            self._is_held = False
            self._is_released.clear()

    def _not_locked(self, error: OSError, is_required: bool) -> None:
        if is_required:
            raise resident_refusal(self._num_bytes, error)
        refusal = lock_refusal(self._num_bytes, error)
        # Not a warning: it is so for every user with usual limits, and does no harm while there is memory.
        _log.info("experts: %s; they are read, but may be given up again when memory is short", refusal)


def _pieces(file: GGUFFile, info: TensorInfo) -> list[tuple[GGUFFile, int, int]]:
    """Begins on pages, and lengths."""
    start, num_bytes = file.pages(info)
    stop = start + num_bytes
    return [(file, at, min(_PIECE_BYTES, stop - at)) for at in range(start, stop, _PIECE_BYTES)]
