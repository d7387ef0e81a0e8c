"""Adds up which way routes went and the bytes of experts that were used for them, in machine code: it is done
for every layer of a step. The arrays are those of `gpu_worker.experts.counts`.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from shared.native.memory import ids_at, integers_at
from shared.native.records import fields, reader
from shared.quants.jit import INTEGER, compile_kernel, jitable

COUNTS = fields(
    "max_tokens",
    "num_layers",
    "num_experts",
    "blob_bytes",  # i64 [num_layers]: of one expert
    "routes",  # i32 [3, max_tokens]: device, transferred, skipped
    "num_bytes",  # i64 [3, max_tokens]: device, transferred, RAM
    "marks",  # i64 [num_experts]: the layer of a step, by number, in which an expert was last counted
    "number",  # of the layer at hand, among all that were counted
)
_counts_at = reader(COUNTS)
_RAM = 2
_IDS = types.Array(types.int32, 1, "C", readonly=True)
_ID_ROWS = types.Array(types.int32, 2, "C", readonly=True)

Ids = NDArray[np.int32]


@jitable
def count_handed_over(
    counts_address: int, layer: int, expert_ids: int, num_tokens: int, num_used: int
) -> None:
    """Books the bytes of every expert that routes lead to, expert_ids int32 [tokens, used] at that address,
    on the first token that chose it. Negative ids are nobody's."""
    counts = _counts_at(counts_address)
    counts.number += 1
    number, num_experts = counts.number, counts.num_experts
    ids, marks = ids_at(expert_ids), integers_at(counts.marks)
    blob_bytes = integers_at(counts.blob_bytes)[layer]
    to = integers_at(counts.num_bytes + 8 * _RAM * counts.max_tokens)
    for token in range(num_tokens):
        num_new = 0
        for i in range(token * num_used, (token + 1) * num_used):
            expert = ids[i]
            if 0 <= expert < num_experts and marks[expert] != number:
                marks[expert] = number
                num_new += 1
        to[token] += num_new * blob_bytes


def _count_handed_over(counts_address: int, layer: int, expert_ids: Ids) -> bool:
    counts = _counts_at(counts_address)
    num_tokens, num_used = expert_ids.shape
    if not 0 <= layer < counts.num_layers or num_tokens > counts.max_tokens:
        return False
    count_handed_over(counts_address, layer, expert_ids.ctypes.data, num_tokens, num_used)
    return True


def _add_routes(counts_address: int, device: Ids, transferred: Ids, skipped: Ids) -> bool:
    counts = _counts_at(counts_address)
    num_tokens, max_tokens = len(device), counts.max_tokens
    if len(transferred) != num_tokens or len(skipped) != num_tokens or num_tokens > max_tokens:
        return False
    to = ids_at(counts.routes)
    for token in range(num_tokens):
        to[token] += device[token]
        to[max_tokens + token] += transferred[token]
        to[2 * max_tokens + token] += skipped[token]
    return True


def _add_bytes(counts_address: int, way: int, layer: int, tokens: Ids) -> bool:
    counts = _counts_at(counts_address)
    if not 0 <= layer < counts.num_layers:
        return False
    for token in tokens:
        if not 0 <= token < counts.max_tokens:
            return False
    blob_bytes = integers_at(counts.blob_bytes)[layer]
    to = integers_at(counts.num_bytes + 8 * way * counts.max_tokens)
    for token in tokens:
        to[token] += blob_bytes
    return True


@functools.cache
def count_handed_over_kernel() -> Callable[[int, int, Ids], bool]:
    """`count_handed_over` for Python, expert_ids [tokens, used] given as such; False where that is not a
    layer, or more tokens than there may be."""
    return compile_kernel(_count_handed_over, "count_handed_over", INTEGER, INTEGER, _ID_ROWS)


@functools.cache
def add_routes_kernel() -> Callable[[int, Ids, Ids, Ids], bool]:
    """Adds routes [tokens] of each way; False where these are not as many, or more than there may be."""
    return compile_kernel(_add_routes, "add_expert_routes", INTEGER, _IDS, _IDS, _IDS)


@functools.cache
def add_bytes_kernel() -> Callable[[int, int, int, Ids], bool]:
    """Adds the bytes of one expert of the layer to each of the tokens; False where there is no such layer, or
    token."""
    return compile_kernel(_add_bytes, "add_expert_bytes", INTEGER, INTEGER, INTEGER, _IDS)
