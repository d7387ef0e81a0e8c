"""The model `qwen4exp` on one device: from token ids to logits, and the state of its sequences."""

from torch import Tensor

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.model_config import Qwen4ExpConfig


class Qwen4Exp:
    """The model. What computes its layers is the device's choice."""

    def __init__(
        self, device: Device, config: Qwen4ExpConfig, *, has_own_head: bool, report: ProgressReport
    ) -> None:
        """`has_own_head`: whether the file has an output matrix; the embedding serves as one otherwise."""
        self.config = config
        self._device = device
        head_name = "output.weight" if has_own_head else "token_embd.weight"
        self.pages = PagePool(config, device.torch_device)
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
