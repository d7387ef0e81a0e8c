"""What the slots of the rings hold: expert work for the cpu_worker, n-gram rows and expert blobs from the
stager.

Both sides of a ring build its shape from the model's metadata and a number that Init announces (tokens in a
step, places of a layer, places for staging), so neither tells the other where an array lies.
"""

import mmap
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from shared.model_config import NgramConfig, Qwen4ExpConfig
from shared.ring import RingShape

# One slot is filled while the other is worked on.
_NUM_SLOTS = 2
# Batches of a prompt's step follow each other before the first one is done; a slot is small.
_NUM_BLOB_SLOTS = 64

_HEADER_WORDS = 8


class ExpertHeader(IntEnum):
    """Places in the `header` of an expert slot. Those from COMPUTE_NS on are written by the cpu_worker."""

    LAYER = 0
    NUM_TOKENS = 1
    COMPUTE_NS = 2
    DISK_WAIT_NS = 3
    """The part of it in which there was nothing to compute for want of weights that were being read."""
    NUM_READ = 4
    """Blobs that had to be read; where it is 0, the counts of reads are not written."""
    MAJOR_FAULTS = 5
    """Of the cpu_worker since the slot before: pages of mapped files that were waited for."""
    HAS_FAILED = 6
    """1 where machine code could not have the experts, and leaves the reason to be worded."""
    NUM_LOST = 7
    """Routes to experts whose blobs could not be read; where it is 0, `failures` is not written."""


class NgramHeader(IntEnum):
    """Places in the `header` of an n-gram slot. Those from SERVE_NS on are written by the stager."""

    NUM_TOKENS = 0
    SERVE_NS = 1
    DISK_WAIT_NS = 2
    """The part of it in which rows were being read."""


class BlobHeader(IntEnum):
    """Places in the `header` of a blob slot, also of one for staging."""

    LAYER = 0
    COUNT = 1


PARTS = "gate", "up", "down"
"""The matrices of one expert, in the order in which its blob has them, and in which reads are counted."""
THERE = 1
"""The state of a place whose blob is there."""


def expert_ring(config: Qwen4ExpConfig, max_tokens: int) -> RingShape:
    """gpu_worker -> cpu_worker: the routed experts of one layer for all tokens of a step.

    In: `activations` [tokens, hidden], `expert_ids` and `expert_weights` [tokens, experts used].
    A negative id is a route that is not the cpu_worker's.
    Out: `outputs` [tokens, hidden], each token's weighted sum over its experts, in their order. And where
    blobs had to be read: how many of a token's routes led to one of them (`disk_routes`), and the reads of
    gate, up and down that were made (`reads`) and their bytes (`read_bytes`). A blob's reads are those of the
    first token that chose it. A token one of whose blobs could not be read has the errno and the expert in
    `failures`, zeros otherwise; its sum is worth nothing, those of the others are as always.
    """
    routes = (max_tokens, config.num_experts_used)
    return RingShape(
        _NUM_SLOTS,
        {
            "header": (np.int64, (_HEADER_WORDS,)),
            "activations": (np.float32, (max_tokens, config.hidden)),
            "expert_ids": (np.int32, routes),
            "expert_weights": (np.float32, routes),
            "outputs": (np.float32, (max_tokens, config.hidden)),
            "disk_routes": (np.int32, (max_tokens,)),
            "reads": (np.int32, (max_tokens, len(PARTS))),
            "read_bytes": (np.int64, (max_tokens, len(PARTS))),
            "failures": (np.int32, (max_tokens, 2)),
        },
    )


def ngram_ring(config: NgramConfig, max_tokens: int) -> RingShape:
    """gpu_worker -> stager: the n-gram features of all tokens of a step.

    In: `windows` [tokens, n-gram size], each token's own id first, then the ids before it, -1
    where there is none.
    Out: `features` [tokens, feature width], the concatenated rows of the table; and for each token how many
    of its rows were in memory (`hits`), the reads that were made for it (`reads`) and their bytes, and the
    errno of a read that failed (`failures`, 0 for none; its features are then zeros).
    """
    return RingShape(
        _NUM_SLOTS,
        {
            "header": (np.int64, (_HEADER_WORDS,)),
            "windows": (np.int32, (max_tokens, config.ngram_size)),
            "features": (np.float32, (max_tokens, config.feature_width)),
            "hits": (np.int32, (max_tokens,)),
            "reads": (np.int32, (max_tokens,)),
            "read_bytes": (np.int32, (max_tokens,)),
            "failures": (np.int32, (max_tokens,)),
        },
    )


def blob_ring(num_layers: int, places_per_layer: int, pool_bytes: int) -> RingShape:
    """cpu_worker -> stager: blobs of one layer's experts that are to be read into places of the pool.

    In: `experts` and `places` [count], the places counted within the layer; a place that is named is the
    stager's until its state says otherwise.
    Common: for each place of the pool, `places_per_layer` for each layer in turn, its `states` (0 while it is
    being read, 1 when the blob is there, -errno where it cannot be read), set to 0 by the cpu_worker before
    it asks; the `reads` that were made for it and their `read_bytes`, written before the state. `arrived`
    counts blobs whose state has changed, and is what the cpu_worker sleeps on. `pool` holds the places from
    its first whole page on (`shared.expert_blobs`).
    """
    return _blobs(places_per_layer, num_layers * places_per_layer, pool_bytes)


def staging_ring(num_places: int, place_bytes: int) -> RingShape:
    """gpu_worker -> stager: blobs of one layer's experts that are to be brought into staging places.

    As `blob_ring`, with the gpu_worker in the cpu_worker's place; but a place takes a blob of any layer, so
    it has `place_bytes`, those of the layer whose places are largest (`BlobLayout.largest_place_bytes`), and
    `places` are counted from the first of the pool. A blob that was copied from where it lies in memory has
    no reads.
    """
    return _blobs(num_places, num_places, num_places * place_bytes)


def _blobs(most_in_slot: int, num_places: int, pool_bytes: int) -> RingShape:
    """A ring that blobs come through."""
    return RingShape(
        _NUM_BLOB_SLOTS,
        {
            "header": (np.int64, (_HEADER_WORDS,)),
            "experts": (np.int32, (most_in_slot,)),
            "places": (np.int32, (most_in_slot,)),
        },
        {
            "arrived": (np.int64, (_HEADER_WORDS,)),
            "states": (np.int64, (num_places,)),
            "reads": (np.int32, (num_places, len(PARTS))),
            "read_bytes": (np.int64, (num_places, len(PARTS))),
            "pool": (np.uint8, (pool_bytes + mmap.PAGESIZE,)),
        },
    )


STAGING_PLACES = 16
"""For blobs on their way to the device: the original engine's number."""


@dataclass(frozen=True, slots=True)
class RingTokens:
    """Tokens that a slot of the expert ring and of the n-gram ring has room for."""

    experts: int
    ngrams: int


def ring_tokens(
    prefill_tokens: int, parallel: int, *, window_tokens: int, has_slots: bool, stream_min: int
) -> RingTokens:
    """Of a stack that computes chunks of so many tokens of a prompt, and beside it one window of each other
    sequence. Where the device has slots of experts, chunks from `stream_min` tokens on stream through it, and
    the cpu_worker never sees them; their n-gram rows come like all others."""
    to_cpu_worker = min(prefill_tokens, stream_min - 1) if has_slots else prefill_tokens
    # A prediction block may have a position to compute anew, before those of the step.
    windows = parallel * window_tokens + 1
    return RingTokens(to_cpu_worker + windows, prefill_tokens + windows)


def shared_memory_needed(config: Qwen4ExpConfig, tokens: RingTokens, place_bytes: int = 0) -> int:
    """Bytes of /dev/shm that the rings of steps take, pools of experts aside. `place_bytes` are those of a
    staging place (`staging_ring`), 0 where there are none."""
    shapes = [expert_ring(config, tokens.experts)]
    if config.ngram is not None:
        shapes.append(ngram_ring(config.ngram, tokens.ngrams))
    if place_bytes:
        shapes.append(staging_ring(STAGING_PLACES, place_bytes))
    return sum(shape.layout().num_bytes for shape in shapes)
