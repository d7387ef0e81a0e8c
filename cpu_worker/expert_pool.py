"""The pool of experts: which blob is in which place, which one gives way, and the wait for one that is read.

Every layer has the same number of places of its own. All bookkeeping is done here, by the one thread that
computes experts; the stager is told what to read into which place, and answers with the place's state
(`shared.work_slots.blob_ring`, `shared.expert_blobs`).

A place is *empty*; or *under way*, asked for and not answered (state 0); or its blob is *there* (1); or its
read has *failed* (-errno): who finds that out does without the expert for the rest of the step, and the next
step that needs it asks again.

**What gives way.** Of the layer's places, those whose expert this step does not need any more (or never did),
the least used first: uses decay (`cpu_worker.expert_waves`). Only where that gives no place, an expert that a
later wave of the step needs gives way, the latest one first. Places under way never do, nor those of the wave
at hand.

**Door.** The ring to a stager, and with it the pool's memory, is exchanged while slots may be served: whoever
computes says so in `is_in_use` and then looks whether `is_closed`; whoever exchanges does it the other way
round.
"""

import copy
import mmap
import time

import numpy as np
from numpy.typing import NDArray

from shared.errors import GenerationError, WorkerFailedError
from shared.expert_blobs import BlobLayout, up_to_page
from shared.native.memory import (
    clock_ns,
    fence,
    floats_at,
    futex_wait_shared,
    ids_at,
    integers_at,
    load,
    load_shared,
    store,
    store_shared,
)
from shared.native.records import fields, reader, record
from shared.native.ring import (
    COMPLETED,
    INTERRUPT,
    NUM_SLOTS,
    OUTSTANDING,
    PROGRESS,
    SERVER_SLEEPS,
    STATUS,
    SUBMITTED,
    publish,
    slot_of,
)
from shared.native.task import address_of
from shared.quants.jit import jitable
from shared.ring import Arrays, RingClient, RingServer
from shared.work_slots import PARTS, BlobHeader

POOL = fields(
    "is_closed",  # 1: there is no stager, or no memory; written by whoever exchanges them
    "is_in_use",  # 1: somebody computes
    # The ring to the stager, and where the arrays of its slots begin.
    "ring",
    "slot_header",
    "slot_experts",
    "slot_places",
    # Its common arrays.
    "arrived",
    "states",  # i64 [num_places]
    "reads",  # i32 [num_places, 3]
    "read_bytes",  # i64 [num_places, 3]
    "first_place",  # address of the first place
    "places_per_layer",
    "num_experts",
    # The residency table, both ways: i32, -1 for none.
    "place_of",  # [layers, num_experts]
    "expert_of",  # [layers, places_per_layer]
    # Of the layer at hand.
    # i32 [num_experts]: the first and the last wave of the step that need an expert; -1 for none
    "first_wave",
    "last_wave",
    "asked",  # i32 [num_experts]: ASKED, BOOKED, or 0
    "lost",  # i32 [num_experts]: the negative errno of one that this step has to do without; 0 for none
    "batch",  # the slot of the stager's ring that is being filled; 0 for none
    "num_asked",  # experts in it
    # Towards the gpu_worker: the status words and the interrupt word of the ring that is served.
    "status",
    "interrupt",
    "forwarded",  # the stager's progress that was noted there
    # What a slot's reads are booked into, as `shared.work_slots.expert_ring` says; 0 for nowhere.
    "disk_routes",
    "token_reads",
    "token_read_bytes",
    "token_failures",
    # Results of the last computation.
    "num_read",
    "wait_ns",
    "num_lost",
    "failure",  # below
)
pool_at = reader(POOL)
_IS_CLOSED, _IS_IN_USE = 0, 8

NO_STAGER, LOST, STOPPED = range(1, 4)
"""Why no experts could be had."""
ASKED, BOOKED = 1, 2

LAYER_BLOBS = fields(
    "pool",
    "layer",
    "first_place",  # address of the layer's first place
    "place_bytes",
    *(f"{part}_at" for part in PARTS),  # where the pages of a part begin in a place
    *(f"{part}_offset" for part in PARTS),  # in the file, of expert 0
    *(f"{part}_bytes" for part in PARTS),  # of one expert
)
"""The places of one layer."""
blobs_at = reader(LAYER_BLOBS)

_PAGE = mmap.PAGESIZE
_LAYER, _COUNT = (8 * int(place) for place in BlobHeader)
_MAX_SLEEP_NS = 50_000_000
_PAUSE_S = 1e-3


@jitable
def begin_results(pool_address: int) -> None:
    """Nothing of the computation before is left in its results; also where nobody enters."""
    pool = pool_at(pool_address)
    pool.num_read = pool.wait_ns = pool.num_lost = pool.failure = 0


@jitable
def enter(pool_address: int) -> bool:
    """Begins to compute from the pool; False where the door is shut. Whoever has entered leaves."""
    pool = pool_at(pool_address)
    store_shared(pool_address + _IS_IN_USE, 1)
    fence()
    if load_shared(pool_address + _IS_CLOSED) == 0:
        return True
    store_shared(pool_address + _IS_IN_USE, 0)
    pool.failure = NO_STAGER
    return False


@jitable
def leave(pool_address: int) -> None:
    """Ends it."""
    store(pool_at(pool_address).status + OUTSTANDING, 0)
    store_shared(pool_address + _IS_IN_USE, 0)


@jitable
def _place_number(blobs_address: int, expert: int) -> int:
    """Among the places of all layers; negative where the expert has none."""
    blobs = blobs_at(blobs_address)
    pool = pool_at(blobs.pool)
    place = ids_at(pool.place_of)[blobs.layer * pool.num_experts + expert]
    return blobs.layer * pool.places_per_layer + place if place >= 0 else -1


@jitable
def state_of(blobs_address: int, expert: int) -> int:
    """THERE, 0 for under way, negative for failed (also earlier in the step) or not asked for."""
    number, pool = _place_number(blobs_address, expert), pool_at(blobs_at(blobs_address).pool)
    if number >= 0:
        return load_shared(pool.states + 8 * number)
    lost = ids_at(pool.lost)[expert]
    return lost if lost != 0 else -1


@jitable
def part_address(blobs_address: int, expert: int, at: int, offset: int, num_bytes: int) -> int:
    """Where the rows of one matrix of an expert are, given those fields of its part."""
    blobs = blobs_at(blobs_address)
    pool = pool_at(blobs.pool)
    place = ids_at(pool.place_of)[blobs.layer * pool.num_experts + expert]
    in_page = (offset + expert * num_bytes) % _PAGE
    return int(blobs.first_place + place * blobs.place_bytes + at + in_page)


@jitable
def _free(blobs_address: int, expert: int) -> None:
    """Empties the place of an expert."""
    blobs = blobs_at(blobs_address)
    pool = pool_at(blobs.pool)
    index = blobs.layer * pool.num_experts + expert
    place = ids_at(pool.place_of)[index]
    ids_at(pool.place_of)[index] = -1
    ids_at(pool.expert_of)[blobs.layer * pool.places_per_layer + place] = -1


@jitable
def begin_step(pool_address: int, num_tokens: int) -> None:
    """No wave needs anything yet, nothing is asked for, nothing booked or lost."""
    pool = pool_at(pool_address)
    first, last, asked = ids_at(pool.first_wave), ids_at(pool.last_wave), ids_at(pool.asked)
    lost = ids_at(pool.lost)
    for expert in range(pool.num_experts):
        first[expert] = last[expert] = -1
        asked[expert] = lost[expert] = 0
    if pool.disk_routes != 0:
        routes, reads = ids_at(pool.disk_routes), ids_at(pool.token_reads)
        num_bytes, failures = integers_at(pool.token_read_bytes), ids_at(pool.token_failures)
        for token in range(num_tokens):
            routes[token] = failures[2 * token] = failures[2 * token + 1] = 0
        for i in range(len(PARTS) * num_tokens):
            reads[i] = 0
            num_bytes[i] = 0


@jitable
def need(pool_address: int, expert: int, wave: int) -> None:
    """A wave needs an expert; told in the order of the waves."""
    pool = pool_at(pool_address)
    first, last = ids_at(pool.first_wave), ids_at(pool.last_wave)
    if first[expert] < 0:
        first[expert] = wave
    last[expert] = wave


@jitable
def _victim(blobs_address: int, uses_address: int, wave: int, is_needed_now: bool) -> int:
    """A place of the layer for an expert; -1 where there is none now."""
    blobs = blobs_at(blobs_address)
    pool = pool_at(blobs.pool)
    row = blobs.layer * pool.places_per_layer
    expert_of, states, uses = ids_at(pool.expert_of), pool.states, floats_at(uses_address)
    first, last = ids_at(pool.first_wave), ids_at(pool.last_wave)
    coldest, least, latest, latest_wave = -1, np.float32(np.inf), -1, wave
    for place in range(pool.places_per_layer):
        expert = expert_of[row + place]
        if expert < 0:
            return place
        if load_shared(states + 8 * (row + place)) == 0:
            continue
        if last[expert] < wave:
            if uses[expert] < least:
                coldest, least = place, uses[expert]
        elif first[expert] > latest_wave:
            latest, latest_wave = place, first[expert]
    return coldest if coldest >= 0 or not is_needed_now else latest


@jitable
def _open_batch(pool_address: int, layer: int) -> bool:
    """Begins the next slot of the stager's ring, if it is free."""
    pool = pool_at(pool_address)
    number = load(load(pool.ring + SUBMITTED))
    if load_shared(load(pool.ring + COMPLETED)) <= number - load(pool.ring + NUM_SLOTS):
        return False
    pool.batch = slot_of(pool.ring, number)
    pool.num_asked = 0
    store(pool.batch + pool.slot_header + _LAYER, layer)
    return True


@jitable
def send(pool_address: int) -> None:
    """Hands what was asked for to the stager."""
    pool = pool_at(pool_address)
    if pool.batch == 0:
        return
    store(pool.batch + pool.slot_header + _COUNT, pool.num_asked)
    pool.batch = 0
    submitted = load(pool.ring + SUBMITTED)
    publish(submitted, load(submitted) + 1, load(pool.ring + SERVER_SLEEPS))


@jitable
def ask(blobs_address: int, uses_address: int, expert: int, wave: int, is_needed_now: bool) -> bool:
    """Sees to it that an expert is there or under way, at the time of a wave. False where no place is free
    for it; and where it is needed now only if it cannot be had, for which `failure` then says the reason."""
    blobs = blobs_at(blobs_address)
    pool = pool_at(blobs.pool)
    if _place_number(blobs_address, expert) >= 0:
        # One that was read in vain for this step is not tried again before its wave has found that out.
        if state_of(blobs_address, expert) >= 0 or ids_at(pool.asked)[expert] == ASKED:
            return True
        _free(blobs_address, expert)
    elif ids_at(pool.lost)[expert] != 0:
        # Nor for a later wave that needs it too.
        return True
    while True:
        arrived = load_shared(pool.arrived)
        place = _victim(blobs_address, uses_address, wave, is_needed_now)
        if place >= 0 and (pool.batch != 0 or _open_batch(blobs.pool, blobs.layer)):
            break
        if not is_needed_now:
            return False
        send(blobs.pool)
        if not await_arrival(blobs.pool, arrived):
            return False
    number = blobs.layer * pool.places_per_layer + place
    if ids_at(pool.expert_of)[number] >= 0:
        _free(blobs_address, ids_at(pool.expert_of)[number])
    ids_at(pool.place_of)[blobs.layer * pool.num_experts + expert] = place
    ids_at(pool.expert_of)[number] = expert
    store(pool.states + 8 * number, 0)
    ids_at(pool.batch + pool.slot_experts)[pool.num_asked] = expert
    ids_at(pool.batch + pool.slot_places)[pool.num_asked] = place
    pool.num_asked += 1
    ids_at(pool.asked)[expert] = ASKED
    return True


@jitable
def await_arrival(pool_address: int, arrived: int) -> bool:
    """Sleeps until more blobs have arrived than that. False where none will come: `failure` has the reason.

    What the stager notes of its progress is passed on to the gpu_worker meanwhile, which else would take a
    slow disk for a process that is stuck.
    """
    pool = pool_at(pool_address)
    started = clock_ns()
    status = load(pool.ring + STATUS)
    while True:
        # In this order: what has arrived is in the progress that is passed on.
        has_arrived = load_shared(pool.arrived) != arrived
        progress = load_shared(status + PROGRESS)
        store_shared(pool.status + OUTSTANDING, load_shared(status + OUTSTANDING))
        store_shared(pool.status + PROGRESS, load(pool.status + PROGRESS) + progress - pool.forwarded)
        pool.forwarded = progress
        if has_arrived:
            break
        if load_shared(pool.ring + INTERRUPT) != 0:
            pool.failure = LOST
            break
        if load_shared(pool.interrupt) != 0:
            pool.failure = STOPPED
            break
        futex_wait_shared(pool.arrived, arrived, _MAX_SLEEP_NS)
    pool.wait_ns += clock_ns() - started
    return bool(pool.failure == 0)


@jitable
def book(blobs_address: int, expert: int, tokens_address: int, count: int) -> None:
    """Books the routes of some tokens to an expert, and its reads on the first of all that chose it."""
    pool = pool_at(blobs_at(blobs_address).pool)
    asked = ids_at(pool.asked)
    if asked[expert] == 0:
        return
    is_first = asked[expert] == ASKED
    pool.num_read += 1 if is_first else 0
    asked[expert] = BOOKED
    if pool.disk_routes == 0:
        return
    tokens, routes = ids_at(tokens_address), ids_at(pool.disk_routes)
    for i in range(count):
        routes[tokens[i]] += 1
    if is_first:
        number = _place_number(blobs_address, expert)
        for part in range(len(PARTS)):
            to, source = len(PARTS) * tokens[0] + part, len(PARTS) * number + part
            ids_at(pool.token_reads)[to] += ids_at(pool.reads)[source]
            integers_at(pool.token_read_bytes)[to] += integers_at(pool.read_bytes)[source]


@jitable
def give_up(blobs_address: int) -> None:
    """The stager ends, and has left what it was asked for."""
    pool_at(blobs_at(blobs_address).pool).failure = LOST


@jitable
def lose(blobs_address: int, expert: int, tokens_address: int, count: int) -> None:
    """The blob of an expert could not be read: books that on the tokens that chose it, and empties its
    place, if an earlier wave has not done so."""
    pool = pool_at(blobs_at(blobs_address).pool)
    book(blobs_address, expert, tokens_address, count)
    pool.num_lost += count
    ids_at(pool.lost)[expert] = state_of(blobs_address, expert)
    if pool.token_failures != 0:
        tokens, failures = ids_at(tokens_address), ids_at(pool.token_failures)
        for i in range(count):
            failures[2 * tokens[i]] = -state_of(blobs_address, expert)
            failures[2 * tokens[i] + 1] = expert
    if _place_number(blobs_address, expert) >= 0:
        _free(blobs_address, expert)


class ExpertPool:
    """The table and the memory behind it. Begins without a stager, that is with its door shut."""

    def __init__(self, layout: BlobLayout, num_experts: int, places_per_layer: int) -> None:
        self._layout = layout
        self.places_per_layer = places_per_layer
        num_layers = len(layout.layers)
        self._place_of = np.full((num_layers, num_experts), -1, np.int32)
        self._expert_of = np.full((num_layers, places_per_layer), -1, np.int32)
        self._marks = np.zeros((4, num_experts), np.int32)
        # Until a ring is served.
        self._own_words = np.zeros(16, np.int64)
        self._server: RingServer | None = None
        self._ring: RingClient | None = None
        self._pool = record(
            POOL,
            is_closed=1,
            places_per_layer=places_per_layer,
            num_experts=num_experts,
            place_of=self._place_of,
            expert_of=self._expert_of,
            first_wave=self._marks[0],
            last_wave=self._marks[1],
            asked=self._marks[2],
            lost=self._marks[3],
            status=self._own_words,
            interrupt=address_of(self._own_words) + 64,
        )
        self._words = self._pool.view(np.int64)
        self.address = address_of(self._pool)
        """Of its POOL."""
        self._blobs = np.zeros(num_layers, LAYER_BLOBS)
        for number, (row, blobs) in enumerate(zip(self._blobs, layout.layers, strict=True)):
            row["pool"], row["layer"], row["place_bytes"] = self.address, number, blobs.place_bytes
            for name, part in zip(PARTS, blobs.parts, strict=True):
                row[f"{name}_at"], row[f"{name}_offset"] = part.at, part.offset
                row[f"{name}_bytes"] = part.num_bytes
        self._lost: GenerationError | None = None

    def blobs_address(self, layer: int) -> int:
        """Of the LAYER_BLOBS of a layer."""
        return address_of(self._blobs) + layer * LAYER_BLOBS.itemsize

    @property
    def num_read(self) -> int:
        """Blobs that the last computation had to have read."""
        return int(self._pool["num_read"][0])

    @property
    def num_lost(self) -> int:
        """Routes that it had to do without, since their experts could not be read."""
        return int(self._pool["num_lost"][0])

    @property
    def wait_ns(self) -> int:
        """How long it had nothing to compute meanwhile."""
        return int(self._pool["wait_ns"][0])

    @property
    def is_in_use(self) -> bool:
        """Whether somebody computes."""
        return bool(self._words[_IS_IN_USE // 8])

    @property
    def experts(self) -> NDArray[np.int32]:
        """Which expert is in which place [layers, places_per_layer], -1 for none: a copy."""
        return self._expert_of.copy()

    # The stager's coming and going. Calls come one after the other, from any thread.

    def open(self, ring: RingClient) -> None:
        """A stager serves this ring: its pool is used from now on. All its places are empty."""
        assert self._words[_IS_CLOSED // 8], "the pool before has to be shut"
        self._ring, common = ring, ring.common
        self._place_of[:], self._expert_of[:] = -1, -1
        first_place = up_to_page(address_of(common["pool"]))
        for number, row in enumerate(self._blobs):
            row["first_place"] = first_place + self._layout.first_place(number, self.places_per_layer)
        pool = self._pool
        pool["ring"], pool["first_place"], pool["batch"], pool["forwarded"] = ring.address, first_place, 0, 0
        for name in ("header", "experts", "places"):
            pool[f"slot_{name}"] = ring.offsets[name]
        for name in ("arrived", "states", "reads", "read_bytes"):
            pool[name] = address_of(common[name])
        self._lost = None
        pool["is_closed"] = 0

    def shut(self, failure: GenerationError) -> None:
        """The stager is lost: a wait for it ends, nobody enters any more. Returns at once."""
        self._lost = failure
        self._pool["is_closed"] = 1
        if self._ring is not None:
            self._ring.fail(failure)

    def wait_until_left(self) -> None:
        """Returns when nobody computes. The door must have been shut. Takes what a layer takes."""
        while self.is_in_use:
            time.sleep(_PAUSE_S)
        self._ring = None

    # The thread that computes.

    def serve(self, server: RingServer) -> None:
        """Computations are for the slots of that server from now on."""
        self._server = server
        self._pool["status"] = address_of(np.asarray(server.status))
        self._pool["interrupt"] = server.address + INTERRUPT

    def book_into(self, slot: Arrays) -> None:
        """The next computation books its reads, and what could not be read, into those arrays of an expert
        slot. Until then there are no results."""
        for result in ("num_read", "wait_ns", "num_lost", "failure"):
            self._pool[result] = 0
        self._pool["disk_routes"] = address_of(slot["disk_routes"])
        self._pool["token_reads"] = address_of(slot["reads"])
        self._pool["token_read_bytes"] = address_of(slot["read_bytes"])
        self._pool["token_failures"] = address_of(slot["failures"])

    def failure(self) -> GenerationError:
        """Why no experts could be had, for a computation that has ended with that."""
        if int(self._pool["failure"][0]) == STOPPED:
            return WorkerFailedError("the cpu_worker was asked to stop while it waited for experts")
        # A fresh one each time: its traceback has the frames of who raised it.
        return copy.copy(self._lost) or WorkerFailedError(
            "there is no stager to read experts from the disk; it is being restarted, try again soon"
        )
