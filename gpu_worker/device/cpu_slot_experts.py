"""Experts in slots of RAM, computed by the kernels of `shared.quants` on a team of threads."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.expert_slots import SlotLayout, SlotPart, Slots
from gpu_worker.device.products import Products
from shared.gguf.model import GGUFModel
from shared.native.team import Team
from shared.quants import BlockFormat


class _LayerProducts:
    """The products of one layer's experts. They are made once and pointed at each slot in turn, which takes
    a few microseconds, where making them would take tens."""

    def __init__(self, layout: SlotLayout, team: Team) -> None:
        self._layout = layout
        # Of no memory yet: pages of an array that is never written do not exist.
        self._gate_up = Products([_nowhere(layout.gate), _nowhere(layout.up)], team)
        self._down = Products([_nowhere(layout.down)], team)

    def __call__(self, buffer: Tensor, x: Tensor) -> Tensor:
        """x [routes, hidden] -> [routes, hidden]."""
        layout = self._layout
        self._gate_up.read_from([layout.gate.raw(buffer).numpy(), layout.up.raw(buffer).numpy()])
        self._down.read_from([layout.down.raw(buffer).numpy()])
        gate, up = self._gate_up(x)
        return self._down(functional.silu(gate, inplace=True).mul_(up))[0]


class CpuSlotExperts(Slots):
    """`gpu_worker.device.expert_slots.DeviceExperts` on the CPU. What is said there of host memory and the
    device's is the same memory here, and compute is done when the call returns."""

    def __init__(self, model: GGUFModel, num_layers: int, team: Team) -> None:
        super().__init__(model, num_layers)
        self._team = team
        self._products: dict[SlotLayout, _LayerProducts] = {}

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
        """As `DeviceExperts` says. Activations are rounded as the kernels want it (`--cpu-activations`)."""
        layout = self.layouts[layer]
        layout.check(buffers, starts, route_tokens, route_weights, x, out)
        products = self._products.get(layout)
        if products is None:
            products = self._products[layout] = _LayerProducts(layout, self._team)
        tokens = torch.from_numpy(route_tokens)
        weights = torch.from_numpy(route_weights)[:, None]
        for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True):
            chosen = tokens[start:stop]
            results = products(buffer, x.index_select(0, chosen))
            out.index_add_(0, chosen, results.mul_(weights[start:stop]))


def _nowhere(part: SlotPart) -> tuple[NDArray[np.uint8], BlockFormat]:
    return np.empty((part.num_rows, part.row_bytes), np.uint8), part.format
