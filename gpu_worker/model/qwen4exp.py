"""The model `qwen4exp` on one device: from token ids to logits, and the state of its sequences."""

from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.kv_format import EXACT, KvFormat
from shared.model_config import Qwen4ExpConfig


class Qwen4Exp:
    """The model. What computes its layers is the device's choice."""

    def __init__(
        self,
        device: Device,
        config: Qwen4ExpConfig,
        *,
        has_own_head: bool,
        report: ProgressReport,
        kv_format: KvFormat = EXACT,
    ) -> None:
        """`has_own_head`: whether the file has an output matrix; the embedding serves as one otherwise.
        `kv_format`: how keys and values are kept."""
        self.config = config
        self._device = device
        head_name = "output.weight" if has_own_head else "token_embd.weight"
        self.pages = PagePool(config, device.torch_device, kv_format)
        self._trunk = device.trunk(config, head_name, report)

    def new_state(self) -> SequenceState:
        """The state of a sequence that has not begun."""
        return SequenceState(self.config, self.pages)

    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """Computes the batch and advances its sequences by it: streams [tokens, streams, hidden], valid until
        the next step."""
        for span in batch.spans:
            span.state.reserve(span.state.position + span.num_tokens)
        streams = self._trunk.forward(batch, experts, ngram)
        for span in batch.spans:
            span.state.advance(span.num_tokens)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary], in memory of their own."""
        return self._trunk.logits(streams)

    @property
    def has_prediction(self) -> bool:
        """Whether there is a prediction block."""
        return self._trunk.has_prediction

    def predict(self, batch: Batch, streams: Tensor, experts: RoutedExperts) -> Tensor:
        """Computes the prediction block for the positions p that come next in its sequences, and advances
        `state.predicted` of these: `batch.token_ids` are the tokens at p + 1, `batch.positions` are p, and
        streams [tokens, streams, hidden] those at p, of `forward` or, to predict further, of `predict`. The
        block's streams [tokens, streams, hidden], valid until the next prediction.

        Its experts are computed by the cpu_worker, whatever `experts` does for other layers; what is counted
        of them is booked on the rows of this batch.
        """
        batch = batch.for_prediction()
        for span in batch.spans:
            span.state.reserve(span.position + span.num_tokens)
        predicted = self._trunk.predict(batch, streams, experts)
        for span in batch.spans:
            span.state.predicted += span.num_tokens
        return predicted

    def prediction_logits(self, streams: Tensor) -> Tensor:
        """The block's streams [n, streams, hidden] at positions p -> the logits of the tokens at p + 2
        [n, vocabulary], in memory of their own."""
        return self._trunk.prediction_logits(streams)
