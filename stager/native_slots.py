"""The work of small n-gram slots as machine code, as decoding fills them.

Left to Python (`stager.worker`) is a slot that makes no sense, and one with many tokens, whose rows are
better read in the order they lie in the file.
"""

import functools

import numpy as np

from shared.model_config import NgramConfig
from shared.native.memory import call_task, clock_ns, ids_at, integers_at, load, store
from shared.native.records import Record, fields, reader, record
from shared.native.task import SCRATCH_BYTES, address_of, aligned_zeros
from shared.quants.jit import compile_task, jitable
from shared.quants.matrix import GATHERED
from shared.ring import RingServer
from shared.work_slots import NgramHeader
from stager.ngram_table import NgramTable

_MAX_TOKENS = 16

SERVICE = fields(
    "gather",  # the task of the table's format
    "gathered",  # its params
    "rows",  # i64 [_MAX_TOKENS, num_heads]
    "multipliers",  # i64 [ngram_size]
    "sizes",  # i64 [num_heads]
    "offsets",  # i64 [num_heads]
    "ngram_size",
    "heads_per_ngram",
    "eos_token_id",
    "scratch",
    # Where the arrays of a slot begin.
    "header",
    "windows",
    "features",
)
_service_at = reader(SERVICE)
_OUT = 8 * list(GATHERED.names or ()).index("out")
_NUM_TOKENS, _READ_NS = 8 * NgramHeader.NUM_TOKENS, 8 * NgramHeader.SERVE_NS


@jitable
def _hash(service_address: int, window_address: int, rows_address: int) -> None:
    """One token's rows: `stager.ngram_hash` has the rule. No product overflows 63 bits: all may be signed."""
    service = _service_at(service_address)
    window, rows = ids_at(window_address), integers_at(rows_address)
    multipliers = integers_at(service.multipliers)
    sizes, offsets = integers_at(service.sizes), integers_at(service.offsets)
    mixed, is_cut, head = window[0] * multipliers[0], False, 0
    for place in range(1, service.ngram_size):
        token_id = window[place]
        is_cut = is_cut or token_id < 0 or token_id == service.eos_token_id
        mixed ^= (service.eos_token_id if is_cut else token_id) * multipliers[place]
        for _ in range(service.heads_per_ngram):
            rows[head] = mixed % sizes[head] + offsets[head]
            head += 1


def _read_slot(params: int, slot: int, is_done: int, scratch: int) -> None:
    service = _service_at(params)
    started = clock_ns()
    header = slot + service.header
    num_tokens = load(header + _NUM_TOKENS)
    if not 1 <= num_tokens <= _MAX_TOKENS:
        return
    num_heads = (service.ngram_size - 1) * service.heads_per_ngram
    for token in range(num_tokens):
        window = slot + service.windows + token * service.ngram_size * 4
        # A token of its own is never negative.
        if ids_at(window)[0] < 0:
            return
        _hash(params, window, service.rows + token * num_heads * 8)
    store(service.gathered + _OUT, slot + service.features)
    call_task(service.gather, service.gathered, 0, num_tokens * num_heads, service.scratch)
    store(header + _READ_NS, clock_ns() - started)
    store(is_done, 1)


@functools.cache
def read_slot_task() -> int:
    """Params `SERVICE`; see `shared.native.ring.serve_kernel`."""
    return compile_task(_read_slot, "read_ngram_slot")


class NativeNgrams:
    """Table and hash as that task sees them."""

    def __init__(self, table: NgramTable, config: NgramConfig) -> None:
        self.task = read_slot_task()
        self._table = table
        num_heads = len(config.head_vocab_sizes)
        self._rows = np.zeros((_MAX_TOKENS, num_heads), np.int64)
        self._multipliers, self._sizes, self._offsets = (
            np.array(values, np.int64)
            for values in (config.multipliers, config.head_vocab_sizes, config.head_offsets)
        )
        self._scratch = aligned_zeros(SCRATCH_BYTES)
        task, self._gathered = table.gather()
        self._gathered["numbers"] = address_of(self._rows)
        self._service = record(
            SERVICE,
            gather=task,
            gathered=self._gathered,
            rows=self._rows,
            multipliers=self._multipliers,
            sizes=self._sizes,
            offsets=self._offsets,
            ngram_size=config.ngram_size,
            heads_per_ngram=config.heads_per_ngram,
            eos_token_id=config.eos_token_id,
            scratch=self._scratch,
        )

    def params(self, server: RingServer) -> Record:
        """For slots of that server."""
        for name in ("header", "windows", "features"):
            self._service[name] = server.offsets[name]
        return self._service
