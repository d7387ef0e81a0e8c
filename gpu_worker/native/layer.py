"""One layer as two programs of tasks::

    [write the last layer's experts, read, mix tokens, write, read, route]   hand over
    [shared expert]                                                          collect

Where an attention layer has to choose among blocks, which torch does, the first is taken in two.
"""

from typing import Protocol

from gpu_worker.native.attention import Attention
from gpu_worker.native.delta_net import DeltaNet
from gpu_worker.native.moe import MixtureOfExperts
from gpu_worker.native.ngram_embedding import NgramEmbedding
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.streams import StreamReader, Written, emit_write
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Workspace
from shared.model_config import Qwen4ExpConfig
from shared.native.records import Record
from shared.tensor_catalog import block_prefix


class Beginning(Protocol):
    """What comes before the first layer."""

    def build(self, workspace: Workspace) -> None:
        """Takes its buffers."""

    def emit(self, script: Script) -> None:
        """Appends all of it, up to the streams."""


class Layer:
    """One layer: its parts, and their programs in the workspace they were built for."""

    def __init__(self, weights: Weights, layer: int, config: Qwen4ExpConfig, rotation: RotationTable) -> None:
        prefix = block_prefix(layer)
        self.number = layer
        self._config = config
        has_ngram = config.ngram is not None and config.ngram.layer == layer
        self.ngram = NgramEmbedding(weights, config, config.ngram) if config.ngram and has_ngram else None
        self._token_input = StreamReader(weights, f"{prefix}hc_attn_", config, has_gains=True)
        self.mixer: DeltaNet | Attention = (
            DeltaNet(weights, layer, config)
            if config.is_recurrent[layer]
            else Attention(weights, layer, config, rotation)
        )
        self._expert_input = StreamReader(weights, f"{prefix}hc_ffn_", config, has_gains=True)
        self.experts = MixtureOfExperts(weights, layer, config)

    def build(self, workspace: Workspace, spans: StepSpans, before: Beginning | Written) -> Written:
        """Makes the programs; `before` is what the layer before leaves, or what comes before the first one.
        What this one leaves."""
        if self.ngram is not None:
            self.ngram.build(workspace, spans)
        self.mixer.build(workspace, spans)
        self.experts.build(workspace)
        # Where to write the address of what the experts of the layer before computed: one element each.
        self.pending: list[Record] = []
        # Whether the step at hand has tokens that choose blocks.
        self.chooses = False
        self.whole, self.until_choice, self.after_choice, self.shared = (Script() for _ in range(4))
        self._emit_reading(self.whole, workspace, before)
        if isinstance(self.mixer, Attention):
            self.mixer.emit_heads(self.whole, chooses=False)
            self._emit_rest(self.whole, workspace, self.mixer.emit_attention(self.whole))
            self._emit_reading(self.until_choice, workspace, before)
            self.mixer.emit_heads(self.until_choice, chooses=True)
            self._emit_rest(self.after_choice, workspace, self.mixer.emit_attention(self.after_choice))
        else:
            self._emit_rest(self.whole, workspace, self.mixer.emit(self.whole))
        return self.experts.emit_shared(self.shared)

    def begin(self) -> None:
        """Takes the spans of the next step."""
        if self.ngram is not None:
            self.ngram.begin()
        mixer = self.mixer
        if isinstance(mixer, Attention):
            self.chooses = mixer.begin()
        else:
            mixer.begin()

    def enter(self, address: int) -> None:
        """Writes down where the sums of the routed experts of the layer before are."""
        for place in self.pending:
            place[0] = address

    def choose(self) -> None:
        """The choice of blocks, between the two halves of a step that `chooses`."""
        assert isinstance(self.mixer, Attention)
        self.mixer.choose()

    def _emit_reading(self, script: Script, workspace: Workspace, before: Beginning | Written) -> None:
        """From what the layer before left to the plane `x`."""
        written = before if isinstance(before, Written) else None
        if not isinstance(before, Written):
            before.emit(script)
        if self.ngram is not None:
            if written is not None:
                self.pending.append(emit_write(script, workspace, self._config, written)["output"])
                script.barrier()
            self.ngram.emit(script)
            written = None
        writing = self._token_input.emit(script, workspace, written)
        if written is not None:
            self.pending.append(writing["output"])

    def _emit_rest(self, script: Script, workspace: Workspace, written: Written) -> None:
        """From what the token mixer left to the routes."""
        self._expert_input.emit(script, workspace, written)
        self.experts.emit_routes(script)
