"""The forward pass on the CPU: every layer is a few programs of tasks, between them the hand-over of experts.

A layer is two programs::

    [write the last layer's experts, read, mix tokens, write, read, route]   hand over
    [shared expert]                                                          collect

Where an attention layer has to choose among blocks, which torch does, the first is taken in two.

All buffers are in one workspace, which grows with the largest step. Steps may have any spans. Formulas, and
what state means, are in `gpu_worker.model`; state lives in `gpu_worker.state`, and both ways of computing a
step leave the same there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.interface import RowTable
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.native.attention import Attention
from gpu_worker.native.delta_net import DeltaNet
from gpu_worker.native.moe import MixtureOfExperts
from gpu_worker.native.ngram_embedding import NgramEmbedding
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script, Sizes
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.streams import StreamReader, Written, emit_write
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Matrix, Workspace, multiply_into
from shared.model_config import Qwen4ExpConfig
from shared.native.task import address_of
from shared.native.team import Team
from shared.tensor_catalog import block_prefix

_FIRST_CAPACITY = 16


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

    def build(self, workspace: Workspace, spans: StepSpans, written: Written | None) -> Written:
        """Makes the programs; `written` is what the layer before leaves. What this one leaves."""
        if self.ngram is not None:
            self.ngram.build(workspace, spans)
        self.mixer.build(workspace, spans)
        self.experts.build(workspace)
        # Where the address of what the experts of the layer before computed is to be written.
        self.pending: list[memoryview] = []
        self.whole, self.until_choice, self.after_choice, self.shared = (Script() for _ in range(4))
        self._emit_reading(self.whole, workspace, written)
        if isinstance(self.mixer, Attention):
            self.mixer.emit_heads(self.whole, chooses=False)
            self._emit_rest(self.whole, workspace, self.mixer.emit_attention(self.whole))
            self._emit_reading(self.until_choice, workspace, written)
            self.mixer.emit_heads(self.until_choice, chooses=True)
            self._emit_rest(self.after_choice, workspace, self.mixer.emit_attention(self.after_choice))
        else:
            self._emit_rest(self.whole, workspace, self.mixer.emit(self.whole))
        return self.experts.emit_shared(self.shared)

    def _emit_reading(self, script: Script, workspace: Workspace, written: Written | None) -> None:
        """From what the layer before left to the plane `x`."""
        if self.ngram is not None:
            if written is not None:
                self.pending.append(emit_write(script, workspace, self._config, written)["output"].data)
                script.barrier()
            self.ngram.emit(script)
            written = None
        writing = self._token_input.emit(script, workspace, written)
        if written is not None:
            self.pending.append(writing["output"].data)

    def _emit_rest(self, script: Script, workspace: Workspace, written: Written) -> None:
        """From what the token mixer left to the routes."""
        self._expert_input.emit(script, workspace, written)
        self.experts.emit_routes(script)


class NativeTrunk:
    """All layers, from embedded tokens to logits."""

    def __init__(
        self, weights: Weights, team: Team, config: Qwen4ExpConfig, head_name: str, report: ProgressReport
    ) -> None:
        self._config = config
        self._team = team
        self._embedding: RowTable = weights.row_table("token_embd.weight")
        self._rotation = RotationTable(config.rope_dim, config.rope_base)
        self._layers = []
        for layer in range(config.num_layers):
            report(f"loading layer {layer + 1} of {config.num_layers}", layer / config.num_layers)
            self._layers.append(Layer(weights, layer, config, self._rotation))
        report("compiling what layers do", 1.0)
        self._head = Head(weights, config, weights.matrix(head_name))
        self._build(_FIRST_CAPACITY)

    def _build(self, capacity: int) -> None:
        config = self._config
        self._workspace = Workspace(capacity)
        self._spans = StepSpans(capacity)
        self._streams = self._workspace.floats("streams", config.stream_width)
        written: Written | None = None
        for layer in self._layers:
            written = layer.build(self._workspace, self._spans, written)
        self._last = Script()
        writing = emit_write(self._last, self._workspace, config, written)
        self._last_pending = [writing["output"].data]
        experts = self._layers[-1].experts  # all layers use the same buffers
        x = self._workspace.floats("x", config.hidden)
        self._handed_over = x, experts.expert_ids, experts.expert_weights

    def forward(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """As `gpu_worker.model.interface.Trunk` says."""
        num_tokens = batch.num_tokens
        if num_tokens > self._workspace.capacity:
            self._build(max(num_tokens, 2 * self._workspace.capacity))
        try:
            return self._step(batch, experts, ngram)
        finally:
            self._spans.end()

    def _step(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        config, num_tokens = self._config, batch.num_tokens
        sizes = self._spans.begin(batch.spans, num_tokens)
        self._workspace.set_num_tokens(num_tokens)
        self._rotation.reach(max(span.state.position + span.num_tokens for span in batch.spans))
        streams = self._streams[:num_tokens].reshape(num_tokens, config.num_streams, config.hidden)
        streams[:] = self._embedding(batch.token_ids).numpy()[:, None]
        handed_over = [torch.from_numpy(buffer[:num_tokens]) for buffer in self._handed_over]
        routed: Tensor | None = None
        for layer in self._layers:
            if layer.ngram is not None:
                assert ngram is not None, "a model with an n-gram layer needs n-gram features"
                layer.ngram.begin(ngram.collect())
            if routed is not None:
                _enter(layer.pending, routed)
            self._mix_tokens(layer, sizes)
            ticket = experts.submit(layer.number, *handed_over)
            self._run(layer.shared, sizes)
            routed = experts.collect(ticket)
        assert routed is not None
        _enter(self._last_pending, routed)
        self._run(self._last, sizes)
        return torch.from_numpy(streams)

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return torch.from_numpy(self._head(self._team, streams.numpy()))

    def _mix_tokens(self, layer: Layer, sizes: Sizes) -> None:
        """From the streams as the layer finds them to the routes of its experts."""
        mixer = layer.mixer
        if isinstance(mixer, DeltaNet):
            mixer.begin()
            self._run(layer.whole, sizes)
            return
        if mixer.begin():
            self._run(layer.until_choice, sizes)
            mixer.choose()
            self._run(layer.after_choice, sizes)
        else:
            self._run(layer.whole, sizes)
        mixer.end()

    def _run(self, script: Script, sizes: Sizes) -> None:
        self._team.run(script.resize(sizes))


class Head:
    """The last reader and the output matrix, for the few tokens whose logits are wanted."""

    def __init__(self, weights: Weights, config: Qwen4ExpConfig, matrix: Matrix) -> None:
        self._config = config
        self._matrix = matrix
        self._reader = StreamReader(weights, "output_hc_", config, has_gains=False)
        self._build(_FIRST_CAPACITY)

    def _build(self, capacity: int) -> None:
        self._workspace = Workspace(capacity)
        self._streams = self._workspace.floats("streams", self._config.stream_width)
        self._script = Script()
        self._reader.emit(self._script, self._workspace, None)
        # Logits are large and go to whoever asked: each time into memory of their own.
        self._product = multiply_into(
            self._script, self._workspace.plane("x", self._config.hidden), self._matrix
        )

    def __call__(self, team: Team, streams: NDArray[np.float32]) -> NDArray[np.float32]:
        """streams [n, streams, hidden] -> logits [n, vocabulary]."""
        num_rows = len(streams)
        if num_rows > self._workspace.capacity:
            self._build(num_rows)
        self._streams[:num_rows] = streams.reshape(num_rows, -1)
        self._workspace.set_num_tokens(num_rows)
        logits = np.empty((num_rows, self._matrix.num_rows), np.float32)
        self._product["out"] = address_of(logits)
        team.run(self._script.resize(Sizes(num_rows)))
        return logits


def _enter(places: Sequence[memoryview], routed: Tensor) -> None:
    """Writes down, in the records of what comes next, where the sums of the routed experts are."""
    address = routed.data_ptr()
    for place in places:
        place[0] = address
