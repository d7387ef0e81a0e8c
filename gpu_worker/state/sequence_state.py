"""What one sequence keeps between steps, layer by layer, and how the last tokens are taken back.

Delta-net layers keep a fixed amount: a matrix per head and the last inputs of the convolution. Attention
layers keep keys and values of every position, and the indexer's pooled keys, one per complete block, in pages
(`gpu_worker.state.pages`).

The last tokens are *pending*: what they change is kept beside the state, and becomes part of it with the next
step. So the tokens of a window can be taken back (`roll_back`), all of them or the last few, for nothing: the
matrices are still those from before; convolutions look back from an earlier row; pages are written again; and
raw keys of the indexer lie in a ring that reaches back over a window. It also saves a pass over the matrices
of delta nets, which are read once for the update of the last token and the recall of the next.

Steps computed in torch and in machine code (`gpu_worker.native`) find what the other left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.state.pages import LayerStore, Page, PagePool
from shared.model_config import Qwen4ExpConfig
from shared.placement.sizes import ring_rows
from shared.window import WINDOW_TOKENS


@dataclass(slots=True)
class DeltaState:
    """A delta-net layer.

    `matrices` [value heads, key dim, value dim] are from before the pending tokens. Of token i of those,
    `decays[i]` [value heads], `keys[i]` and `deltas[i]` [value heads, head dim] are its update,
    S <- decay S + key delta^T. `conv_inputs` [WINDOW_TOKENS + kernel - 1, channels] are projections before
    the convolution: what comes before the pending tokens, oldest first, then theirs.
    """

    matrices: Tensor
    decays: Tensor
    keys: Tensor
    deltas: Tensor
    conv_inputs: Tensor

    @property
    def updates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the pending tokens."""
        return self.decays, self.keys, self.deltas


@dataclass(slots=True)
class AttentionState:
    """An attention layer: where its rows are, and `raw_keys` [ring_rows, indexer dim], of the indexer: that
    of position p in row p mod ring_rows."""

    store: LayerStore
    raw_keys: Tensor


class SequenceState:
    """All layers of one sequence, and its position: the number of tokens computed so far. `predicted` is the
    same of the prediction block, which has as many positions in its attention layer."""

    def __init__(self, config: Qwen4ExpConfig, pool: PagePool) -> None:
        device = pool.torch_device
        self._pool = pool
        self.position = 0
        self.num_pending = 0
        self.pages: list[Page] = []
        self.page_numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self.predicted = 0
        self.delta: dict[int, DeltaState] = {}
        self.attention: dict[int, AttentionState] = {}
        head_dim, heads = config.delta_head_dim, config.num_delta_value_heads
        for layer, is_recurrent in enumerate(config.is_recurrent):
            if is_recurrent:
                rows = WINDOW_TOKENS + config.conv_kernel - 1
                self.delta[layer] = DeltaState(
                    matrices=torch.zeros(heads, head_dim, head_dim, device=device),
                    decays=torch.zeros(WINDOW_TOKENS, heads, device=device),
                    keys=torch.zeros(WINDOW_TOKENS, heads, head_dim, device=device),
                    deltas=torch.zeros(WINDOW_TOKENS, heads, head_dim, device=device),
                    conv_inputs=torch.zeros(rows, config.delta_channels, device=device),
                )
            else:
                store = pool.stores[layer]
                ring = torch.zeros(ring_rows(store.ratio), config.indexer.head_dim, device=device)
                self.attention[layer] = AttentionState(store, ring)
        self.ngram_inputs: Tensor | None = None
        """Of the n-gram convolution, as `DeltaState.conv_inputs`: [WINDOW_TOKENS + history, stream width]."""
        if config.ngram is not None:
            rows = WINDOW_TOKENS + config.ngram.history_length
            self.ngram_inputs = torch.zeros(rows, config.stream_width, device=device)

    @property
    def page_tokens(self) -> int:
        """Positions of a page."""
        return self._pool.page_tokens

    def num_pages_for(self, length: int) -> int:
        """Pages to be taken before the sequence can have so many positions."""
        return max(0, -(-length // self.page_tokens) - len(self.pages))

    def reserve(self, length: int) -> None:
        """Makes room for so many positions. Stores may move."""
        if missing := self.num_pages_for(length):
            self.share(self._pool.take(missing))

    def share(self, pages: Sequence[Page]) -> None:
        """Appends pages. Those that others have too are not to be written: their positions have been
        computed."""
        self.pages += pages
        # With room for more, so that their address stays; there are a few thousand at most.
        if len(self.pages) > len(self.page_numbers):
            larger = np.zeros(2 * len(self.pages), np.int64)
            larger[: len(self.page_numbers)] = self.page_numbers
            self.page_numbers = larger
        for place in range(len(self.pages) - len(pages), len(self.pages)):
            self.page_numbers[place] = self.pages[place].number

    def rows(self, stop: int) -> Tensor:
        """The rows of positions 0 to `stop`, which there is room for: int64 [stop]."""
        if len(self._rows) < stop:
            self._rows = self._pool.page_rows(self.pages)
        return self._rows[:stop]

    def block_rows(self, stop: int, ratio: int) -> Tensor:
        """The rows of the keys of blocks 0 to `stop`: int64 [stop]."""
        return self.rows(stop * ratio)[::ratio] // ratio

    def advance(self, num_tokens: int) -> None:
        """A step of so many tokens has been computed."""
        self.position += num_tokens
        self.num_pending = num_kept(num_tokens)

    def roll_back(self, position: int) -> None:
        """Takes back the last tokens: `position` are kept. They must be of the last step, and that one of no
        more than WINDOW_TOKENS."""
        num_dropped = self.position - position
        assert 0 <= num_dropped <= self.num_pending, f"{num_dropped} of {self.num_pending} pending tokens"
        self.num_pending -= num_dropped
        self.position = position


def num_kept(num_tokens: int) -> int:
    """How many tokens are pending after a step of so many."""
    return num_tokens if num_tokens <= WINDOW_TOKENS else 1
