"""The QSA indexer as tasks: keys of blocks, queries, scores (`gpu_worker.model.indexer` has the formulas).

Which blocks are kept is torch's choice here too: scores of exactly zero are common, and only the same
function breaks their ties in the same way.
"""

import functools

import numpy as np
import torch

from gpu_worker.model.indexer import BlockChoice
from gpu_worker.native.attention_span import SNAPSHOT_BYTES, SPAN_BYTES, row_of, snapshot_at, span_at
from gpu_worker.native.rotation import RotationTable, rotate
from gpu_worker.native.script import Script
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Floats, Matrix, Workspace
from shared.model_config import Qwen4ExpConfig
from shared.native.arithmetic import Pointer, dot, sum_of_squares
from shared.native.memory import floats_at, integers_at, load
from shared.native.records import Record, fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import compile_task, jitable
from shared.tensor_catalog import block_prefix

INDEX_KEYS = fields(
    "spans",  # ATTENTION_SPAN [num_spans]
    "raw_keys",  # f32 [tokens, dim]
    "norm",  # f32 [dim]
    "rotation",  # a ROTATION
    "ratio",
    "dim",
    epsilon=np.float32,
)
NORMED_HEADS = fields(
    "spans",
    "token_spans",  # i64 [tokens]
    "heads",  # f32 [tokens, num_heads, stride], changed in place
    "norm",  # f32 [dim]
    "rotation",
    "num_heads",
    "stride",
    "dim",
    epsilon=np.float32,
)
SCORES = fields(
    "spans",
    "token_spans",
    "queries",  # f32 [tokens, num_heads, dim]
    "scores",  # f32 [tokens, stride]
    "stride",
    "ratio",
    "num_heads",
    "dim",
    "num_parts",  # of the context of each token
)

_index_keys_at = reader(INDEX_KEYS)
_normed_heads_at = reader(NORMED_HEADS)
_scores_at = reader(SCORES)


@jitable
def normalise(x: Pointer, norm: Pointer, out: Pointer, dim: int, epsilon: np.float32) -> None:
    """out [dim] = x / sqrt(mean(x^2) + epsilon) * norm. Compiled code only; `out` may be `x`."""
    mean = np.divide(sum_of_squares(x, dim), np.float32(dim))
    scale = np.divide(np.float32(1), np.sqrt(mean + epsilon))
    for i in range(dim):
        out[i] = x[i] * scale * norm[i]


def _append_index_keys(params: int, start: int, stop: int, scratch: int) -> None:
    step = _index_keys_at(params)
    dim, ratio = step.dim, step.ratio
    norm = floats_at(step.norm)
    for item in range(start, stop):
        span = span_at(step.spans + item * SPAN_BYTES)
        raw_keys, ring_rows = floats_at(span.raw_keys), span.ring_rows
        next_snapshot, snapshots_end = span.snapshots, span.snapshots + span.num_snapshots * SNAPSHOT_BYTES
        for token in range(span.num_tokens):
            if next_snapshot < snapshots_end and load(next_snapshot) == token:
                copied = floats_at(snapshot_at(next_snapshot).raw_keys)
                for i in range(ring_rows * dim):
                    copied[i] = raw_keys[i]
                next_snapshot += SNAPSHOT_BYTES
            position = span.position + token
            raw_key = floats_at(step.raw_keys + (span.start + token) * dim * 4)
            place = position % ring_rows * dim
            for i in range(dim):
                raw_keys[place + i] = raw_key[i]
            block = position // ratio
            if position - block * ratio + 1 < ratio:
                continue
            row = row_of(span.pages, span.page_tokens // ratio, block)
            key = floats_at(span.block_keys + row * dim * 4)
            # The ring has whole blocks.
            first = block * ratio % ring_rows * dim
            for i in range(dim):
                total = np.float32(0)
                for member in range(ratio):
                    total += raw_keys[first + member * dim + i]
                key[i] = np.divide(total, np.float32(ratio))
            normalise(key, norm, key, dim, step.epsilon)
            rotate(key, block * ratio, step.rotation)


def _normalise_heads(params: int, start: int, stop: int, scratch: int) -> None:
    step = _normed_heads_at(params)
    num_heads = step.num_heads
    norm = floats_at(step.norm)
    for item in range(start, stop):
        token = item // num_heads
        span = span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        head = floats_at(step.heads + item * step.stride * 4)
        normalise(head, norm, head, step.dim, step.epsilon)
        rotate(head, span.position + token - span.start, step.rotation)


def _score_blocks(params: int, start: int, stop: int, scratch: int) -> None:
    step = _scores_at(params)
    dim, num_parts = step.dim, step.num_parts
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for item in range(start, stop):
        token, part = item // num_parts, item % num_parts
        span = span_at(step.spans + integers_at(step.token_spans)[token] * SPAN_BYTES)
        num_blocks = (span.position + token - span.start + 1) // step.ratio
        scores = floats_at(step.scores + token * step.stride * 4)
        for block in range(num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts):
            row = row_of(span.pages, span.page_tokens // step.ratio, block)
            key = floats_at(span.block_keys + row * dim * 4)
            total = np.float32(0)
            for head in range(step.num_heads):
                product = dot(floats_at(step.queries + (token * step.num_heads + head) * dim * 4), key, dim)
                # Not a maximum, which would lose a NaN.
                total += np.float32(0) if product < 0 else product
            scores[block] = total * scale


@functools.cache
def append_index_keys_task() -> int:
    """Params `INDEX_KEYS`, items spans: keeps raw keys, finishes the keys of blocks they complete."""
    return compile_task(_append_index_keys, "append_index_keys")


@functools.cache
def normalise_heads_task() -> int:
    """Params `NORMED_HEADS`, items the heads of all tokens: norm and rotation, in place."""
    return compile_task(_normalise_heads, "normalise_heads")


@functools.cache
def score_blocks_task() -> int:
    """Params `SCORES`, items the parts of the tokens' contexts."""
    return compile_task(_score_blocks, "score_blocks")


class Indexer:
    """Block selection of one attention layer."""

    def __init__(self, weights: Weights, layer: int, config: Qwen4ExpConfig, rotation: RotationTable) -> None:
        prefix = f"{block_prefix(layer)}indexer."
        self.choice = BlockChoice(layer, config)
        self._indexer = config.indexer
        self._epsilon = config.rms_epsilon
        self._rotation = rotation
        self._query = weights.matrix(f"{prefix}q_proj.weight")
        self._key = weights.matrix(f"{prefix}k_proj.weight")
        self._query_norm = weights.floats(f"{prefix}q_norm.weight")
        self._key_norm = weights.floats(f"{prefix}k_norm.weight")

    def build(self, workspace: Workspace, spans: StepSpans, records: Record) -> None:
        """Takes its buffers; `records` are the ATTENTION_SPANs of the layer."""
        dim = self._indexer.head_dim
        self._workspace = workspace
        self._spans = spans
        self._records = records
        self._raw_keys = workspace.floats("index keys", dim)
        self._queries = workspace.floats("index queries", self._indexer.num_heads * dim)
        num_kept = self.choice.num_kept
        self.chosen = workspace.floats(f"{num_kept} chosen blocks", 2 * num_kept).view(np.int64)
        self._scoring = record(
            SCORES,
            spans=records,
            token_spans=spans.of_tokens,
            queries=self._queries,
            ratio=self.choice.ratio,
            num_heads=self._indexer.num_heads,
            dim=dim,
        )

    def products(self, *, chooses: bool) -> list[tuple[Matrix, Floats]]:
        """The products of the plane `x` that it needs, in a step that chooses blocks or in one that does
        not have to."""
        needed = [(self._key, self._raw_keys)]
        return [*needed, (self._query, self._queries)] if chooses else needed

    def emit_heads(self, script: Script, *, chooses: bool) -> None:
        """Appends what follows the products, in one step."""
        dim, num_heads = self._indexer.head_dim, self._indexer.num_heads
        keys = record(
            INDEX_KEYS,
            spans=self._records,
            raw_keys=self._raw_keys,
            norm=self._key_norm,
            rotation=self._rotation.record,
            ratio=self.choice.ratio,
            dim=dim,
            epsilon=self._epsilon,
        )
        script.add(append_index_keys_task(), keys, per_span=1, ns=100, ns_per_token=1.0 * dim, keep=self)
        if not chooses:
            return
        queries = record(
            NORMED_HEADS,
            spans=self._records,
            token_spans=self._spans.of_tokens,
            heads=self._queries,
            norm=self._query_norm,
            rotation=self._rotation.record,
            num_heads=num_heads,
            stride=dim,
            dim=dim,
            epsilon=self._epsilon,
        )
        script.add(normalise_heads_task(), queries, per_token=num_heads, ns=1.0 * dim, keep=self)

    def emit_scores(self, script: Script) -> None:
        """Appends the scores of tokens whose queries and keys are there."""
        num_heads, dim = self._indexer.num_heads, self._indexer.head_dim
        script.add(
            score_blocks_task(),
            self._scoring,
            per_part=1,
            ns=100,
            ns_per_position=0.1 * num_heads * dim / self.choice.ratio,
            keep=self,
        )
        script.barrier()

    def begin(self, num_blocks: int) -> None:
        """Makes room for the scores of so many blocks in the next step."""
        self._scores = self._workspace.at_least("block scores", num_blocks)
        self._scoring["scores"], self._scoring["stride"] = address_of(self._scores), self._scores.shape[1]
        self._scoring["num_parts"] = self._spans.parts_per_token

    def choose(self) -> None:
        """Writes the blocks that each token keeps into `chosen`, where it has to choose."""
        ratio = self.choice.ratio
        for span in self._spans.all:
            token, position = span.start, span.position
            while token < span.stop:
                num_blocks = (position + 1) // ratio
                # All tokens up to the one that completes the next block see as many.
                num_alike = min((num_blocks + 1) * ratio - 1 - position, span.stop - token)
                if num_blocks > self.choice.num_kept:
                    rows = slice(token, token + num_alike)
                    scores = torch.from_numpy(self._scores[rows, :num_blocks])
                    self.chosen[rows] = self.choice.best_of(scores).numpy()
                token += num_alike
                position += num_alike
