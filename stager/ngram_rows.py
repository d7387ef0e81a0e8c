"""From the ids of a step to its n-gram features, in machine code: hash, look-up, reads, decoding.

One thread's work on a batch of rows::

    hash       the rows of each token (`stager.ngram_hash` has the rule)
    look up    present rows are copied at once; of the others each is read once, whoever wants it how often
    read       sorted by their place in the file, rows of one page in one read, as many at a time as the queue
               is deep; each goes to whoever needs it, and into the cache
    wait       for rows that another thread was reading already
    decode

A row whose read fails costs its token: the errno is left with it, and its features are zeros. The next who
needs the row reads it again.
"""

import errno
import functools
from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import NgramConfig
from shared.native.memory import (
    bytes_at,
    call_task,
    carray,
    clock_ns,
    ids_at,
    integers_at,
    load_shared,
    nap,
    store,
    store_shared,
)
from shared.native.records import fields, reader, record
from shared.native.ring import PROGRESS
from shared.native.task import SCRATCH_BYTES, address_of, aligned_zeros
from shared.quants.jit import INTEGER, compile_kernel, compile_task, jitable
from shared.quants.matrix import GATHERED
from stager.ngram_hash import NgramHash, hash_windows
from stager.ngram_table import DEFAULT_OPTIONS, NgramTable, TableOptions
from stager.read_queue import BUFFER_BYTES, PAGE_BYTES, READ, READ_BYTES, ReadQueue, run_reads
from stager.row_cache import (
    CLAIMED,
    PENDING,
    PRESENT,
    announce,
    await_arrival,
    generation,
    is_pending,
    lock,
    look_up,
    next_tick,
    row_at,
    settle,
    unlock,
)

WORK = fields(
    "hash",  # a HASH
    "num_heads",
    # The table.
    "cache",  # its CACHE; 0 where the table is in memory
    "file",  # descriptor
    "file_offset",  # of the first row
    "row_bytes",
    "row_width",
    "queue",
    "gather",  # the task of the table's format
    "gathered",  # its params
    "scratch",
    # This thread's own, for as many rows as it does at a time.
    "rows",  # i64: the numbers of the batch's rows, token by token
    "missing",  # i64: what is to be read, number of the row and place in the batch in one word
    "places",  # i64: where in the cache a row of the batch goes; -1 for nowhere
    "pending",  # i64: places in the batch of rows that another thread reads
    "reads",  # READ
    "firsts",  # i64: where in `missing` the rows of a read begin, and where the last one's end
    "encoded",  # u8 [rows, row_bytes]; 0 where the rows are wanted in the cache only
    "on_read",  # the tasks below
    "bring",
    "interrupt",  # address of a word that is not 0 when work is to end
    "status",  # address of words of `RingStatus`
    # Of each token of the batch: addresses of i32 arrays.
    "hits",
    "token_reads",
    "token_bytes",
    "failures",
    # Counted since the start.
    "num_rows",
    "num_hits",
    "num_failures",
    "wait_ns",  # in which rows were being read, by this thread or another; since it was last cleared
)
_work_at = reader(WORK)
_read_at = reader(READ)
_OUT, _WEIGHTS = (8 * list(GATHERED.names or ()).index(name) for name in ("out", "weights"))

_PLACE_BITS = 22
MAX_ROWS = 1 << _PLACE_BITS
"""Of a batch."""
_PLACE_MASK = (1 << _PLACE_BITS) - 1
# The cache is not kept locked for longer than so many look-ups take.
_ROWS_PER_LOCK = 128
_LONGEST_WAIT_NS = 20_000_000
# More pending rows than this are waited for with naps, of as long as a fast disk takes for them.
_FEW_ROWS, _NS_PER_ROW, _LONGEST_NAP_NS = 64, 2_000, 5_000_000
_DECODED_AT_ONCE = 1024


@jitable
def _copy_row(source: int, target: int, num_bytes: int) -> None:
    read, written = bytes_at(source), bytes_at(target)
    for i in range(num_bytes):
        written[i] = read[i]


@jitable
def _clear_row(target: int, num_bytes: int) -> None:
    written = bytes_at(target)
    for i in range(num_bytes):
        written[i] = 0


@jitable
def _look_up_all(work_address: int, num_wanted: int, is_again: bool) -> tuple[int, int]:
    """Looks up the batch's rows, or those that were pending; copies what is there, and notes what is to be
    read and what is waited for: how many there are of each."""
    work = _work_at(work_address)
    rows, places, pending = integers_at(work.rows), integers_at(work.places), integers_at(work.pending)
    missing, hits = integers_at(work.missing), ids_at(work.hits)
    num_missing = num_pending = 0
    for start in range(0, num_wanted, _ROWS_PER_LOCK):
        lock(work.cache)
        next_tick(work.cache)
        for number in range(start, min(start + _ROWS_PER_LOCK, num_wanted)):
            at = pending[number] if is_again else number
            found, place = look_up(work.cache, rows[at])
            if found == PRESENT:
                if work.encoded != 0:
                    _copy_row(row_at(work.cache, place), work.encoded + at * work.row_bytes, work.row_bytes)
                if not is_again:
                    hits[at // work.num_heads] += 1
                    work.num_hits += 1
            elif found == PENDING:
                # Who only fills the cache need not see it come.
                if work.encoded != 0:
                    pending[num_pending] = at
                    num_pending += 1
            elif found == CLAIMED or work.encoded != 0:
                places[at] = place if found == CLAIMED else -1
                missing[num_missing] = rows[at] << _PLACE_BITS | at
                num_missing += 1
        unlock(work.cache)
    return num_missing, num_pending


@jitable
def _plan_reads(work_address: int, num_missing: int) -> int:
    """Writes a READ for all rows that one can bring; how many there are."""
    work = _work_at(work_address)
    missing, firsts = integers_at(work.missing), integers_at(work.firsts)
    carray(missing, (num_missing,)).sort()
    num_reads, begin, end = 0, 0, 0
    for number in range(num_missing):
        row_begin = work.file_offset + (missing[number] >> _PLACE_BITS) * work.row_bytes
        row_end = row_begin + work.row_bytes
        pages_end = (row_end + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
        read_address = work.reads + (num_reads - 1) * READ_BYTES
        if number == 0 or row_begin >= end or pages_end - begin > BUFFER_BYTES:
            begin = row_begin // PAGE_BYTES * PAGE_BYTES
            firsts[num_reads] = number
            num_reads += 1
            read_address += READ_BYTES
            read = _read_at(read_address)
            read.file = work.file
            read.offset = begin
            read.address = 0
        end = pages_end
        read = _read_at(read_address)
        read.num_bytes = end - begin
        read.needed = row_end - begin
    firsts[num_reads] = num_missing
    return num_reads


def _row_arrived(params: int, read_address: int, data: int, scratch: int) -> None:
    """Params WORK: takes the rows of a READ to the batch and into the cache."""
    if read_address == 0:
        announce(_work_at(params).cache)
        return
    work, read = _work_at(params), _read_at(read_address)
    missing, firsts, places = integers_at(work.missing), integers_at(work.firsts), integers_at(work.places)
    number = (read_address - work.reads) // READ_BYTES
    lock(work.cache)
    for entry in range(firsts[number], firsts[number + 1]):
        at = missing[entry] & _PLACE_MASK
        source = data + work.file_offset + (missing[entry] >> _PLACE_BITS) * work.row_bytes - read.offset
        target = work.encoded + at * work.row_bytes
        if read.result == 0:
            if work.encoded != 0:
                _copy_row(source, target, work.row_bytes)
            if places[at] >= 0:
                _copy_row(source, row_at(work.cache, places[at]), work.row_bytes)
        else:
            if work.encoded != 0:
                _clear_row(target, work.row_bytes)
            ids_at(work.failures)[at // work.num_heads] = -read.result
            work.num_failures += 1
        if places[at] >= 0:
            settle(work.cache, places[at], read.result == 0)
    unlock(work.cache)
    token = (missing[firsts[number]] & _PLACE_MASK) // work.num_heads
    ids_at(work.token_reads)[token] += read.num_calls
    ids_at(work.token_bytes)[token] += read.num_brought


@jitable
def _read_missing(work_address: int, num_missing: int) -> None:
    work = _work_at(work_address)
    num_reads = _plan_reads(work_address, num_missing)
    run_reads(work.queue, work.reads, num_reads, work.on_read, work_address)


@jitable
def _give_up(work_address: int, num_pending: int) -> None:
    """The rows that are still waited for will not come: this process ends."""
    work = _work_at(work_address)
    pending, failures = integers_at(work.pending), ids_at(work.failures)
    for number in range(num_pending):
        at = pending[number]
        _clear_row(work.encoded + at * work.row_bytes, work.row_bytes)
        failures[at // work.num_heads] = errno.ECANCELED


@jitable
def _await_last(work_address: int, num_pending: int) -> None:
    """Waits until the last of the pending rows, in the order in which they are read, is not read any more:
    most others are there then."""
    work = _work_at(work_address)
    rows, pending = integers_at(work.rows), integers_at(work.pending)
    last = -1
    for number in range(num_pending):
        last = max(last, rows[pending[number]])
    while load_shared(work.interrupt) == 0:
        seen = generation(work.cache)
        lock(work.cache)
        is_read = is_pending(work.cache, last)
        unlock(work.cache)
        if not is_read:
            return
        if num_pending > _FEW_ROWS:
            # To be woken by every arrival would cost more than being late by a little.
            nap(min(num_pending * _NS_PER_ROW, _LONGEST_NAP_NS))
        else:
            await_arrival(work.cache, seen, _LONGEST_WAIT_NS)
        # What others bring is progress too.
        if generation(work.cache) != seen:
            store_shared(work.status + PROGRESS, load_shared(work.status + PROGRESS) + 1)


def _bring(params: int, start: int, num_rows: int, scratch: int) -> None:
    """Params WORK: brings the batch's rows into the cache, and to `encoded` where they are wanted there."""
    work = _work_at(params)
    num_missing, num_pending = _look_up_all(params, num_rows, False)
    if num_missing == 0 and num_pending == 0:
        return
    started = clock_ns()
    while True:
        if num_missing > 0:
            _read_missing(params, num_missing)
        if num_pending == 0:
            break
        if num_missing == 0 and load_shared(work.interrupt) != 0:
            _give_up(params, num_pending)
            break
        if num_missing == 0:
            _await_last(params, num_pending)
        # What others have read in vain, or what was evicted meanwhile, is read here.
        num_missing, num_pending = _look_up_all(params, num_pending, True)
    work.wait_ns += clock_ns() - started


@jitable
def rows_of_windows(work_address: int, windows: int, num_tokens: int) -> int:
    """Native: hashes windows i32 [num_tokens, ngram_size] to `rows`, and clears what is counted of tokens;
    returns how many rows there are."""
    work = _work_at(work_address)
    hits, reads = ids_at(work.hits), ids_at(work.token_reads)
    read_bytes, failures = ids_at(work.token_bytes), ids_at(work.failures)
    hash_windows(work.hash, windows, num_tokens, work.rows)
    for token in range(num_tokens):
        hits[token] = reads[token] = read_bytes[token] = failures[token] = 0
    num_rows: int = num_tokens * work.num_heads
    work.num_rows += num_rows
    return num_rows


@jitable
def _decode(work_address: int, num_rows: int, features: int) -> None:
    """The batch's encoded rows to features f32 [num_rows, row_width]."""
    work = _work_at(work_address)
    for start in range(0, num_rows, _DECODED_AT_ONCE):
        store(work.gathered + _WEIGHTS, work.encoded + start * work.row_bytes)
        store(work.gathered + _OUT, features + start * work.row_width * 4)
        call_task(work.gather, work.gathered, 0, min(num_rows - start, _DECODED_AT_ONCE), work.scratch)


@jitable
def features_of_windows(work_address: int, windows: int, num_tokens: int, features: int) -> None:
    """Native: writes the features f32 [num_tokens, feature_width] of windows i32 [num_tokens, ngram_size].

    The windows have to make sense: a token of its own is never negative.
    """
    work = _work_at(work_address)
    num_rows = rows_of_windows(work_address, windows, num_tokens)
    if work.cache != 0:
        call_task(work.bring, work_address, 0, num_rows, 0)
        _decode(work_address, num_rows, features)
        return
    hits = ids_at(work.hits)
    for token in range(num_tokens):
        hits[token] = work.num_heads
    work.num_hits += num_rows
    store(work.gathered + _OUT, features)
    call_task(work.gather, work.gathered, 0, num_rows, work.scratch)


def _features(work: int, windows: int, num_tokens: int, features: int) -> None:
    features_of_windows(work, windows, num_tokens, features)


def _stage(work: int, windows: int, num_tokens: int) -> None:
    call_task(_work_at(work).bring, work, 0, rows_of_windows(work, windows, num_tokens), 0)


@functools.cache
def _row_arrived_task() -> int:
    return compile_task(_row_arrived, "ngram_rows_arrived")


@functools.cache
def _bring_task() -> int:
    return compile_task(_bring, "bring_ngram_rows")


@functools.cache
def _features_kernel() -> Callable[[int, int, int, int], None]:
    return compile_kernel(_features, "ngram_features", *4 * (INTEGER,))


@functools.cache
def _stage_kernel() -> Callable[[int, int, int], None]:
    return compile_kernel(_stage, "stage_ngram_rows", *3 * (INTEGER,))


class RowReader:
    """What one thread needs to get rows: a queue of its own, and memory for a batch."""

    def __init__(
        self, table: NgramTable, config: NgramConfig, queue: ReadQueue, max_tokens: int, *, is_staging: bool
    ) -> None:
        """For batches of at most `max_tokens`. With `is_staging` rows only go into the cache."""
        self._hash = NgramHash(config)
        num_heads = self._hash.num_heads
        num_rows = max_tokens * num_heads
        if num_rows > MAX_ROWS:
            raise ValueError(f"{max_tokens} tokens have {num_rows} rows, more than {MAX_ROWS}")
        self.max_tokens = max_tokens
        self.num_heads = num_heads
        self.queue = queue
        self.table = table
        names = ("rows", "missing", "places", "pending", "firsts")
        words = {name: np.zeros(num_rows + 1, np.int64) for name in names}
        self.counts_of_tokens = {
            name: np.zeros(max_tokens, np.int32) for name in ("hits", "reads", "read_bytes", "failures")
        }
        """What `features` found of each token of its batch; see `shared.work_slots.ngram_ring`."""
        counts = self.counts_of_tokens
        self._words = words
        self._reads = np.zeros(num_rows, READ)
        self._encoded = aligned_zeros(0 if is_staging or table.cache is None else num_rows * table.row_bytes)
        self._in_order = np.arange(_DECODED_AT_ONCE)
        self._scratch = aligned_zeros(SCRATCH_BYTES)
        task, self._gathered = table.gather()
        if table.cache is None:
            self._gathered["numbers"] = address_of(words["rows"])
        else:
            # What is decoded are the rows that were brought, in order.
            self._gathered["numbers"] = address_of(self._in_order)
            self._gathered["num_rows"] = _DECODED_AT_ONCE
        self._own_words = np.zeros(8, np.int64)
        self._record = record(
            WORK,
            hash=self._hash.address,
            num_heads=num_heads,
            cache=0 if table.cache is None else table.cache.address,
            file=table.descriptor,
            file_offset=table.file_offset,
            row_bytes=table.row_bytes,
            row_width=table.row_width,
            queue=queue.address,
            gather=task,
            gathered=self._gathered,
            scratch=self._scratch,
            reads=self._reads,
            encoded=0 if is_staging else self._encoded,
            on_read=_row_arrived_task(),
            bring=_bring_task(),
            interrupt=address_of(self._own_words) + 8 * (len(self._own_words) - 1),
            status=self._own_words,
            hits=counts["hits"],
            token_reads=counts["reads"],
            token_bytes=counts["read_bytes"],
            failures=counts["failures"],
            **words,
        )
        self.address = address_of(self._record)
        """Of its WORK, for native code."""

    def report_to(self, status: int, interrupt: int) -> None:
        """As `ReadQueue.report_to`, for the queue too."""
        self._record["status"], self._record["interrupt"] = status, interrupt
        self.queue.report_to(status, interrupt)

    @property
    def num_rows(self) -> int:
        """Rows that were wanted since the start."""
        return int(self._record[0]["num_rows"])

    @property
    def num_hits(self) -> int:
        """Those of them that were in memory."""
        return int(self._record[0]["num_hits"])

    @property
    def num_failures(self) -> int:
        """Those of them that could not be read."""
        return int(self._record[0]["num_failures"])

    @property
    def wait_ns(self) -> int:
        """How long the last `features` waited for the disk."""
        return int(self._record[0]["wait_ns"])

    def features(self, windows: NDArray[np.int32]) -> NDArray[np.float32]:
        """The features [num_tokens, feature_width] of windows [num_tokens, ngram_size]."""
        self._check(windows)
        width = self.num_heads * self.table.row_width
        features = np.zeros((len(windows), width), np.float32)
        self._record["wait_ns"] = 0
        _features_kernel()(self.address, address_of(windows), len(windows), address_of(features))
        return features

    def stage(self, windows: NDArray[np.int32]) -> None:
        """Brings the rows of windows [num_tokens, ngram_size] into the cache."""
        self._check(windows)
        if self.table.cache is not None:
            _stage_kernel()(self.address, address_of(windows), len(windows))

    def close(self) -> None:
        """Lets the queue go."""
        self.queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, windows: NDArray[np.int32]) -> None:
        if len(windows) > self.max_tokens or windows.shape[1:] != (self._hash.ngram_size,):
            raise ValueError(
                f"windows {windows.shape} for {self.max_tokens} tokens of {self._hash.ngram_size}"
            )
        if not windows.flags.c_contiguous or windows.dtype != np.int32:
            raise ValueError("windows are to be i32, C-contiguous")


class _OnlyReader(RowReader):
    """The one reader of its table, which is closed with it."""

    def close(self) -> None:
        super().close()
        self.table.close()


def open_rows(
    model: GGUFModel,
    config: NgramConfig,
    options: TableOptions = DEFAULT_OPTIONS,
    max_tokens: int = MAX_ROWS // 64,
) -> RowReader:
    """A model's table, and a reader of it for one thread, that nobody stages anything for. Closing the reader
    closes both."""
    table = NgramTable(model, options)
    queue = ReadQueue(table.depth, table.faults)
    return _OnlyReader(table, config, queue, max_tokens, is_staging=False)
