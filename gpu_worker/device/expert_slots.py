"""What a slot of the device's memory holds, one expert, and what a device computes from it.

::

    slot:    | gate | up | down |      encoded rows, as in the file; each from a 64-byte border on

Whoever places experts fills slots (`gpu_worker.device.memory`) and says which routes lead to which; who
computes them knows slots only (`CpuSlotExperts`, `TorchSlotExperts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared import quants
from shared.expert_blobs import expert_tensor
from shared.gguf.model import GGUFModel
from shared.placement.sizes import PART_ALIGNMENT, SLOT_ALIGNMENT, rounded_up
from shared.quants import BlockFormat
from shared.work_slots import PARTS


class DeviceExperts(Protocol):
    """The routed experts of a model that are in slots of the device."""

    def slot_bytes(self, layer: int) -> int:
        """Of a slot for any expert of the layer, a multiple of `SLOT_ALIGNMENT`."""

    def part_offsets(self, layer: int) -> tuple[int, int, int]:
        """Where gate, up and down begin in it."""

    def work_bytes(self, num_tokens: int) -> int:
        """Memory of the device that `compute` takes for the time it runs, beside slots, x and out, with so
        many tokens at most, of which each comes once in a group."""

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
        """Adds experts' weighted outputs to `out`: for each group g, and each of its routes r,
        out[token of r] += weight of r * down_g(silu(gate_g x) * (up_g x)), x of that token.

        Group g is the expert in buffers[g], uint8 [slot_bytes] on the device, and has the routes starts[g] to
        starts[g + 1] - 1: `starts` has one more entry than `buffers`. `route_tokens` [routes] and
        `route_weights` [routes] lie in host memory and may be changed after the call; x and out, float32
        [tokens, hidden], on the device. What it issues is compute in the sense of
        `gpu_worker.device.memory`. The order of a token's sum depends on the arguments alone, so results
        are repeatable. Raises ValueError for shapes that do not fit.
        """


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One matrix of the experts of a layer: its shape, and where it lies in a slot."""

    format: BlockFormat
    num_rows: int
    row_bytes: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_rows * self.row_bytes

    @property
    def width(self) -> int:
        """Weights of a row."""
        return self.row_bytes // self.format.type.block_bytes * self.format.type.block_size

    def raw(self, buffer: Tensor) -> Tensor:
        """The matrix in a slot: uint8 [rows, row_bytes]."""
        end = self.offset + self.num_bytes
        return buffer[self.offset : end].view(self.num_rows, self.row_bytes)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The slots of one layer."""

    gate: SlotPart
    up: SlotPart
    down: SlotPart
    num_bytes: int

    @property
    def part_offsets(self) -> tuple[int, int, int]:
        """Of gate, up and down."""
        return self.gate.offset, self.up.offset, self.down.offset

    @property
    def hidden(self) -> int:
        """The width of what experts read and write."""
        return self.down.num_rows

    @classmethod
    def of(cls, model: GGUFModel, layer: int) -> "SlotLayout":
        """That of a model's layer."""
        parts, at = [], 0
        for name in PARTS:
            info = model.info(expert_tensor(layer, name))
            _, num_rows, width = info.shape
            at = rounded_up(at, PART_ALIGNMENT)
            part = SlotPart(quants.block_format(info.type.type_id), num_rows, info.type.row_bytes(width), at)
            parts.append(part)
            at += part.num_bytes
        gate, up, down = parts
        return cls(gate, up, down, rounded_up(at, SLOT_ALIGNMENT))

    def check(
        self,
        buffers: Sequence[Tensor],
        starts: Sequence[int],
        route_tokens: NDArray[np.int32],
        route_weights: NDArray[np.float32],
        x: Tensor,
        out: Tensor,
    ) -> None:
        """Raises ValueError for arguments of `DeviceExperts.compute` that do not fit each other: code that
        runs on slots checks no bounds."""
        num_routes = len(route_tokens)
        if x.dim() != 2 or x.shape[1] != self.hidden or out.shape != x.shape or not out.is_contiguous():
            raise ValueError(f"x {list(x.shape)} and out {list(out.shape)} for a width of {self.hidden}")
        if not x.dtype == out.dtype == torch.float32:
            raise ValueError(f"x {x.dtype} and out {out.dtype}, which are to be float32")
        if route_weights.shape != (num_routes,) or route_weights.dtype != np.float32:
            raise ValueError(f"weights {route_weights.dtype} {route_weights.shape} of {num_routes} routes")
        if route_tokens.dtype != np.int32:
            raise ValueError(f"tokens of routes are {route_tokens.dtype}, and are to be int32")
        if len(starts) != len(buffers) + 1 or starts[0] != 0 or starts[-1] != num_routes:
            raise ValueError(f"groups of routes that begin at {list(starts)} for {num_routes} routes")
        if any(first > behind for first, behind in pairwise(starts)):
            raise ValueError(f"groups of routes that begin at {list(starts)}, which is not in order")
        if num_routes and not 0 <= int(route_tokens.min()) <= int(route_tokens.max()) < len(x):
            raise ValueError(f"routes of token {route_tokens.min()} to {route_tokens.max()} of {len(x)}")
        for buffer in buffers:
            if buffer.nbytes < self.num_bytes:
                raise ValueError(f"a slot of {buffer.nbytes} bytes for an expert of {self.num_bytes}")


class Slots:
    """The layouts of all layers: what `DeviceExperts` of every kind say of their slots."""

    def __init__(self, model: GGUFModel, num_layers: int) -> None:
        self.layouts = [SlotLayout.of(model, layer) for layer in range(num_layers)]

    def slot_bytes(self, layer: int) -> int:
        """As `DeviceExperts` says."""
        return self.layouts[layer].num_bytes

    def part_offsets(self, layer: int) -> tuple[int, int, int]:
        """As `DeviceExperts` says."""
        return self.layouts[layer].part_offsets
