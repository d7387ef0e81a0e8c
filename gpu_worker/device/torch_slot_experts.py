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
"""Of the matrices that are decoded at a time, unless a single one is larger. Decoding takes about as much
again for each step that the format has, up to four times; ten experts of the real model fit, which are those
of one token."""
_MOST_PADDED_ROUTES = 32
"""An expert with more routes is multiplied by itself: it keeps a device busy, and would be padding for all
others."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Groups `first` to `stop` - 1, each with `num_routes` routes once they are padded."""

    first: int
    stop: int
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
            chosen = buffers[batch.first : batch.stop]
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


def _batches(
    layout: SlotLayout,
    starts: Sequence[int],
    route_tokens: NDArray[np.int32],
    route_weights: NDArray[np.float32],
) -> Iterator[_Batch]:
    """Neighbouring groups that are computed together; groups without routes are left out."""
    largest = max(part.num_rows * part.width for part in (layout.gate, layout.up, layout.down))
    most_groups = max(1, DECODED_BYTES // (largest * 4))
    sizes = [stop - start for start, stop in pairwise(starts)]
    first = 0
    while first < len(sizes):
        stop = first + 1
        if 0 < sizes[first] <= _MOST_PADDED_ROUTES:
            while stop < min(len(sizes), first + most_groups) and 0 < sizes[stop] <= _MOST_PADDED_ROUTES:
                stop += 1
        if sizes[first]:
            yield _padded(first, stop, starts, route_tokens, route_weights)
        first = stop


def _padded(
    first: int,
    stop: int,
    starts: Sequence[int],
    route_tokens: NDArray[np.int32],
    route_weights: NDArray[np.float32],
) -> _Batch:
    begins = np.asarray(starts[first:stop], np.int32)[:, None]
    ends = np.asarray(starts[first + 1 : stop + 1], np.int32)[:, None]
    num_routes = int((ends - begins).max())
    routes = begins + np.arange(num_routes, dtype=np.int32)
    is_padding = (routes >= ends).reshape(-1)
    routes = np.minimum(routes, ends - 1).reshape(-1)
    tokens = route_tokens[routes]
    weights = np.where(is_padding, np.float32(0), route_weights[routes])
    summed_tokens, summed_routes = _by_token(tokens, np.flatnonzero(~is_padding))
    return _Batch(first, stop, num_routes, tokens, summed_tokens, summed_routes, weights)


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
