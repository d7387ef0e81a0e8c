"""What the native parts ask of the device: weights where the model file maps them, small ones decoded."""

from typing import Protocol

from gpu_worker.native.workspace import Floats, Matrix


class Weights(Protocol):
    """The weights of one model."""

    def matrix(self, name: str) -> Matrix:
        """The matrix of that name, or a vector as a matrix of one row; nothing is copied or decoded."""

    def floats(self, name: str) -> Floats:
        """A small tensor, decoded to float32, C-contiguous."""
