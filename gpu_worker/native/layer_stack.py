"""Layers that are computed one after the other, from what comes before the first to the streams behind the
last.

Where the experts are behind a ring, all of that is native code, hand-over and collection included
(`layer_loop`); whoever else computes them is called layer by layer.

All buffers are in one workspace, which grows with the largest step. Steps may have any spans.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.model.batch import Batch
from gpu_worker.model.interface import NgramFeatures, RoutedExperts
from gpu_worker.native.layer import Beginning, Layer
from gpu_worker.native.layer_loop import LayerLoop
from gpu_worker.native.ngram_embedding import NgramEmbedding
from gpu_worker.native.rotation import RotationTable
from gpu_worker.native.script import Script, Sizes
from gpu_worker.native.spans import StepSpans
from gpu_worker.native.streams import Written, emit_write
from gpu_worker.native.workspace import Workspace
from gpu_worker.ngram_way import StagedFeatures
from shared.model_config import Qwen4ExpConfig
from shared.native.program import Program
from shared.native.records import Record
from shared.native.task import address_of
from shared.native.team import Team

_FIRST_CAPACITY = 16
# How many sizes of steps the loop has tables for.
_NUM_TABLES = 48


class LayerStack:
    """The layers, and their workspace."""

    def __init__(
        self,
        team: Team,
        config: Qwen4ExpConfig,
        beginning: Beginning,
        layers: Sequence[Layer],
        rotation: RotationTable,
    ) -> None:
        """The layers have consecutive numbers; `rotation` is the one that they were made with."""
        self._team = team
        self._config = config
        self._beginning = beginning
        self._layers = layers
        self._rotation = rotation
        self._build(_FIRST_CAPACITY)

    def _build(self, capacity: int) -> None:
        config = self._config
        self._workspace = Workspace(capacity)
        self._spans = StepSpans(capacity)
        self._streams = self._workspace.floats("streams", config.stream_width)
        self._beginning.build(self._workspace)
        before: Beginning | Written = self._beginning
        for layer in self._layers:
            before = layer.build(self._workspace, self._spans, before)
        assert isinstance(before, Written), "there are layers"
        self._last = Script()
        self._last_writing = emit_write(self._last, self._workspace, config, before)
        experts = self._layers[-1].experts  # all layers use the same buffers
        x = self._workspace.floats("x", config.hidden)
        self._handed_over = x, experts.expert_ids, experts.expert_weights
        self._loop = LayerLoop(self._team, *self._handed_over, first_layer=self._layers[0].number)
        pending = [*(layer.pending for layer in self._layers), [self._last_writing["output"]]]
        self._loop.set_pending([[address_of(place) for place in places] for places in pending])
        self._loop_key: tuple[Sizes, tuple[bool, ...]] | None = None
        self._tables: OrderedDict[tuple[Sizes, tuple[bool, ...]], tuple[Record, list[Program]]] = (
            OrderedDict()
        )

    def reserve(self, num_tokens: int) -> None:
        """Makes room for a step of so many tokens, before what comes first is told of it."""
        if num_tokens > self._workspace.capacity:
            self._build(max(num_tokens, 2 * self._workspace.capacity))

    def run(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        """Computes a step: streams [tokens, streams, hidden], valid until the next one. Advances the layers'
        state in its sequences, but not their positions."""
        try:
            return self._run(batch, experts, ngram)
        finally:
            self._spans.end()

    def _run(self, batch: Batch, experts: RoutedExperts, ngram: NgramFeatures | None) -> Tensor:
        config, num_tokens = self._config, batch.num_tokens
        sizes = self._spans.begin(batch.spans, num_tokens)
        self._workspace.set_num_tokens(num_tokens)
        self._rotation.reach(max(span.position + span.num_tokens for span in batch.spans))
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
        for row, layer in enumerate(self._layers):
            if layer.ngram is not None:
                collects = staged is not None and not layer.chooses
                self._loop.set_features(row, layer.ngram.features if collects else None)
                if collects:
                    continue
            elif not layer.chooses:
                continue
            self._loop.run(start, row, experts, staged)
            start = row
            if layer.ngram is not None:
                _collect_features(layer.ngram, ngram)
            if layer.chooses:
                layer.enter(self._loop.outputs)
                self._run_script(layer.until_choice, sizes)
                layer.choose()
        self._loop.run(start, len(self._layers) + 1, experts, staged)

    def _size_loop(self, sizes: Sizes) -> None:
        """Puts the programs for a step of that size into the loop."""
        key = sizes, tuple(layer.chooses for layer in self._layers)
        if key == self._loop_key:
            return
        if key not in self._tables:
            self._tables[key] = self._table(sizes)
            if len(self._tables) > _NUM_TABLES:
                self._tables.popitem(last=False)
        self._loop.use(self._tables[key][0])
        self._loop_key = key

    def _table(self, sizes: Sizes) -> tuple[Record, list[Program]]:
        """What the loop does in a step of that size, and the programs that this consists of."""
        table = self._loop.begin_table()
        programs: list[Program] = []
        for row, layer in enumerate(self._layers):
            script = layer.after_choice if layer.chooses else layer.whole
            programs += [script.resize(sizes), layer.shared.resize(sizes)]
            self._loop.set_programs(row, *programs[-2:])
        programs.append(self._last.resize(sizes))
        self._loop.set_programs(len(self._layers), programs[-1], None)
        return table, programs

    def _run_by_turns(self, sizes: Sizes, experts: RoutedExperts, ngram: NgramFeatures | None) -> None:
        """The same, program by program."""
        handed_over = [torch.from_numpy(buffer[: sizes.num_tokens]) for buffer in self._handed_over]
        routed: Tensor | None = None
        for layer in self._layers:
            if layer.ngram is not None:
                _collect_features(layer.ngram, ngram)
            if routed is not None:
                layer.enter(routed.data_ptr())
            if layer.chooses:
                self._run_script(layer.until_choice, sizes)
                layer.choose()
                self._run_script(layer.after_choice, sizes)
            else:
                self._run_script(layer.whole, sizes)
            ticket = experts.submit(layer.number, *handed_over)
            self._run_script(layer.shared, sizes)
            routed = experts.collect(ticket)
        assert routed is not None
        self._last_writing["output"] = routed.data_ptr()
        self._run_script(self._last, sizes)

    def _run_script(self, script: Script, sizes: Sizes) -> None:
        self._team.run(script.resize(sizes))


def _collect_features(embedding: NgramEmbedding, ngram: NgramFeatures | None) -> None:
    assert ngram is not None, "a model with an n-gram layer needs n-gram features"
    features = ngram.collect().numpy()
    embedding.features[: len(features)] = features
