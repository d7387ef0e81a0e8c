"""Reads rows of the n-gram table where the model file maps it.

The table is tens of gigabytes, a token needs a few rows of about 90 bytes from random places of it. It is
mapped, never loaded, and mapped for random access: the kernel's usual read-ahead would fetch 120 KB around
every row. Rows are read once each, in the order they lie in the file.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig
from shared.native.records import Record
from shared.quants import block_format, decode_rows, gather_task, gathered_record
from shared.tensor_catalog import NGRAM_TABLE


class NgramTable:
    """The mapped table of one model."""

    def __init__(self, model: GGUFModel, config: NgramConfig) -> None:
        self._info = model.info(NGRAM_TABLE)
        self._file = model.home(NGRAM_TABLE)
        self._rows = model.rows(NGRAM_TABLE)
        self._format = block_format(self._info.type.type_id)
        self._feature_width = config.feature_width
        self._file.advise(self._info, mmap.MADV_RANDOM)

    def features(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The concatenated rows of each token: float32 [num_tokens, feature_width].

        `rows` is int64 [num_tokens, num_heads].
        """
        unique, places = np.unique(rows, return_inverse=True)
        decoded = decode_rows(self._format, self._rows[unique])
        return decoded[places].reshape(len(rows), self._feature_width)

    def gather(self) -> tuple[int, Record]:
        """For native code: a task, and its params but for the numbers of the rows and where they go."""
        return gather_task(self._format), gathered_record(self._format, self._rows)

    def bring_near(self, rows: NDArray[np.int64]) -> int:
        """Asks the kernel to read the pages of these rows, all at once and without waiting for them.

        Returns how many ranges were asked for.
        """
        row_bytes = self._rows.shape[1]
        starts = self._info.offset + np.unique(rows) * row_bytes
        first_pages = starts // mmap.PAGESIZE
        last_pages = (starts + row_bytes - 1) // mmap.PAGESIZE
        pages = np.unique(np.concatenate([first_pages, last_pages]))
        breaks = np.flatnonzero(np.diff(pages) > 1) + 1
        ranges = np.split(pages, breaks)
        for run in ranges:
            self._file.will_need(int(run[0]) * mmap.PAGESIZE, len(run) * mmap.PAGESIZE)
        return len(ranges)
