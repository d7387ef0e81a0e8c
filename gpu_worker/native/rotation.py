"""The rotations of all positions in use, in a table that grows: tasks look cosines and sines up."""

import numpy as np
import torch

from gpu_worker.model.rotary import Rotary
from shared.native.arithmetic import Pointer
from shared.native.memory import floats_at
from shared.native.records import fields, reader, record
from shared.native.task import address_of
from shared.quants.jit import jitable
from shared.rope_scaling import RopeScaling

_FIRST_ROWS = 2048

ROTATION = fields(
    "cosines",  # f32 [positions, half], times the attention factor, as the sines
    "sines",
    "half",  # half of the rotary dimensions
)
_rotation_at = reader(ROTATION)


@jitable
def rotate(x: Pointer, position: int, rotation: int) -> None:
    """Rotates one head in place, by its position; `rotation` is the address of a ROTATION. Compiled code
    only."""
    table = _rotation_at(rotation)
    half = table.half
    cosines, sines = (
        floats_at(table.cosines + position * half * 4),
        floats_at(table.sines + position * half * 4),
    )
    for i in range(half):
        first, second = x[i], x[half + i]
        x[i] = first * cosines[i] - second * sines[i]
        x[half + i] = second * cosines[i] + first * sines[i]


class RotationTable:
    """Cosines and sines as `gpu_worker.model.rotary` computes them."""

    def __init__(self, dim: int, base: float, scaling: RopeScaling) -> None:
        self._rotary = Rotary(dim, base, scaling, torch.device("cpu"))
        self._length = 0
        self.record = record(ROTATION, half=dim // 2)

    def reach(self, length: int) -> None:
        """Makes sure that all positions below `length` are there."""
        if length <= self._length:
            return
        self._length = max(_FIRST_ROWS, 2 * self._length, length)
        rotation = self._rotary.at(torch.arange(self._length))
        self.cosines = np.ascontiguousarray(rotation.cos[:, 0].numpy())
        self.sines = np.ascontiguousarray(rotation.sin[:, 0].numpy())
        self.record["cosines"], self.record["sines"] = address_of(self.cosines), address_of(self.sines)
