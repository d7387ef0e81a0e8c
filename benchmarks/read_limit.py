"""How fast memory can be read, the limit of decoding, and what one token has to read.

Memory is asked for ahead of the reads: where a CPU's own prefetching is cautious, that is worth a third.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import median
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.native.memory import prefetch
from shared.tensor_catalog import block_prefix

Words = NDArray[np.uint64]

_AHEAD_BYTES = 2048
_LINE_WORDS = 8
_PAGE_BYTES = 4096
# More than any cache keeps, and read in a fraction of a second.
_PIECE_BYTES = 256 << 20
_NUM_TURNS = 5
# Single rows are taken of these; of the first, all, where a file has no other matrix for its head.
_EMBEDDING, _NGRAM_TABLE = "token_embd.weight", "per_layer_token_embd.weight"
_HEAD = "output.weight"
_EXPERTS = "_exps.weight"


@numba.njit(nogil=True)
def _read(words: Words, address: int) -> np.uint64:
    """The result only keeps the compiler from leaving the reads out."""
    found = np.uint64(0)
    for first in range(0, words.size - _LINE_WORDS + 1, _LINE_WORDS):
        prefetch(address + first * 8 + _AHEAD_BYTES)
        for place in range(_LINE_WORDS):
            found ^= words[first + place]
    return found


def read_all(words: Words) -> None:
    """Reads every cache line of a C-contiguous array, a line or more."""
    _read(words, words.ctypes.data)


def token_bytes(model: GGUFModel) -> int:
    """Bytes of weights that decoding one token reads: every matrix, and of the routed experts as many as are
    used. Rows of the embedding and of the n-gram table are left out, and so is a draft block."""
    num_layers = read_model_config(model).num_layers
    total = expert_bytes(model)
    for name in model:
        is_draft = name.startswith("blk.") and int(name.split(".")[1]) >= num_layers
        is_table = name == _NGRAM_TABLE or (name == _EMBEDDING and _HEAD in model)
        if not (is_draft or is_table or name.endswith(_EXPERTS)):
            total += model.rows(name).nbytes
    return total


def expert_bytes(model: GGUFModel) -> int:
    """Of that, the routed experts'."""
    config = read_model_config(model)
    prefixes = [block_prefix(layer) for layer in range(config.num_layers)]
    all_bytes = sum(
        model.rows(name).nbytes
        for name in model
        if name.endswith(_EXPERTS) and any(name.startswith(prefix) for prefix in prefixes)
    )
    return all_bytes * config.num_experts_used // config.num_experts


def read_bytes_per_s(model: GGUFModel, cpus: set[int]) -> float:
    """What one thread on each CPU reads of the mapped file together, each a piece of its own that no cache
    holds: the median of a few turns, over other pieces where the file has them."""
    largest = max(model, key=lambda name: model.rows(name).nbytes)
    content = model.rows(largest).reshape(-1)
    content = content[(-content.ctypes.data) % 64 :]
    words: Words = content[: len(content) // 64 * 64].view(np.uint64)
    size = min(_PIECE_BYTES // 8, len(words) // len(cpus) // 8 * 8)
    pieces = [words[first : first + size] for first in range(0, len(words) - size + 1, size)]

    def pinned(cpu: int, piece: Words) -> Callable[[], None]:
        def work() -> None:
            os.sched_setaffinity(0, {cpu})
            read_all(piece)

        return work

    speeds = []
    for turn in range(_NUM_TURNS):
        chosen = [pieces[(turn * len(cpus) + number) % len(pieces)] for number in range(len(cpus))]
        for piece in chosen:
            # Every page of it is mapped, and the reader compiled for memory that cannot be written.
            read_all(piece[:: _PAGE_BYTES // 8].copy())
            read_all(piece[:_LINE_WORDS])
        with ThreadPoolExecutor(len(cpus)) as pool:
            began = time.perf_counter()
            for done in [
                pool.submit(pinned(cpu, piece)) for cpu, piece in zip(sorted(cpus), chosen, strict=True)
            ]:
                done.result()
            speeds.append(8 * size * len(cpus) / (time.perf_counter() - began))
    return median(speeds)
