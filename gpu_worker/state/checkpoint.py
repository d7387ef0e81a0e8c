"""The state of a sequence at one of its positions, from which others can go on.

What delta nets, convolutions and indexer keep is copied; keys and values stay where they are, in pages that
are then read by all who go on from here. A checkpoint is taken of a state as it is between two steps
(`Checkpoint.of`), or is filled in while a step passes its position (`Span.snapshots`): a prompt is not cut in
pieces for it.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.state.pages import Page, PagePool
from gpu_worker.state.sequence_state import DeltaState, SequenceState
from shared.window import WINDOW_TOKENS


class Checkpoint:
    """Copies of what a state of `num_pending` pending tokens keeps, as `SequenceState` has it, and the pages
    of its positions."""

    def __init__(self, state: SequenceState, position: int, num_pending: int = 1) -> None:
        """Memory for the state at a position, of which nothing is filled in."""
        self.position = position
        self.num_pending = num_pending
        self.pages: list[Page] = []
        self.delta = {layer: _room_for(delta, num_pending) for layer, delta in state.delta.items()}
        self.raw_keys = {
            layer: torch.empty_like(attention.raw_keys) for layer, attention in state.attention.items()
        }
        self.streams: Tensor | None = None
        """Residual streams [1, streams, hidden] behind the last layer at the last position, for a prediction
        block; None where that has not followed."""
        inputs = state.ngram_inputs
        self.ngram_inputs = _rows_like(inputs, num_pending) if inputs is not None else None

    @classmethod
    def of(cls, state: SequenceState, position: int | None = None) -> "Checkpoint":
        """The state as it is now, or at a position that it could be rolled back to."""
        num_dropped = 0 if position is None else state.position - position
        assert 0 <= num_dropped <= state.num_pending
        made = cls(state, state.position - num_dropped, state.num_pending - num_dropped)
        for layer, delta in state.delta.items():
            _copy(delta, made.delta[layer])
        for layer, attention in state.attention.items():
            made.raw_keys[layer].copy_(attention.raw_keys)
        if made.ngram_inputs is not None and state.ngram_inputs is not None:
            made.ngram_inputs.copy_(state.ngram_inputs[: len(made.ngram_inputs)])
        made.keep_pages(state)
        return made

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return sum(tensor.nbytes for tensor in self._copies().values())

    def arrays(self, pool: PagePool) -> dict[str, NDArray[np.generic]]:
        """All of it, keys and values too, by name. May be called by any thread, as long as the pages are
        held: nobody writes what is read."""
        found = {name: tensor.cpu().numpy() for name, tensor in self._copies().items()}
        rows = pool.page_rows(self.pages)[: self.position]
        for layer, store in pool.stores.items():
            for name, tensor, chosen in store.rows_of(rows):
                found[f"{layer}.{name}"] = tensor[chosen].cpu().numpy()
        return found

    @classmethod
    def from_arrays(
        cls,
        state: SequenceState,
        pool: PagePool,
        arrays: Mapping[str, NDArray[np.generic]],
        position: int,
        num_pending: int,
    ) -> "Checkpoint":
        """The one that such arrays are of, in pages that are taken for it; `state` is any of the model.
        Raises KeyError or RuntimeError where they are of something else."""
        made = cls(state, position, num_pending)
        if "streams" in arrays:
            made.streams = torch.empty(arrays["streams"].shape, device=pool.torch_device)
        for name, tensor in made._copies().items():
            tensor.copy_(_tensor_of(arrays[name]))
        made.pages = pool.take(-(-position // pool.page_tokens))
        rows = pool.page_rows(made.pages)[:position]
        for layer, store in pool.stores.items():
            for name, tensor, chosen in store.rows_of(rows):
                tensor[chosen] = _tensor_of(arrays[f"{layer}.{name}"]).to(tensor.device)
        return made

    def _copies(self) -> dict[str, Tensor]:
        named: dict[str, Tensor | None] = {"ngram inputs": self.ngram_inputs, "streams": self.streams}
        for layer, delta in self.delta.items():
            named |= {f"{layer}.{name}": getattr(delta, name) for name in DeltaState.__dataclass_fields__}
        named |= {f"{layer}.raw keys": raw_keys for layer, raw_keys in self.raw_keys.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def keep_pages(self, state: SequenceState) -> None:
        """Keeps the pages of the positions that the state has computed."""
        self.pages = state.pages[: -(-self.position // state.page_tokens)]

    def restore(self, state: SequenceState, pool: PagePool) -> None:
        """Makes a state that has not begun the one at the checkpoint.

        The page of the last position is copied, even where it is full, and written by the sequence alone: a
        prediction block computes that position anew, with the token that follows in this sequence.
        """
        assert state.position == 0, "the state has begun"
        assert not state.pages, "the state has begun"
        page_tokens = pool.page_tokens
        num_shared = max(0, self.position - 1) // page_tokens
        state.share(self.pages[:num_shared])
        state.reserve(self.position)
        for place in range(num_shared, len(self.pages)):
            count = min(page_tokens, self.position - place * page_tokens)
            pool.copy(self.pages[place], state.pages[place], count)
        for layer, delta in self.delta.items():
            _copy(delta, state.delta[layer])
        for layer, raw_keys in self.raw_keys.items():
            state.attention[layer].raw_keys.copy_(raw_keys)
        if self.ngram_inputs is not None and state.ngram_inputs is not None:
            state.ngram_inputs[: len(self.ngram_inputs)] = self.ngram_inputs
        state.position, state.num_pending = self.position, self.num_pending


def _tensor_of(array: NDArray[np.generic]) -> Tensor:
    # A copy: arrays of files are read-only.
    return torch.from_numpy(array.copy())


def _room_for(delta: DeltaState, num_pending: int) -> DeltaState:
    return DeltaState(
        matrices=torch.empty_like(delta.matrices),
        decays=torch.empty_like(delta.decays[:num_pending]),
        keys=torch.empty_like(delta.keys[:num_pending]),
        deltas=torch.empty_like(delta.deltas[:num_pending]),
        conv_inputs=_rows_like(delta.conv_inputs, num_pending),
    )


def _rows_like(inputs: Tensor, num_pending: int) -> Tensor:
    """Room for inputs of a convolution up to the pending tokens; a state has room for a window."""
    return torch.empty_like(inputs[: len(inputs) - WINDOW_TOKENS + num_pending])


def _copy(source: DeltaState, target: DeltaState) -> None:
    """As many rows as both have."""
    target.matrices.copy_(source.matrices)
    rows_of = (*source.updates, source.conv_inputs), (*target.updates, target.conv_inputs)
    for of_source, of_target in zip(*rows_of, strict=True):
        count = min(len(of_source), len(of_target))
        of_target[:count] = of_source[:count]
