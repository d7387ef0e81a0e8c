"""Gated attention as tasks: projections, norms and rotations, attention, output.

A token's context is divided into a few parts, each of which keeps its largest score, the sum of its weights
and its weighted values; then the parts of a head are put together (Dao et al., "Flash-Decoding", 2023). Where
there are few tokens, threads take parts; where there are many, all parts of a head, with the same result.
Within a part, positions are taken in blocks, with the softmax corrected from block to block (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Query heads that share a kv head are taken
together, so that each key is read once. Where keys and values are kept as less than float32
(`shared.kv_format`), a block of them is decoded when it is taken, so that memory gives that much less.

A prompt is attended to in the same way, token by token: it costs what each token sees, and keys that several
tokens see stay in the caches meanwhile.
"""

import functools

import numpy as np

from gpu_worker.native.attention_span import (
    ATTENTION_SPAN,
    INDEXER_SNAPSHOT,
    SPAN_BYTES,
    row_of,
    span_at,
)
from gpu_worker.native.indexer import NORMED_HEADS, Indexer, normalise, normalise_heads_task
from gpu_worker.native.kv_rows import DECODED, decode_rows, encode_row
from gpu_worker.native.regions import region
from gpu_worker.native.rotation import RotationTable, rotate
from gpu_worker.native.script import Script
from gpu_worker.native.spans import NUM_PARTS, SnapshotRecords, SpanRecords, StepSpans
from gpu_worker.native.streams import Written
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Workspace, multiply
from shared.kv_format import KvFormat
from shared.model_config import Qwen4ExpConfig
from shared.native.arithmetic import Pointer, dot, exp, sigmoid
from shared.native.memory import floats_at, integers_at
from shared.native.records import Record, fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import compile_task, jitable, jitable_sum
from shared.tensor_catalog import block_prefix

_MIN_PART = 64
"""Positions of a part, at least."""
_BLOCK = 32
"""Positions whose scores are computed before their values are added."""

_FORMATS = ("key_format", "key_bytes", "value_format", "value_bytes")
"""Of rows: the number of their format, and what one takes."""
APPENDED = fields(
    "spans",  # ATTENTION_SPAN [num_spans]
    "token_spans",  # i64 [tokens]
    "keys",  # f32 [tokens, num_heads, dim]
    "values",
    "norm",  # f32 [dim]
    "rotation",  # a ROTATION
    "num_heads",
    "dim",
    *_FORMATS,
    epsilon=np.float32,
)
ATTENTION = fields(
    "spans",
    "token_spans",
    "queries",  # f32 [tokens, num_query_heads, 2, dim]: a query, then its gate
    "chosen",  # i64 [tokens, num_kept]: blocks, where blocks are dropped
    "num_kept",
    "ratio",  # 0: dense
    "part_values",  # f32 [tokens, num_query_heads, num_parts, dim]
    "part_maxima",  # f32 [tokens, num_query_heads, num_parts]
    "part_sums",  # the same shape
    "out",  # f32 [tokens, num_query_heads, dim]
    "num_query_heads",
    "num_kv_heads",
    "dim",
    "num_parts",  # of the context of each token
    "parts_per_item",  # all of them, which are then joined at once, or one
    *_FORMATS,
)
GATED = fields("values", "queries", "dim")

_appended_at = reader(APPENDED)
_attention_at = reader(ATTENTION)
_gated_at = reader(GATED)

get_first, put_first = region(0)
get_second, put_second = region(1)
get_value, _ = region(DECODED)


def _append_heads(params: int, start: int, stop: int, scratch: int) -> None:
    step = _appended_at(params)
    num_heads, dim = step.num_heads, step.dim
    key_format, key_bytes = step.key_format, step.key_bytes
    value_format, value_bytes = step.value_format, step.value_bytes
    norm = floats_at(step.norm)
    for item in range(start, stop):
        token = item // num_heads
        span = span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        position = span.position + token - span.start
        row = row_of(span.pages, span.page_tokens, position) * num_heads + item % num_heads
        new_value, new_key = floats_at(step.values + item * dim * 4), floats_at(step.keys + item * dim * 4)
        encode_row(new_value, value_format, dim, span.values + row * value_bytes)
        key = floats_at(scratch)
        normalise(new_key, norm, key, dim, step.epsilon)
        rotate(key, position, step.rotation)
        encode_row(key, key_format, dim, span.keys + row * key_bytes)


@jitable
def _num_seen(position: int, ratio: int, num_kept: int) -> int:
    """Positions that a token sees."""
    if ratio == 0 or (position + 1) // ratio <= num_kept:
        return position + 1
    return num_kept * ratio + (position + 1) % ratio


@jitable
def _seen_position(
    place: int, position: int, num_seen: int, ratio: int, num_kept: int, chosen: Pointer
) -> int:
    """The position at a place among those that a token sees."""
    if num_seen == position + 1:
        return place
    if place < num_kept * ratio:
        return int(chosen[place // ratio]) * ratio + place % ratio
    return position + 1 - (num_seen - place)


@jitable_sum
def _dot_4x2(x: Pointer, stride: int, y: Pointer, z: Pointer, width: int) -> tuple[np.float32, ...]:
    """Four rows of x, `stride` apart, times y and z [width]: the sums share their loads."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for i in range(width):
        a, b = y[i], z[i]
        x0, x1, x2, x3 = x[i], x[stride + i], x[2 * stride + i], x[3 * stride + i]
        a0 += x0 * a
        a1 += x1 * a
        a2 += x2 * a
        a3 += x3 * a
        b0 += x0 * b
        b1 += x1 * b
        b2 += x2 * b
        b3 += x3 * b
    return a0, a1, a2, a3, b0, b1, b2, b3


@jitable
def _score(
    queries: int, group: int, keys: Pointer, num_rows: int, dim: int, scale: np.float32, scores: Pointer
) -> None:
    """scores [group, _BLOCK]: the queries at that address, each followed by its gate, times the keys at
    these."""
    whole = group // 4 * 4
    for row in range(0, num_rows, 2):
        # The last of an odd number is its own partner.
        other = min(row + 1, num_rows - 1)
        key, other_key = floats_at(keys[row]), floats_at(keys[other])
        for head in range(0, whole, 4):
            a0, a1, a2, a3, b0, b1, b2, b3 = _dot_4x2(
                floats_at(queries + head * 2 * dim * 4), 2 * dim, key, other_key, dim
            )
            at = head * _BLOCK
            scores[at + row], scores[at + other] = a0 * scale, b0 * scale
            scores[at + _BLOCK + row], scores[at + _BLOCK + other] = a1 * scale, b1 * scale
            scores[at + 2 * _BLOCK + row], scores[at + 2 * _BLOCK + other] = a2 * scale, b2 * scale
            scores[at + 3 * _BLOCK + row], scores[at + 3 * _BLOCK + other] = a3 * scale, b3 * scale
        for head in range(whole, group):
            query = floats_at(queries + head * 2 * dim * 4)
            scores[head * _BLOCK + row] = dot(query, key, dim) * scale
            scores[head * _BLOCK + other] = dot(query, other_key, dim) * scale


@jitable_sum
def _add_weighted(
    first: Pointer, second: Pointer, weights: Pointer, rows: Pointer, num_rows: int, dim: int
) -> None:
    """first and second [dim] += the sums of the rows at these addresses with weights [2, _BLOCK]."""
    whole = num_rows // 4 * 4
    for row in range(0, whole, 4):
        v0, v1 = floats_at(rows[row]), floats_at(rows[row + 1])
        v2, v3 = floats_at(rows[row + 2]), floats_at(rows[row + 3])
        a0, a1, a2, a3 = weights[row], weights[row + 1], weights[row + 2], weights[row + 3]
        at = _BLOCK + row
        b0, b1, b2, b3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        for i in range(dim):
            x0, x1, x2, x3 = get_value(v0, i), get_value(v1, i), get_value(v2, i), get_value(v3, i)
            put_first(first, i, get_first(first, i) + (a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3))
            put_second(second, i, get_second(second, i) + (b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3))
    for row in range(whole, num_rows):
        v, a, b = floats_at(rows[row]), weights[row], weights[_BLOCK + row]
        for i in range(dim):
            x = get_value(v, i)
            put_first(first, i, get_first(first, i) + a * x)
            put_second(second, i, get_second(second, i) + b * x)


@jitable
def _clear(group: int, dim: int, stride: int, maxima: Pointer, sums: Pointer, totals: int) -> None:
    """Makes a part of so many heads empty; `stride` is that between heads, in parts."""
    for head in range(group):
        maxima[head * stride] = -np.float32(np.inf)
        sums[head * stride] = np.float32(0)
        total = floats_at(totals + head * stride * dim * 4)
        for i in range(dim):
            total[i] = np.float32(0)


@jitable
def _weigh(weights: Pointer, num_rows: int, dim: int, maxima: Pointer, sums: Pointer, total: Pointer) -> None:
    """Makes weights of the scores [_BLOCK] of the next block of a part, whose largest score, sum of weights
    and weighted values [dim] are at these places."""
    before = maxima[0]
    largest = before
    for row in range(num_rows):
        largest = weights[row] if weights[row] > largest else largest
    block_sum = np.float32(0)
    for row in range(num_rows):
        weights[row] = exp(weights[row] - largest)
    for row in range(num_rows):
        block_sum += weights[row]
    if largest > before:
        correction = exp(before - largest)
        for i in range(dim):
            total[i] *= correction
        sums[0] *= correction
    sums[0] += block_sum
    maxima[0] = largest


@jitable
def _join(num_parts: int, dim: int, maxima: Pointer, sums: Pointer, totals: int, out: Pointer) -> None:
    """out [dim] of one head from its parts [num_parts], which lie one after the other."""
    largest = -np.float32(np.inf)
    for part in range(num_parts):
        largest = maxima[part] if maxima[part] > largest else largest
    total = np.float32(0)
    for i in range(dim):
        out[i] = np.float32(0)
    for part in range(num_parts):
        # A part without positions has the sum 0; one with NaN is never left out.
        if sums[part] == 0:
            continue
        weight = exp(maxima[part] - largest)
        total += weight * sums[part]
        values = floats_at(totals + part * dim * 4)
        for i in range(dim):
            out[i] += weight * values[i]
    scale = np.divide(np.float32(1), total)
    for i in range(dim):
        out[i] *= scale


def _attend_parts(params: int, start: int, stop: int, scratch: int) -> None:
    step = _attention_at(params)
    dim, num_kv_heads, ratio, num_kept = step.dim, step.num_kv_heads, step.ratio, step.num_kept
    num_query_heads, num_parts, parts_per_item = step.num_query_heads, step.num_parts, step.parts_per_item
    items_per_head = num_parts // parts_per_item
    group = num_query_heads // num_kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    keys, values = integers_at(scratch), integers_at(scratch + _BLOCK * 8)
    # Scores, then weights [group, _BLOCK], with room for a partner of the last head.
    weights_at = scratch + _BLOCK * 16
    unused = weights_at + (group + 1) * _BLOCK * 4
    own_maxima = unused + dim * 4
    own_sums = own_maxima + group * num_parts * 4
    own_totals = own_sums + group * num_parts * 4
    decoded = own_totals + group * num_parts * dim * 4
    key_format, key_bytes = step.key_format, step.key_bytes
    value_format, value_bytes = step.value_format, step.value_bytes
    for item in range(start, stop):
        token = item // (items_per_head * num_kv_heads)
        kv_head, first_part = item // items_per_head % num_kv_heads, item % items_per_head * parts_per_item
        span = span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        pages, page_tokens, all_keys, all_values = span.pages, span.page_tokens, span.keys, span.values
        position = span.position + token - span.start
        num_seen = _num_seen(position, ratio, num_kept)
        size = max(_MIN_PART, (num_seen + num_parts - 1) // num_parts)
        chosen = integers_at(step.chosen + token * num_kept * 8)
        first_head = token * num_query_heads + kv_head * group
        queries = step.queries + first_head * 2 * dim * 4
        # Whoever computes all parts of a head keeps them to itself.
        maxima_at, sums_at, totals_at = own_maxima, own_sums, own_totals
        if items_per_head > 1:
            place = first_head * num_parts * 4
            maxima_at, sums_at = step.part_maxima + place, step.part_sums + place
            totals_at = step.part_values + place * dim
        for part in range(first_part, first_part + parts_per_item):
            maxima, sums, totals = maxima_at + part * 4, sums_at + part * 4, totals_at + part * dim * 4
            _clear(group, dim, num_parts, floats_at(maxima), floats_at(sums), totals)
            last = min((part + 1) * size, num_seen)
            for block in range(min(part * size, num_seen), last, _BLOCK):
                num_rows = min(_BLOCK, last - block)
                for row in range(num_rows):
                    seen = _seen_position(block + row, position, num_seen, ratio, num_kept, chosen)
                    number = row_of(pages, page_tokens, seen) * num_kv_heads + kv_head
                    keys[row], values[row] = all_keys + number * key_bytes, all_values + number * value_bytes
                decode_rows(keys, num_rows, key_format, dim, decoded)
                _score(queries, group, keys, num_rows, dim, scale, floats_at(weights_at))
                for head in range(group):
                    place = head * num_parts * 4
                    _weigh(
                        floats_at(weights_at + head * _BLOCK * 4),
                        num_rows,
                        dim,
                        floats_at(maxima + place),
                        floats_at(sums + place),
                        floats_at(totals + place * dim),
                    )
                decode_rows(values, num_rows, value_format, dim, decoded)
                for head in range(0, group, 2):
                    # The last of an odd number has a partner that nobody looks at.
                    total = totals + head * num_parts * dim * 4
                    partner = total + num_parts * dim * 4 if head + 1 < group else unused
                    weights = floats_at(weights_at + head * _BLOCK * 4)
                    _add_weighted(floats_at(total), floats_at(partner), weights, values, num_rows, dim)
        if items_per_head > 1:
            continue
        for head in range(group):
            place = head * num_parts * 4
            _join(
                num_parts,
                dim,
                floats_at(own_maxima + place),
                floats_at(own_sums + place),
                own_totals + place * dim,
                floats_at(step.out + (first_head + head) * dim * 4),
            )


def _join_parts(params: int, start: int, stop: int, scratch: int) -> None:
    step = _attention_at(params)
    dim, num_parts = step.dim, step.num_parts
    if step.parts_per_item == num_parts:
        return
    for item in range(start, stop):
        place = item * num_parts * 4
        _join(
            num_parts,
            dim,
            floats_at(step.part_maxima + place),
            floats_at(step.part_sums + place),
            step.part_values + place * dim,
            floats_at(step.out + item * dim * 4),
        )


def _gate_heads(params: int, start: int, stop: int, scratch: int) -> None:
    step = _gated_at(params)
    dim = step.dim
    for item in range(start, stop):
        values, gate = (
            floats_at(step.values + item * dim * 4),
            floats_at(step.queries + (2 * item + 1) * dim * 4),
        )
        for i in range(dim):
            values[i] *= sigmoid(gate[i])


@functools.cache
def append_heads_task() -> int:
    """Params `APPENDED`, items the kv heads of all tokens: keys, normed and rotated, and values into the
    caches."""
    return compile_task(_append_heads, "append_heads")


@functools.cache
def attend_parts_task() -> int:
    """Params `ATTENTION`, items the parts of the kv heads of all tokens."""
    return compile_task(_attend_parts, "attend_parts")


@functools.cache
def join_parts_task() -> int:
    """Params `ATTENTION`, items the query heads of all tokens."""
    return compile_task(_join_parts, "join_parts")


@functools.cache
def gate_heads_task() -> int:
    """Params `GATED`, items the query heads of all tokens: the output gate, in place."""
    return compile_task(_gate_heads, "gate_heads")


class Attention:
    """The token mixer of one attention layer."""

    def __init__(self, weights: Weights, layer: int, config: Qwen4ExpConfig, rotation: RotationTable) -> None:
        prefix = block_prefix(layer)
        self._layer = layer
        self._config = config
        self._rotation = rotation
        self._query = weights.matrix(f"{prefix}attn_q.weight")
        self._key = weights.matrix(f"{prefix}attn_k.weight")
        self._value = weights.matrix(f"{prefix}attn_v.weight")
        self._out = weights.matrix(f"{prefix}attn_output.weight")
        self._query_norm = weights.floats(f"{prefix}attn_q_norm.weight")
        self._key_norm = weights.floats(f"{prefix}attn_k_norm.weight")
        # A ratio of 0 means dense attention; the indexer's tensors are then carried along unused.
        self.indexer = Indexer(weights, layer, config, rotation) if config.compress_ratios[layer] else None

    def build(self, workspace: Workspace, spans: StepSpans) -> None:
        """Takes its buffers."""
        config = self._config
        heads, width = config.num_query_heads, config.num_query_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self._spans = spans
        self._x = workspace.plane("x", config.hidden)
        self._queries = workspace.floats("queries", 2 * width)
        self._keys, self._values = workspace.floats("keys", kv_width), workspace.floats("values", kv_width)
        self._mixed = workspace.plane("attended", width)
        self._output = workspace.floats("output", config.hidden)
        self._parts = (
            workspace.floats("part values", width, spans.max_parts),
            workspace.floats("part maxima", heads, spans.max_parts),
            workspace.floats("part sums", heads, spans.max_parts),
        )
        self._records = SpanRecords(ATTENTION_SPAN, workspace.capacity)
        self._snapshots = SnapshotRecords(INDEXER_SNAPSHOT)
        self._attending: list[Record] = []
        # Whose fields `_FORMATS` are set once a state says what they are.
        self._of_rows: list[Record] = []
        self._format: KvFormat | None = None
        if self.indexer is not None:
            self.indexer.build(workspace, spans, self._records.records)

    def emit_heads(self, script: Script, *, chooses: bool) -> None:
        """Appends what comes before the attention itself, from the plane `x`. `chooses`: whether some token
        of the step does not see all blocks."""
        config, indexer = self._config, self.indexer
        products = [(self._query, self._queries), (self._key, self._keys), (self._value, self._values)]
        if indexer is not None:
            products += indexer.products(chooses=chooses)
        multiply(script, self._x, *products)
        script.barrier()
        queries = record(
            NORMED_HEADS,
            spans=self._records.records,
            token_spans=self._spans.of_tokens,
            heads=self._queries,
            norm=self._query_norm,
            rotation=self._rotation.record,
            num_heads=config.num_query_heads,
            stride=2 * config.head_dim,
            dim=config.head_dim,
            epsilon=config.rms_epsilon,
        )
        appended = record(
            APPENDED,
            spans=self._records.records,
            token_spans=self._spans.of_tokens,
            keys=self._keys,
            values=self._values,
            norm=self._key_norm,
            rotation=self._rotation.record,
            num_heads=config.num_kv_heads,
            dim=config.head_dim,
            epsilon=config.rms_epsilon,
        )
        self._of_rows.append(appended)
        head_ns = 1.0 * config.head_dim
        script.add(normalise_heads_task(), queries, per_token=config.num_query_heads, ns=head_ns, keep=self)
        script.add(append_heads_task(), appended, per_token=config.num_kv_heads, ns=head_ns, keep=self)
        if indexer is not None:
            indexer.emit_heads(script, chooses=chooses)
        script.barrier()
        if indexer is not None and chooses:
            indexer.emit_scores(script)

    def emit_attention(self, script: Script) -> Written:
        """Appends the attention itself, and what follows; blocks are chosen by then. What the layer leaves to
        be written."""
        config, indexer = self._config, self.indexer
        part_values, part_maxima, part_sums = self._parts
        params = record(
            ATTENTION,
            spans=self._records.records,
            token_spans=self._spans.of_tokens,
            queries=self._queries,
            part_values=part_values,
            part_maxima=part_maxima,
            part_sums=part_sums,
            out=self._mixed.floats,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            num_parts=NUM_PARTS,
        )
        if indexer is not None:
            params["chosen"] = address_of(indexer.chosen)
            params["num_kept"], params["ratio"] = indexer.choice.num_kept, indexer.choice.ratio
        self._attending.append(params)
        self._of_rows.append(params)
        script.add(
            attend_parts_task(),
            params,
            per_part=config.num_kv_heads,
            ns=100,
            ns_per_position=0.2 * config.num_query_heads / config.num_kv_heads * config.head_dim,
            keep=(self, indexer.chosen if indexer is not None else None),
        )
        script.barrier()
        heads = config.num_query_heads
        script.add(join_parts_task(), params, per_token=heads, ns=2.0 * config.head_dim, keep=self)
        script.barrier()
        gated = record(GATED, values=self._mixed.floats, queries=self._queries, dim=config.head_dim)
        script.add(gate_heads_task(), gated, per_token=heads, ns=1.0 * config.head_dim, keep=self)
        script.barrier()
        multiply(script, self._mixed, (self._out, self._output))
        script.barrier()
        return Written(self._output)

    def _take_format(self, kv_format: KvFormat) -> None:
        """How rows are kept, which is the same for all sequences of a model."""
        self._format, dim = kv_format, self._config.head_dim
        for params in self._of_rows:
            for rows, name in ((kv_format.keys, "key"), (kv_format.values, "value")):
                params[f"{name}_format"], params[f"{name}_bytes"] = rows.number, rows.row_bytes(dim)

    def choose(self) -> None:
        """The choice of blocks, in a step where `begin` says that there is one."""
        assert self.indexer is not None
        self.indexer.choose()

    def begin(self) -> bool:
        """Takes the spans of the next step. Whether some of their tokens choose blocks."""
        indexer, step = self.indexer, self._spans
        last_position = 0
        self._snapshots.begin()
        for number, span in enumerate(step.all):
            state, position = span.state, span.position
            attention = state.attention[self._layer]
            store, ring = attention.store, attention.raw_keys
            last_position = max(last_position, position + span.num_tokens - 1)
            if store.format is not self._format:
                self._take_format(store.format)
            self._records.put(
                number,
                (
                    span.start,
                    span.num_tokens,
                    position,
                    address_of(state.page_numbers),
                    state.page_tokens,
                    store.keys.data_ptr(),
                    store.values.data_ptr(),
                    store.block_keys.data_ptr(),
                    ring.data_ptr(),
                    len(ring),
                    *self._snapshots.put(
                        [
                            (cut, snapshot.raw_keys[self._layer].data_ptr())
                            for cut, snapshot in zip(span.cuts, span.snapshots, strict=True)
                        ]
                    ),
                ),
            )
        for params in self._attending:
            params["parts_per_item"] = NUM_PARTS // step.parts_per_token
        if indexer is None or not indexer.choice.drops_blocks(last_position):
            return False
        indexer.begin((last_position + 1) // indexer.choice.ratio)
        return True
