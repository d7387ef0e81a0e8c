"""The work of n-gram slots as machine code.

Left to Python (`stager.worker`) is a slot that makes no sense, for which an error has to be worded.
"""

import functools

from shared.native.memory import clock_ns, ids_at, load, store
from shared.native.records import Record, fields, reader, record
from shared.native.ring import INTERRUPT
from shared.quants.jit import compile_task
from shared.ring import RingServer
from shared.work_slots import NgramHeader
from stager.ngram_rows import WORK, RowReader, features_of_windows

SERVICE = fields(
    "work",  # the WORK of the thread that serves
    "max_tokens",
    "ngram_size",
    # Where the arrays of a slot begin.
    "header",
    "windows",
    "features",
    "hits",
    "reads",
    "read_bytes",
    "failures",
)
_service_at = reader(SERVICE)
_work_at = reader(WORK)
_NUM_TOKENS, _SERVE_NS, _DISK_WAIT_NS = (8 * int(place) for place in NgramHeader)


def _read_slot(params: int, slot: int, is_done: int, scratch: int) -> None:
    service = _service_at(params)
    work = _work_at(service.work)
    started, waited_ns = clock_ns(), work.wait_ns
    header = slot + service.header
    num_tokens = load(header + _NUM_TOKENS)
    if not 1 <= num_tokens <= service.max_tokens:
        return
    windows = ids_at(slot + service.windows)
    for token in range(num_tokens):
        # A token of its own is never negative.
        if windows[token * service.ngram_size] < 0:
            return
    work.hits = slot + service.hits
    work.token_reads = slot + service.reads
    work.token_bytes = slot + service.read_bytes
    work.failures = slot + service.failures
    features_of_windows(service.work, slot + service.windows, num_tokens, slot + service.features)
    store(header + _SERVE_NS, clock_ns() - started)
    store(header + _DISK_WAIT_NS, work.wait_ns - waited_ns)
    store(is_done, 1)


@functools.cache
def read_slot_task() -> int:
    """Params `SERVICE`; see `shared.native.ring.serve_kernel`."""
    return compile_task(_read_slot, "read_ngram_slot")


class NativeNgrams:
    """A reader as that task sees it."""

    def __init__(self, rows: RowReader, ngram_size: int) -> None:
        self.task = read_slot_task()
        self._rows = rows
        self._ngram_size = ngram_size

    def params(self, server: RingServer) -> Record:
        """For slots of that server, to which progress is reported."""
        self._rows.report_to(server.status_address, server.address + INTERRUPT)
        arrays = server.shape.arrays
        _, (max_tokens,) = arrays["hits"]
        return record(
            SERVICE,
            work=self._rows.address,
            max_tokens=min(max_tokens, self._rows.max_tokens),
            ngram_size=self._ngram_size,
            **{name: server.offsets[name] for name in arrays},
        )
