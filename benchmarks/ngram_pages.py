"""Which rows of the n-gram table a prompt needs, which pages of the file they lie on, and what it costs to
touch them where the file is mapped as files are by default: one row after the other, each fault with the
kernel's read-ahead."""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig, read_model_config
from shared.tensor_catalog import NGRAM_TABLE
from stager.ngram_hash import NgramHash, windows_of


@dataclass(frozen=True, slots=True)
class Table:
    """Where the n-gram table of a model lies."""

    path: Path
    start: int
    num_bytes: int
    row_bytes: int
    config: NgramConfig

    @property
    def rows_per_token(self) -> int:
        """Rows that one token needs."""
        return len(self.config.head_vocab_sizes)

    def row_places(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Where in the file the rows of a prompt begin, in the order they are needed."""
        windows = windows_of(np.array(token_ids, np.int32), self.config.ngram_size)
        rows = NgramHash(self.config).rows(windows)
        return self.start + rows.reshape(-1) * self.row_bytes

    def pages(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """The numbers of the pages of the file that these rows lie on, each once, in order."""
        places = self.row_places(token_ids)
        last = places + self.row_bytes - 1
        return np.unique(np.concatenate([places // mmap.PAGESIZE, last // mmap.PAGESIZE]))


def find_table(model: GGUFModel) -> Table | None:
    """The table of an open model, if it has one."""
    config = read_model_config(model).ngram
    if config is None:
        return None
    info = model.info(NGRAM_TABLE)
    row_bytes = info.type.row_bytes(info.shape[-1])
    return Table(model.home(NGRAM_TABLE).path, info.offset, info.num_bytes, row_bytes, config)


def touch_mapped(table: Table, token_ids: Sequence[int]) -> float:
    """Seconds to read these rows through a mapping of the file."""
    places = table.row_places(token_ids).tolist()
    with table.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        began = time.perf_counter()
        for place in places:
            # A copy of the row: both of its pages, where it lies on two.
            mapped[place : place + table.row_bytes]
        return time.perf_counter() - began
