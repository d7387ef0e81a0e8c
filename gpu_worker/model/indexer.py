"""The QSA indexer: which blocks of earlier positions a query attends to.

Positions are cut into blocks of `ratio` from the start of the sequence. A block that is complete has one
pooled key. A query scores the blocks that are complete up to and including its own position, keeps the best
`token_budget / ratio` of them, and also sees the positions after the last complete block. As long as no block
has to be dropped this is ordinary causal attention.
"""

import torch
from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Span
from gpu_worker.model.hyper_connection import rms_norm
from gpu_worker.model.rotary import Rotary, Rotation
from gpu_worker.state.sequence_state import SequenceState
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix


class BlockChoice:
    """Which blocks are kept, in a layer of some compress ratio; knows no weights."""

    def __init__(self, layer: int, config: Qwen4ExpConfig) -> None:
        self._layer = layer
        self.ratio = config.compress_ratios[layer]
        self.num_kept = config.indexer.token_budget // self.ratio
        self._head_dim = config.indexer.head_dim

    def drops_blocks(self, position: int) -> bool:
        """Whether a query at this position sees less than everything before it."""
        return (position + 1) // self.ratio > self.num_kept

    def _block_keys(self, num_blocks: int, state: SequenceState) -> Tensor:
        """The keys of the first blocks: [blocks, indexer dim]."""
        return state.attention[self._layer].store.block_keys[state.block_rows(num_blocks, self.ratio)]

    def seen_positions(self, queries: Tensor, span: Span) -> Tensor:
        """The positions that the query [1, heads, indexer dim] of a span of one token sees: int64, rising."""
        position = span.position
        num_blocks = (position + 1) // self.ratio
        blocks = self._best_blocks(queries, self._block_keys(num_blocks, span.state)).flatten().sort().values
        members = blocks[:, None] * self.ratio + torch.arange(self.ratio, device=blocks.device)
        tail = torch.arange(num_blocks * self.ratio, position + 1, device=blocks.device)
        return torch.cat([members.flatten(), tail])

    def seen_mask(self, queries: Tensor, first_position: int, state: SequenceState) -> Tensor:
        """What queries [n, heads, indexer dim] at consecutive positions from `first_position` on see: true
        where a query sees a position, [n, first_position + n]."""
        num_queries, device = len(queries), queries.device
        length = first_position + num_queries
        is_kept = torch.zeros(num_queries, length // self.ratio + 1, dtype=torch.bool, device=device)
        block_keys = self._block_keys(length // self.ratio, state)
        start = 0
        while start < num_queries:
            num_blocks = (first_position + start + 1) // self.ratio
            # All queries up to the one that completes the next block see as many.
            stop = min(num_queries, (num_blocks + 1) * self.ratio - 1 - first_position)
            best = self._best_blocks(queries[start:stop], block_keys[:num_blocks])
            is_kept[start:stop].scatter_(1, best, True)
            # The positions after the last complete block, as far as the query's own.
            is_kept[start:stop, num_blocks] = True
            start = stop
        positions = torch.arange(length, device=device)
        is_kept_position = is_kept.repeat_interleave(self.ratio, dim=1)[:, :length]
        return is_kept_position & (positions <= positions[first_position:, None])

    def _best_blocks(self, queries: Tensor, block_keys: Tensor) -> Tensor:
        """The blocks that queries which see just these keep: int64 [queries, at most num_kept].

        Scores of exactly zero, where every head is negative, are common, and which of them is kept is not
        defined. Here it is what `torch.topk` takes from a list of just the complete blocks, as in the
        reference implementation.
        """
        products = torch.einsum("qhd,bd->qbh", queries, block_keys)
        return self.best_of(products.relu().sum(-1) * self._head_dim**-0.5)

    def best_of(self, scores: Tensor) -> Tensor:
        """As above, from the scores [queries, complete blocks]."""
        best: Tensor = scores.topk(min(self.num_kept, scores.shape[-1]), dim=-1).indices
        return best


class Indexer(BlockChoice):
    """Block selection of one attention layer."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig, rotary: Rotary) -> None:
        super().__init__(layer, config)
        prefix = f"{block_prefix(layer)}indexer."
        self._num_heads = config.indexer.num_heads
        self._epsilon = config.rms_epsilon
        self._rotary = rotary
        self._query = device.linear(f"{prefix}q_proj.weight")
        self._key = device.linear(f"{prefix}k_proj.weight")
        self._query_norm = device.tensor(f"{prefix}q_norm.weight")
        self._key_norm = device.tensor(f"{prefix}k_norm.weight")

    def project_keys(self, x: Tensor) -> Tensor:
        """Raw keys of tokens x [tokens, hidden]: [tokens, indexer dim]."""
        return self._key(x)

    def append_keys(self, raw_keys: Tensor, span: Span) -> None:
        """Takes the raw keys of the tokens of a span; finishes the pooled key of every block they
        complete."""
        state = span.state
        attention, first = state.attention[self._layer], span.position
        ring = attention.raw_keys
        num_blocks = first // self.ratio
        is_open = torch.arange(num_blocks * self.ratio, first, device=ring.device) % len(ring)
        waiting = torch.cat([ring[is_open], raw_keys])
        num_complete = len(waiting) // self.ratio
        if num_complete:
            members = waiting[: num_complete * self.ratio].view(num_complete, self.ratio, self._head_dim)
            pooled = rms_norm(members.mean(1), self._key_norm, self._epsilon)
            blocks = torch.arange(num_blocks, num_blocks + num_complete, device=pooled.device)
            rows = state.block_rows(num_blocks + num_complete, self.ratio)[num_blocks:]
            attention.store.block_keys[rows] = self._rotary.at(blocks * self.ratio)(pooled[:, None])[:, 0]
        for number, snapshot in zip(span.cuts, span.snapshots, strict=True):
            snapshot.raw_keys[self._layer].copy_(ring)
            _put(snapshot.raw_keys[self._layer], raw_keys[:number], first + number)
        _put(ring, raw_keys, first + len(raw_keys))

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Indexer queries of tokens x [tokens, hidden]: [tokens, heads, indexer dim]."""
        heads = self._query(x).view(-1, self._num_heads, self._head_dim)
        return rotation(rms_norm(heads, self._query_norm, self._epsilon))


def _put(ring: Tensor, raw_keys: Tensor, stop: int) -> None:
    """Raw keys of the positions up to `stop`, as far as they have room."""
    kept = raw_keys[-len(ring) :]
    ring[torch.arange(stop - len(kept), stop, device=ring.device) % len(ring)] = kept
