"""Experts in slots of any torch device, CUDA above all: decoded there to float32, a few at a time.

Encoded bytes stay as they are in the slots; a decoded matrix lives for one product. Experts with few routes
are multiplied together, their routes padded to the same number, since a device is not busy with one of them.
Products are float32 ones, as everywhere on a torch device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.expert_slots import SlotLayout, SlotPart, Slots
from gpu_worker.device.host_memory import to_device
from gpu_worker.device.torch_decode import decode_blocks
from shared.gguf.model import GGUFModel

DECODED_BYTES = 64 * 2**20
"""Of the matrices that are decoded at a time, unless a single one is larger: ten of the real model's, which
is what one token chooses."""
_DECODING = 4
"""So many times the memory of what is decoded is taken meanwhile, at most (Q3_K)."""
_MOST_PADDED_ROUTES = 32
"""An expert with more routes is multiplied by itself: it keeps a device busy, and would be padding for all
others."""
_MOST_ROUTES = 2048
"""Of an expert at a time: its matrices are decoded again for what is beyond, which is little beside the
products by then, and the memory for activations is bounded."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Routes `start` to `stop` - 1 of a group."""

    group: int
    start: int
    stop: int

    @property
    def num_routes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces of different groups, which have `num_routes` routes each once they are padded."""

    groups: list[int]
    num_routes: int
    # i32 [groups * num_routes]: the token of each route. Padding repeats a route of the same group, so that
    # what is not a number comes from nowhere else.
    tokens: NDArray[np.int32]
    # i32 [distinct tokens], and [distinct tokens, routes of a token]: its routes in the order of the groups,
    # then `groups * num_routes`, which is a row of zeros.
    summed_tokens: NDArray[np.int32]
    summed_routes: NDArray[np.int32]
    # f32 [groups * num_routes].
    weights: NDArray[np.float32]


class TorchSlotExperts(Slots):
    """`gpu_worker.device.expert_slots.DeviceExperts` in torch operations. The host waits for nothing."""

    def __init__(self, model: GGUFModel, num_layers: int, torch_device: torch.device) -> None:
        super().__init__(model, num_layers)
        self._torch_device = torch_device

    def work_bytes(self, num_tokens: int) -> int:
        """As `DeviceExperts` says."""
        return max(_work_bytes(layout, num_tokens) for layout in self.layouts)

    @torch.inference_mode()
    def compute(
        self,
        layer: int,
        buffers: Sequence[Tensor],
        starts: Sequence[int],
        route_tokens: NDArray[np.int32],
        route_weights: NDArray[np.float32],
        x: Tensor,
        out: Tensor,
    ) -> None:
        """As `DeviceExperts` says."""
        layout = self.layouts[layer]
        layout.check(buffers, starts, route_tokens, route_weights, x, out)
        batches = list(_batches(layout, starts, route_tokens, route_weights))
        parts = [
            part
            for batch in batches
            for part in (batch.tokens, batch.summed_tokens, batch.summed_routes, batch.weights)
        ]
        on_device = iter(_uploaded(parts, self._torch_device))
        for batch in batches:
            tokens, summed_tokens, summed_routes = next(on_device), next(on_device), next(on_device)
            weights = next(on_device).view(torch.float32)
            chosen = [buffers[group] for group in batch.groups]
            inputs = x.index_select(0, tokens).view(len(chosen), batch.num_routes, -1)
            results = _experts(layout, chosen, inputs)
            weighted = x.new_zeros((len(tokens) + 1, layout.hidden))
            torch.mul(results.view(len(tokens), -1), weights[:, None], out=weighted[:-1])
            sums = weighted.index_select(0, summed_routes.view(-1))
            sums = sums.view(*summed_routes.shape, -1).sum(1)
            # Tokens are distinct, so no order of additions is left to chance.
            out.index_add_(0, summed_tokens, sums)


def _experts(layout: SlotLayout, buffers: Sequence[Tensor], x: Tensor) -> Tensor:
    """x [groups, routes, hidden] -> [groups, routes, hidden]."""
    gate = _products(layout.gate, buffers, x)
    h = functional.silu(gate, inplace=True).mul_(_products(layout.up, buffers, x))
    return _products(layout.down, buffers, h)


def _products(part: SlotPart, buffers: Sequence[Tensor], x: Tensor) -> Tensor:
    """x [groups, routes, width] -> [groups, routes, rows], each group with the matrix of its own buffer."""
    kind = part.format.type
    raw = torch.stack([part.raw(buffer) for buffer in buffers])
    decoded = decode_blocks(part.format, raw.view(-1, kind.block_bytes))
    return torch.bmm(x, decoded.view(len(buffers), part.num_rows, -1).transpose(1, 2))


def _work_bytes(layout: SlotLayout, num_tokens: int) -> int:
    """What a batch takes at most: weights as they are decoded; and for each of its routes, padding counted, a
    few rows of either width, and as many for each token as experts are added up for it."""
    most_groups, largest_bytes = _most_groups(layout), _largest_bytes(layout)
    padded = most_groups * min(num_tokens, _MOST_PADDED_ROUTES)
    routes = max(padded, min(num_tokens, _MOST_ROUTES))
    rows = routes * (6 * layout.hidden + 3 * layout.gate.num_rows)
    summed = min(num_tokens, padded) * most_groups * layout.hidden
    return _DECODING * most_groups * largest_bytes + 4 * (rows + summed)


def _most_groups(layout: SlotLayout) -> int:
    """How many experts' matrices are decoded at a time."""
    return max(1, DECODED_BYTES // _largest_bytes(layout))


def _largest_bytes(layout: SlotLayout) -> int:
    """Of one decoded matrix."""
    return 4 * max(part.num_rows * part.width for part in (layout.gate, layout.up, layout.down))


def _batches(
    layout: SlotLayout,
    starts: Sequence[int],
    route_tokens: NDArray[np.int32],
    route_weights: NDArray[np.float32],
) -> Iterator[_Batch]:
    """Neighbouring pieces of groups that are computed together."""
    most_groups = _most_groups(layout)
    batch: list[_Piece] = []
    for piece in _pieces(starts):
        is_alone = piece.num_routes > _MOST_PADDED_ROUTES
        if batch and (is_alone or len(batch) == most_groups):
            yield _padded(batch, route_tokens, route_weights)
            batch = []
        batch.append(piece)
        if is_alone:
            yield _padded(batch, route_tokens, route_weights)
            batch = []
    if batch:
        yield _padded(batch, route_tokens, route_weights)


def _pieces(starts: Sequence[int]) -> Iterator[_Piece]:
    """Of all groups; those without routes have none."""
    for group, (start, stop) in enumerate(pairwise(starts)):
        for first in range(start, stop, _MOST_ROUTES):
            yield _Piece(group, first, min(first + _MOST_ROUTES, stop))


def _padded(
    pieces: Sequence[_Piece], route_tokens: NDArray[np.int32], route_weights: NDArray[np.float32]
) -> _Batch:
    begins = np.array([piece.start for piece in pieces], np.int32)[:, None]
    ends = np.array([piece.stop for piece in pieces], np.int32)[:, None]
    num_routes = max(piece.num_routes for piece in pieces)
    routes = begins + np.arange(num_routes, dtype=np.int32)
    is_padding = (routes >= ends).reshape(-1)
    routes = np.minimum(routes, ends - 1).reshape(-1)
    tokens = route_tokens[routes]
    weights = np.where(is_padding, np.float32(0), route_weights[routes])
    summed_tokens, summed_routes = _by_token(tokens, np.flatnonzero(~is_padding))
    groups = [piece.group for piece in pieces]
    return _Batch(groups, num_routes, tokens, summed_tokens, summed_routes, weights)


def _by_token(
    tokens: NDArray[np.int32], real: NDArray[np.intp]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The distinct tokens of the routes `real`, and the routes of each, filled up with len(tokens)."""
    order = real[np.argsort(tokens[real], kind="stable")]
    distinct, begins, counts = np.unique(tokens[order], return_index=True, return_counts=True)
    routes = np.full((len(distinct), int(counts.max())), len(tokens), np.int32)
    rank = np.arange(len(order)) - np.repeat(begins, counts)
    routes[np.repeat(np.arange(len(distinct)), counts), rank] = order
    return distinct, routes


def _uploaded(
    parts: Sequence[NDArray[np.int32] | NDArray[np.float32]], torch_device: torch.device
) -> list[Tensor]:
    """Arrays of 32-bit values on the device, as int32 tensors of their shapes: by one copy, which is not
    waited for."""
    sizes = [part.size for part in parts]
    host = np.concatenate([part.reshape(-1).view(np.int32) for part in parts] or [np.empty(0, np.int32)])
    on_device = torch.split(to_device(torch.from_numpy(host), torch_device), sizes)
    return [flat.view(part.shape) for flat, part in zip(on_device, parts, strict=True)]
