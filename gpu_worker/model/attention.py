"""Gated attention with partial rotary embedding, dense or restricted to the blocks the indexer keeps."""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.hyper_connection import rms_norm
from gpu_worker.model.indexer import Indexer
from gpu_worker.model.rotary import Rotary, Rotation
from gpu_worker.state.pages import LayerStore
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
        self._query = device.linear(f"{prefix}attn_q.weight")
        self._key = device.linear(f"{prefix}attn_k.weight")
        self._value = device.linear(f"{prefix}attn_v.weight")
        self._out = device.linear(f"{prefix}attn_output.weight")
        self._query_norm = device.tensor(f"{prefix}attn_q_norm.weight")
        self._key_norm = device.tensor(f"{prefix}attn_k_norm.weight")
        # A ratio of 0 means dense attention; the indexer's tensors are then carried along unused.
        self._indexer = Indexer(device, layer, config, rotary) if config.compress_ratios[layer] else None

    def __call__(self, x: Tensor, batch: Batch, rotation: Rotation) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; appends to the cache of every sequence in the batch.
        `rotation` is that of the batch's tokens."""
        config = self._config
        kv_shape = (-1, config.num_kv_heads, config.head_dim)
        # Each query head's rows hold its query, then its gate.
        query, gate = self._query(x).view(-1, config.num_query_heads, 2, config.head_dim).unbind(2)
        query = rotation(rms_norm(query, self._query_norm, config.rms_epsilon))
        key = rotation(rms_norm(self._key(x).view(kv_shape), self._key_norm, config.rms_epsilon))
        value = self._value(x).view(kv_shape)
        index_keys = self._indexer.project_keys(x) if self._indexer is not None else None
        outputs = []
        for span in batch.spans:
            rows = slice(span.start, span.stop)
            store = span.state.attention[self._layer].store
            first = span.position
            places = span.state.rows(first + span.num_tokens)[first:]
            store.put(places, key[rows], value[rows])
            if self._indexer is not None and index_keys is not None:
                self._indexer.append_keys(index_keys[rows], span)
            outputs.append(self._attend(query[rows], x[rows], rotation.rows(rows), span, store))
        mixed = torch.cat(outputs) * torch.sigmoid(gate)
        return self._out(mixed.flatten(1))

    def _attend(self, query: Tensor, x: Tensor, rotation: Rotation, span: Span, store: LayerStore) -> Tensor:
        """One sequence's queries [tokens, heads, dim] over its cache -> [tokens, heads, dim]."""
        first, indexer = span.position, self._indexer
        index_queries = None
        if indexer is not None and indexer.drops_blocks(first + span.num_tokens - 1):
            index_queries = indexer.queries(x, rotation)
        if span.num_tokens > 1:
            return self._many(query, index_queries, span, store)
        rows = span.state.rows(first + 1)
        if indexer is not None and index_queries is not None:
            # Only those, so that the cost does not grow with the context.
            rows = rows[indexer.seen_positions(index_queries, span)]
        return one_query_attention(query, store.keys_of(rows), store.values_of(rows))

    def _many(self, query: Tensor, index_queries: Tensor | None, span: Span, store: LayerStore) -> Tensor:
        """The queries of a span, each over its own positions by a mask: all up to its own, or where there are
        `index_queries` those that the indexer keeps."""
        outputs = []
        first = span.position
        rows = span.state.rows(first + span.num_tokens)
        keys, values = store.keys_of(rows), store.values_of(rows)
        step = max(1, _MAX_SCORES // (self._config.num_query_heads * len(rows)))
        for start in range(0, len(query), step):
            stop = min(start + step, len(query))
            length = first + stop
            if self._indexer is not None and index_queries is not None:
                mask = self._indexer.seen_mask(index_queries[start:stop], first + start, span.state)
            else:
                positions = torch.arange(length, device=query.device)
                mask = positions <= positions[first + start :, None]
            outputs.append(masked_attention(query[start:stop], keys[:length], values[:length], mask))
        return torch.cat(outputs)


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """query [n, heads, dim], keys and values [m, kv heads, dim], mask [n, m] true where seen ->
    [n, heads, dim]. Query head h reads kv head h * kv_heads // heads.

    The kv heads are the batch, and the query heads that share one are its heads, which read one view of it.
    `enable_gqa` would be the plainer way; on CUDA it leaves, in float32, only the implementation that first
    repeats keys and values for every query head.
    """
    num_queries, num_heads, head_dim = query.shape
    group_size = num_heads // keys.shape[1]
    attended = functional.scaled_dot_product_attention(
        query.view(num_queries, -1, group_size, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
        values.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1),
        attn_mask=mask,
    )
    return attended.permute(2, 0, 1, 3).reshape(query.shape)


def one_query_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As above for one query that sees everything: query [1, heads, dim] -> [1, heads, dim].

    The query heads that share a kv head are taken together, so that each key is read once. torch's function
    reads it for every head: with 12 heads to a kv head it takes 3 to 5 times as long.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    grouped = query.reshape(num_kv_heads, -1, head_dim) * head_dim**-0.5
    weights = torch.matmul(grouped, keys.permute(1, 2, 0)).softmax(-1)
    return torch.matmul(weights, values.transpose(0, 1)).view(query.shape)
