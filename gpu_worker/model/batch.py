"""What one step computes: tokens of one or several sequences, one after the other in one list.

Everything that treats tokens alone (projections, experts, norms) runs over all of them at once; what reaches
back in a sequence (delta net, attention, n-gram convolution) runs span by span with that sequence's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.state.checkpoint import Checkpoint
from gpu_worker.state.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `start` to `stop` of the batch: they continue `state` at its position; in the prediction
    block, at the one that this has come to."""

    start: int
    stop: int
    state: SequenceState
    snapshots: Sequence[Checkpoint] = ()
    """To be filled in on the way, by rising position: each is that of a token of the span, but for the first,
    and has one token pending, the one before. A span of a window has none."""
    is_prediction: bool = False

    @property
    def num_tokens(self) -> int:
        """Length of the span."""
        return self.stop - self.start

    @property
    def position(self) -> int:
        """Of the first token."""
        return self.state.predicted if self.is_prediction else self.state.position

    @property
    def cuts(self) -> list[int]:
        """Numbers of the tokens before which the snapshots are taken. Whoever goes on from one has the
        prediction block compute its last position anew."""
        back = 1 if self.is_prediction else 0
        return [snapshot.position - back - self.position for snapshot in self.snapshots]


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step: `token_ids` and `positions` are [num_tokens] int64 on the device."""

    token_ids: Tensor
    positions: Tensor
    spans: Sequence[Span]

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans."""
        return self.token_ids.shape[0]

    @classmethod
    def of(
        cls, token_ids: list[int], positions: list[int], spans: Sequence[Span], torch_device: torch.device
    ) -> "Batch":
        """Of lists."""
        return cls(_on(torch_device, token_ids), _on(torch_device, positions), spans)

    def for_prediction(self) -> "Batch":
        """The same tokens for the prediction block."""
        spans = [
            Span(span.start, span.stop, span.state, span.snapshots, is_prediction=True) for span in self.spans
        ]
        return Batch(self.token_ids, self.positions, spans)


def _on(torch_device: torch.device, numbers: list[int]) -> Tensor:
    # A fifth of the time that torch.tensor takes.
    tensor = torch.from_numpy(np.array(numbers, np.int64))
    return tensor if torch_device.type == "cpu" else tensor.to(torch_device)
