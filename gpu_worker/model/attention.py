"""Gated attention with partial rotary embedding, dense or restricted to the blocks the indexer keeps."""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.hyper_connection import rms_norm
from gpu_worker.model.indexer import Indexer
from gpu_worker.model.rotary import Rotary
from gpu_worker.state.sequence_state import AttentionState
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix

# Queries of a long prompt are taken in groups, so that masks and scores stay this small (elements).
_MAX_SCORES = 32 * 2**20


class Attention:
    """The token mixer of one attention layer."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        prefix = block_prefix(layer)
        self._layer = layer
        self._config = config
        self._rotary = rotary
        self._query = device.linear(f"{prefix}attn_q.weight")
        self._key = device.linear(f"{prefix}attn_k.weight")
        self._value = device.linear(f"{prefix}attn_v.weight")
        self._out = device.linear(f"{prefix}attn_output.weight")
        self._query_norm = device.tensor(f"{prefix}attn_q_norm.weight")
        self._key_norm = device.tensor(f"{prefix}attn_k_norm.weight")
        # A ratio of 0 means dense attention; the indexer's tensors are then carried along unused.
        self._indexer = Indexer(device, layer, config, rotary) if config.compress_ratios[layer] else None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; appends to the cache of every sequence in the batch."""
        config = self._config
        kv_shape = (-1, config.num_kv_heads, config.head_dim)
        # Each query head's rows hold its query, then its gate.
        query, gate = self._query(x).view(-1, config.num_query_heads, 2, config.head_dim).unbind(2)
        query = self._rotary(rms_norm(query, self._query_norm, config.rms_epsilon), batch.positions)
        key = rms_norm(self._key(x).view(kv_shape), self._key_norm, config.rms_epsilon)
        key = self._rotary(key, batch.positions)
        value = self._value(x).view(kv_shape)
        index_keys = self._indexer.project_keys(x) if self._indexer is not None else None
        outputs = []
        for span in batch.spans:
            rows = slice(span.start, span.stop)
            state = span.state.attention[self._layer]
            state.keys.append(key[rows])
            state.values.append(value[rows])
            if self._indexer is not None and index_keys is not None:
                self._indexer.append_keys(index_keys[rows], state)
            outputs.append(self._attend(query[rows], x[rows], batch.positions[rows], span, state))
        mixed = torch.cat(outputs) * torch.sigmoid(gate)
        return self._out(mixed.flatten(1))

    def _attend(
        self, query: Tensor, x: Tensor, positions: Tensor, span: Span, state: AttentionState
    ) -> Tensor:
        """One sequence's queries [tokens, heads, dim] over its cache -> [tokens, heads, dim]."""
        first = span.state.position
        indexer = self._indexer
        if indexer is None or not indexer.drops_blocks(first + span.num_tokens - 1):
            return self._dense(query, first, state)
        index_queries = indexer.queries(x, positions)
        if span.num_tokens == 1:
            (blocks,) = indexer.kept_blocks(index_queries, first, state)
            return self._gathered(query, self._seen(blocks, first, indexer.ratio), state)
        return self._masked(query, index_queries, first, indexer, state)

    def _dense(self, query: Tensor, first: int, state: AttentionState) -> Tensor:
        """Every query sees all positions up to its own."""
        num_queries = len(query)
        if num_queries == 1:
            return _softmax_attention(query, state.keys.rows, state.values.rows, None)
        outputs = []
        step = self._queries_per_group(state.keys.length)
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            seen = first + stop
            own = torch.arange(first + start, seen, device=query.device)
            mask = torch.arange(seen, device=query.device) <= own[:, None]
            outputs.append(
                _softmax_attention(query[start:stop], state.keys.rows[:seen], state.values.rows[:seen], mask)
            )
        return torch.cat(outputs)

    @staticmethod
    def _seen(blocks: Tensor, position: int, ratio: int) -> Tensor:
        """The positions in the kept blocks and in the tail after the last complete block."""
        members = blocks.sort().values[:, None] * ratio + torch.arange(ratio, device=blocks.device)
        tail = torch.arange((position + 1) // ratio * ratio, position + 1, device=blocks.device)
        return torch.cat([members.flatten(), tail])

    @staticmethod
    def _gathered(query: Tensor, seen: Tensor, state: AttentionState) -> Tensor:
        """One query over a few positions: the cost does not grow with the context."""
        keys, values = state.keys.rows.index_select(0, seen), state.values.rows.index_select(0, seen)
        return _softmax_attention(query, keys, values, None)

    def _masked(
        self, query: Tensor, index_queries: Tensor, first: int, indexer: Indexer, state: AttentionState
    ) -> Tensor:
        """Many queries, each over its own positions, by masks over the whole cache."""
        outputs = []
        num_queries, length = len(query), state.keys.length
        step = self._queries_per_group(length)
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            mask = torch.zeros(stop - start, length, dtype=torch.bool, device=query.device)
            kept = indexer.kept_blocks(index_queries[start:stop], first + start, state)
            for row, blocks in enumerate(kept):
                mask[row, self._seen(blocks, first + start + row, indexer.ratio)] = True
            outputs.append(_softmax_attention(query[start:stop], state.keys.rows, state.values.rows, mask))
        return torch.cat(outputs)

    def _queries_per_group(self, length: int) -> int:
        return max(1, _MAX_SCORES // (self._config.num_query_heads * length))


def _softmax_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """query [n, heads, dim], keys and values [m, kv heads, dim], mask [n, m] true where seen ->
    [n, heads, dim]. Query head h reads kv head h * kv_heads // heads.
    """
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
