"""What the model asks of others in a step, and what it offers them, as protocols.

Whoever computes the layers (`Trunk`) is handed the routed experts and the n-gram features, which other
processes compute, as objects to submit to and to collect from.
"""

from typing import Protocol

from torch import Tensor

from gpu_worker.model.batch import Batch


class RoutedExperts(Protocol):
    """Whoever computes the routed experts."""

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Hands over x [tokens, hidden] with its routes [tokens, k]; returns a ticket."""

    def collect(self, ticket: int) -> Tensor:
        """Waits for the weighted sums [tokens, hidden] of a ticket."""


class NgramFeatures(Protocol):
    """Whoever gathers the n-gram features of the step's tokens."""

    def collect(self) -> Tensor:
        """Waits for the features of the step, in the order of its tokens: [tokens, feature width]."""


class ProgressReport(Protocol):
    """Told how far loading is."""

    def __call__(self, activity: str, progress: float) -> None: ...


class Trunk(Protocol):
    """All layers of the model, with the embedding before and the head after them; and the prediction block,
    which shares both, where the model has one."""

    @property
    def has_prediction(self) -> bool:
        """Whether there is a prediction block."""

    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """Computes the batch: streams [tokens, streams, hidden], valid until the next step. Advances the
        state of its sequences, which have room for it, but for `SequenceState.advance`."""

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary], in memory of their own."""

    def predict(self, batch: Batch, streams: Tensor, experts: RoutedExperts) -> Tensor:
        """Computes the prediction block for positions p, one of each token of the batch, whose spans are
        those of prediction (`Batch.for_prediction`): `batch.token_ids` are the tokens at p + 1,
        `batch.positions` are p, and streams [tokens, streams, hidden] those at p, of the trunk or of the
        block itself. The block's streams [tokens, streams, hidden], valid until the next prediction; those of
        the trunk stay as they are. Advances the block's attention layer in the state of its sequences, but
        not how far that says it has come."""

    def prediction_logits(self, streams: Tensor) -> Tensor:
        """The block's streams [n, streams, hidden] at positions p -> the logits of the tokens at p + 2
        [n, vocabulary], in memory of their own."""
