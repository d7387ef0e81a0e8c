"""Experts in slots of RAM, computed by the kernels of `shared.quants` on a team of threads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.expert_slots import SlotLayout, Slots
from gpu_worker.native.moe import multiply_gated_task
from gpu_worker.native.slot_experts import (
    SLOT_LAYER,
    SLOT_WORK,
    SMALLEST_MEMORY,
    add_routes_task,
    compute_slots,
    gather_rows_task,
)
from shared import quants
from shared.gguf.model import GGUFModel
from shared.native.records import Record, record
from shared.native.task import address_of
from shared.native.team import Team


class CpuSlotExperts(Slots):
    """`gpu_worker.device.expert_slots.DeviceExperts` on the CPU: one native call for a layer. What is said
    there of host memory and the device's is the same memory here, and compute is done when the call returns.
    """

    def __init__(self, model: GGUFModel, num_layers: int, team: Team) -> None:
        """Compiles what the experts' formats need, or loads it from the cache."""
        super().__init__(model, num_layers)
        self._team = team
        self._layers = [_record_of(layout) for layout in self.layouts]
        self._work = np.zeros(1, SLOT_WORK)
        # Its fields, which are all int64, to be written in one go.
        self._fields = self._work.view(np.int64)
        self._compute = compute_slots()

    def work_bytes(self, num_tokens: int) -> int:
        """As `DeviceExperts` says: the team's own memory is no part of what plays the device's."""
        return 0

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
        self.layouts[layer].check(buffers, starts, route_tokens, route_weights, x, out)
        if not len(route_tokens):
            return
        slots = np.array([buffer.data_ptr() for buffer in buffers], np.int64)
        first_routes = np.array(starts, np.int64)
        tokens, weights = np.ascontiguousarray(route_tokens), np.ascontiguousarray(route_weights)
        x = x.contiguous()
        self._fields[:] = (
            address_of(self._layers[layer]),
            address_of(slots),
            address_of(first_routes),
            len(slots),
            address_of(tokens),
            address_of(weights),
            x.data_ptr(),
            out.data_ptr(),
            len(x),
        )
        team = self._team
        num_bytes = max(team.workspace_bytes, SMALLEST_MEMORY)
        while num_bytes:
            memory = team.workspace(num_bytes)
            num_bytes = self._compute(address_of(self._work), team.address, memory, team.workspace_bytes)


def _record_of(layout: SlotLayout) -> Record:
    gate, up, down = layout.gate, layout.up, layout.down
    return record(
        SLOT_LAYER,
        gate_task=quants.multiply_task(gate.format),
        up_task=quants.multiply_task(up.format),
        down_task=quants.multiply_task(down.format),
        quantise_task=quants.quantise_task(),
        gather_task=gather_rows_task(),
        gated_task=multiply_gated_task(),
        add_task=add_routes_task(),
        gate_at=gate.offset,
        up_at=up.offset,
        down_at=down.offset,
        gate_row_bytes=gate.row_bytes,
        up_row_bytes=up.row_bytes,
        down_row_bytes=down.row_bytes,
        hidden=layout.hidden,
        width=gate.num_rows,
        rounds_x=int(quants.uses_codes(gate.format) or quants.uses_codes(up.format)),
        rounds_h=int(quants.uses_codes(down.format)),
    )
