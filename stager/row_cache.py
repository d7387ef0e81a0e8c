"""Rows of the n-gram table in memory: a bounded cache that is exact, and that machine code looks rows up in.

A row of 90 bytes takes 102 here, where the page it lies on would take 4096. The cache has sets of eight
places; a row may be in any place of its set, and the one used longest ago makes room. A place whose row is
being read is *pending*: nobody else reads that row, and nobody takes the place. Rows come and go under a
lock, held for microseconds; whoever needs a pending row waits for the next arrival.
"""

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from shared.native.memory import (
    EVERYONE,
    fetch_add,
    futex_wait_shared,
    futex_wake_shared,
    integers_at,
    load_shared,
    pause,
    store_shared,
    system_call,
    words_at,
)
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import jitable

NUM_WAYS = 8
"""Places of a set: their numbers of rows are one cache line."""
_KEY_BYTES, _STAMP_BYTES = 8, 4
ABSENT, PENDING, PRESENT, CLAIMED = range(4)
"""What a look-up finds: nothing, and no place either; a row that someone reads; a row; nothing, and the
caller is to read it into the place it got."""

CACHE = fields(
    # Words that threads share.
    "tickets",  # of the lock
    "serving",
    "generation",  # grows with every arrival
    "num_waiting",
    # Constant.
    "num_sets",
    "row_bytes",
    "keys",  # i64 [num_sets, NUM_WAYS]: 1 + the number of a row, 0 for none
    "stamps",  # u32 [num_sets, NUM_WAYS]: _EMPTY, _BEING_READ, or the tick of the last use
    "rows",  # u8 [num_sets * NUM_WAYS, row_bytes]
    # Under the lock.
    "tick",
    "num_present",
    "num_evicted",
)
_cache_at = reader(CACHE)
_TICKETS, _SERVING, _GENERATION, _NUM_WAITING = range(0, 32, 8)
_EMPTY, _BEING_READ, _FIRST_TICK = range(3)
_LAST_TICK = (1 << 32) - 1

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
_SPINS = 200
_SCHED_YIELD = 24
# Consecutive rows shall not share sets. The odd number nearest to 2^64 / golden ratio (Knuth, TAOCP 6.4),
# halved so that the product can be taken of signed numbers.
_MULTIPLIER = 0x4F1BBCDCBFA53E0B
_HASH_SHIFT, _HASH_MASK = 24, (1 << 39) - 1


@jitable
def lock(cache: int) -> None:
    """Native: enters the cache, in the order of coming."""
    ticket = fetch_add(cache + _TICKETS, 1)
    spins = 0
    while load_shared(cache + _SERVING) != ticket:
        pause()
        spins += 1
        if spins > _SPINS:
            # Its holder may have been put aside, and want this CPU.
            system_call(_SCHED_YIELD, 0, 0, 0, 0, 0, 0)


@jitable
def unlock(cache: int) -> None:
    """Native: leaves it."""
    store_shared(cache + _SERVING, load_shared(cache + _SERVING) + 1)


@jitable
def generation(cache: int) -> int:
    """Native: what `await_arrival` is given; taken before looking for rows."""
    return load_shared(cache + _GENERATION)


@jitable
def announce(cache: int) -> None:
    """Native: wakes those who wait for arrivals, or for the end of a read that brought nothing."""
    fetch_add(cache + _GENERATION, 1)
    if load_shared(cache + _NUM_WAITING) != 0:
        futex_wake_shared(cache + _GENERATION, EVERYONE)


@jitable
def await_arrival(cache: int, seen: int, longest_ns: int) -> bool:
    """Native: waits until something was announced since `generation` was `seen`; whether it was."""
    if load_shared(cache + _GENERATION) == seen:
        fetch_add(cache + _NUM_WAITING, 1)
        futex_wait_shared(cache + _GENERATION, seen, longest_ns)
        fetch_add(cache + _NUM_WAITING, -1)
    return load_shared(cache + _GENERATION) != seen


@jitable
def next_tick(cache_address: int) -> None:
    """Native, under the lock: what is used from now on was used later than what was used before."""
    cache = _cache_at(cache_address)
    if cache.tick < _LAST_TICK:
        cache.tick += 1
        return
    stamps = words_at(cache.stamps)
    for place in range(cache.num_sets * NUM_WAYS):
        stamps[place] = min(stamps[place], _FIRST_TICK)
    cache.tick = _FIRST_TICK + 1


@jitable
def _first_place(cache_address: int, row: int) -> int:
    """Of a row's set."""
    hashed = ((row * _MULTIPLIER) >> _HASH_SHIFT) & _HASH_MASK
    first: int = hashed % _cache_at(cache_address).num_sets * NUM_WAYS
    return first


@jitable
def look_up(cache_address: int, row: int) -> tuple[int, int]:
    """Native, under the lock: what there is of a row (PRESENT, PENDING, CLAIMED or ABSENT), and its place.

    Whoever gets CLAIMED has to call `settle`; rows of which another one has the last place of their set are
    ABSENT, and can be read without a place.
    """
    cache = _cache_at(cache_address)
    keys, stamps = integers_at(cache.keys), words_at(cache.stamps)
    first = _first_place(cache_address, row)
    victim, oldest = -1, _LAST_TICK + 1
    for place in range(first, first + NUM_WAYS):
        if keys[place] == row + 1:
            if stamps[place] == _BEING_READ:
                return PENDING, place
            stamps[place] = cache.tick
            return PRESENT, place
        if stamps[place] != _BEING_READ and stamps[place] < oldest:
            victim, oldest = place, stamps[place]
    if victim < 0:
        return ABSENT, 0
    if oldest != _EMPTY:
        cache.num_evicted += 1
        cache.num_present -= 1
    keys[victim] = row + 1
    stamps[victim] = _BEING_READ
    return CLAIMED, victim


@jitable
def is_pending(cache_address: int, row: int) -> bool:
    """Native, under the lock: whether someone is reading a row; its use is not noted."""
    cache = _cache_at(cache_address)
    keys, stamps = integers_at(cache.keys), words_at(cache.stamps)
    first = _first_place(cache_address, row)
    for place in range(first, first + NUM_WAYS):
        if keys[place] == row + 1:
            return bool(stamps[place] == _BEING_READ)
    return False


@jitable
def settle(cache_address: int, place: int, is_there: bool) -> None:
    """Native, under the lock: the row of a claimed place has been written to `row_at`, or will not come."""
    cache = _cache_at(cache_address)
    if is_there:
        words_at(cache.stamps)[place] = cache.tick
        cache.num_present += 1
    else:
        words_at(cache.stamps)[place] = _EMPTY
        integers_at(cache.keys)[place] = 0


@jitable
def row_at(cache_address: int, place: int) -> int:
    """Native: the address of a place's row."""
    cache = _cache_at(cache_address)
    address: int = cache.rows + place * cache.row_bytes
    return address


class RowCache:
    """The cache of one table."""

    def __init__(self, num_bytes: int, row_bytes: int) -> None:
        """In at most so many bytes, but eight places at least. All of it is taken now: a row that is the
        first on its page would otherwise cost more than to read it."""
        bytes_a_place = row_bytes + _KEY_BYTES + _STAMP_BYTES
        num_sets = max(1, num_bytes // (bytes_a_place * NUM_WAYS))
        self.num_places = num_sets * NUM_WAYS
        self._rows = _memory(self.num_places * row_bytes)
        self._keys = _memory(self.num_places * _KEY_BYTES)
        self._stamps = _memory(self.num_places * _STAMP_BYTES)
        self._record = record(
            CACHE,
            num_sets=num_sets,
            row_bytes=row_bytes,
            keys=self._keys,
            stamps=self._stamps,
            rows=self._rows,
            tick=_FIRST_TICK,
        )
        self.address = address_of(self._record)
        """Of its CACHE, for native code."""

    @property
    def num_present(self) -> int:
        """Rows that are in memory."""
        return int(self._record[0]["num_present"])

    @property
    def num_evicted(self) -> int:
        """Rows that made room for others since the start."""
        return int(self._record[0]["num_evicted"])


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that have their pages already, large ones where the kernel has them."""
    mapping = mmap.mmap(-1, num_bytes)
    # Both are advice: older kernels, or those built without large pages, refuse it.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return np.frombuffer(mapping, np.uint8)
