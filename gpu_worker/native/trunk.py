"""The forward pass on the CPU: every layer is a few programs of tasks, between them the hand-over of experts.

A layer is two programs::

    [write the last layer's experts, read, mix tokens, write, read, route]   hand over
    [shared expert]                                                          collect

Where an attention layer has to choose among blocks, which torch does, the first is taken in two.

Where the experts are behind a ring, all of that is native code too, hand-over and collection included
(`layer_loop`); whoever else computes them is called layer by layer.

All buffers are in one workspace, which grows with the largest step. Steps may have any spans. Formulas, and
what state means, are in `gpu_worker.model`; state lives in `gpu_worker.state`, and both ways of computing a
step leave the same there.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, ProgressReport, RoutedExperts
from gpu_worker.native.attention import Attention
from gpu_worker.native.delta_net import DeltaNet
from gpu_worker.native.embedding import Embedding
from gpu_worker.native.layer_loop import LayerLoop
from gpu_worker.native.moe import MixtureOfExperts
from gpu_worker.native.ngram_embedding import NgramEmbedding
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script, Sizes
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.streams import StreamReader, Written, emit_write
from gpu_worker.native.weights import Weights
from gpu_worker.native.workspace import Matrix, Workspace, multiply_into
from gpu_worker.ngram_way import StagedFeatures
from shared.model_config import Qwen4ExpConfig
from shared.native.records import Record
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

    def build(self, workspace: Workspace, spans: StepSpans, before: Embedding | Written) -> Written:
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

    def choose(self) -> None:
        """The choice of blocks, between the two halves of a step that `chooses`."""
        assert isinstance(self.mixer, Attention)
        self.mixer.choose()

    def _emit_reading(self, script: Script, workspace: Workspace, before: Embedding | Written) -> None:
        """From what the layer before left to the plane `x`."""
        written = before if isinstance(before, Written) else None
        if isinstance(before, Embedding):
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


class NativeTrunk:
    """All layers, from embedded tokens to logits."""

    def __init__(
        self, weights: Weights, team: Team, config: Qwen4ExpConfig, head_name: str, report: ProgressReport
    ) -> None:
        self._config = config
        self._team = team
        self._embedding = Embedding(weights, config)
        self._rotation = RotationTable(config.rope_dim, config.rope_base, config.rope_scaling)
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
        self._embedding.build(self._workspace)
        before: Embedding | Written = self._embedding
        for layer in self._layers:
            before = layer.build(self._workspace, self._spans, before)
        assert isinstance(before, Written), "there are layers"
        self._last = Script()
        writing = emit_write(self._last, self._workspace, config, before)
        self._last_pending = [writing["output"]]
        experts = self._layers[-1].experts  # all layers use the same buffers
        x = self._workspace.floats("x", config.hidden)
        self._handed_over = x, experts.expert_ids, experts.expert_weights
        self._loop = LayerLoop(self._team, *self._handed_over)
        pending = [*(layer.pending for layer in self._layers), self._last_pending]
        self._loop.set_pending([[address_of(place) for place in places] for places in pending])
        self._loop_sizes: tuple[Sizes, list[bool]] | None = None

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
        self._embedding.token_ids[:num_tokens] = batch.token_ids.numpy()
        for layer in self._layers:
            layer.begin()
        if isinstance(experts, CpuExperts):
            self._run_natively(sizes, experts, ngram)
        else:
            self._run_by_turns(sizes, experts, ngram)
        streams = self._streams[:num_tokens].reshape(num_tokens, config.num_streams, config.hidden)
        return torch.from_numpy(streams)

    def _run_natively(self, sizes: Sizes, experts: CpuExperts, ngram: NgramFeatures | None) -> None:
        """All layers and what follows them, in as few native calls as possible."""
        self._size_loop(sizes)
        staged = ngram if isinstance(ngram, StagedFeatures) else None
        self._loop.begin(sizes.num_tokens, experts, staged)
        start = 0
        for layer in self._layers:
            if layer.ngram is not None:
                collects = staged is not None and not layer.chooses
                self._loop.set_features(layer.number, layer.ngram.features if collects else None)
                if collects:
                    continue
            elif not layer.chooses:
                continue
            self._loop.run(start, layer.number, experts, staged)
            start = layer.number
            if layer.ngram is not None:
                _collect_features(layer.ngram, ngram)
            if layer.chooses:
                _enter(layer.pending, self._loop.outputs)
                self._run(layer.until_choice, sizes)
                layer.choose()
        self._loop.run(start, len(self._layers) + 1, experts, staged)

    def _size_loop(self, sizes: Sizes) -> None:
        """Puts the programs for a step of that size into the loop."""
        choices = [layer.chooses for layer in self._layers]
        if (sizes, choices) == self._loop_sizes:
            return
        for layer in self._layers:
            script = layer.after_choice if layer.chooses else layer.whole
            self._loop.set_programs(layer.number, script.resize(sizes), layer.shared.resize(sizes))
        self._loop.set_programs(len(self._layers), self._last.resize(sizes), None)
        self._loop_sizes = sizes, choices

    def _run_by_turns(self, sizes: Sizes, experts: RoutedExperts, ngram: NgramFeatures | None) -> None:
        """The same, program by program."""
        # The programs are the same ones.
        self._loop_sizes = None
        handed_over = [torch.from_numpy(buffer[: sizes.num_tokens]) for buffer in self._handed_over]
        routed: Tensor | None = None
        for layer in self._layers:
            if layer.ngram is not None:
                _collect_features(layer.ngram, ngram)
            if routed is not None:
                _enter(layer.pending, routed.data_ptr())
            if layer.chooses:
                self._run(layer.until_choice, sizes)
                layer.choose()
                self._run(layer.after_choice, sizes)
            else:
                self._run(layer.whole, sizes)
            ticket = experts.submit(layer.number, *handed_over)
            self._run(layer.shared, sizes)
            routed = experts.collect(ticket)
        assert routed is not None
        _enter(self._last_pending, routed.data_ptr())
        self._run(self._last, sizes)

    def logits(self, streams: Tensor) -> Tensor:
        """streams [n, streams, hidden] -> [n, vocabulary]."""
        return torch.from_numpy(self._head(self._team, streams.numpy()))

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


def _collect_features(embedding: NgramEmbedding, ngram: NgramFeatures | None) -> None:
    assert ngram is not None, "a model with an n-gram layer needs n-gram features"
    features = ngram.collect().numpy()
    embedding.features[: len(features)] = features


def _enter(places: Sequence[Record], address: int) -> None:
    """Writes down, in the records of what comes next, where the sums of the routed experts are."""
    for place in places:
        place[0] = address
