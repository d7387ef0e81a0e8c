"""Drafts the next tokens of the sequences that generate, as many as pay (`payoff`).

Two sources compete: the prediction block (`gpu_worker.model.prediction`), and what followed before where the
latest tokens have come already (`suffix`). The block follows every step: it computes each position that the
trunk has computed, with the token that came next. Then it goes on from its own output, token by token.
"""

import logging
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.sampler import likeliest_tokens
from gpu_worker.sequence import Sequence
from gpu_worker.speculation.drafts import Source
from gpu_worker.speculation.payoff import Payoff
from gpu_worker.state.checkpoint import Checkpoint
from gpu_worker.ways import Ways
from shared.errors import DiskError
from shared.window import WINDOW_TOKENS

_log = logging.getLogger(__name__)

# From so many tokens on a repetition is a long one.
_LONG_MATCH = 8
# While drafts do not pay, every so many requests are followed nevertheless.
_TRY_EVERY = 16


@dataclass(frozen=True, slots=True)
class Followed:
    """What a step has left of a sequence: `streams` [tokens, streams, hidden] of the positions that stay, up
    to its last one, and the checkpoints that were taken on the way."""

    sequence: Sequence
    streams: Tensor
    snapshots: Items[Checkpoint] = ()


class Drafter:
    """The drafts of one engine."""

    def __init__(
        self,
        model: Qwen4Exp,
        torch_device: torch.device,
        *,
        most: int,
        min_probability: float,
        uses_suffixes: bool,
        max_tokens: int,
    ) -> None:
        """Up to `most` drafts a sequence and step; the prediction block goes on while its token has at least
        that probability. It computes up to `max_tokens` at a time, as many as the cpu_worker takes."""
        self._model = model
        self._device = torch_device
        self._most = min(most, WINDOW_TOKENS - 1)
        self._min_probability = min_probability
        self._uses_suffixes = uses_suffixes
        self._max_tokens = max_tokens
        self._num_begun = 0
        self.payoff = Payoff()

    @property
    def drafts_any(self) -> bool:
        """Whether there is anything that could draft."""
        return self._most > 0 and (self._uses_suffixes or self._model.has_prediction)

    def begin(self, sequence: Sequence, checkpoint: Checkpoint | None) -> None:
        """A sequence begins, from its begin or from a checkpoint."""
        drafts = sequence.drafts
        if not (self._model.has_prediction and self._most):
            return
        self._num_begun += 1
        is_tried = self._num_begun % _TRY_EVERY == 0
        if not is_tried and not self.payoff.is_worth(Source.PREDICTION, self._most):
            return
        if checkpoint is None:
            drafts.predicts = True
        elif checkpoint.streams is not None:
            drafts.predicts = drafts.is_behind = True
            drafts.streams = checkpoint.streams
            assert sequence.state is not None
            # The token after its last position was another's.
            sequence.state.predicted = checkpoint.position - 1

    def follow(self, steps: Items[Followed], ways: Ways) -> None:
        """Takes what a step has computed, once its tokens are chosen, and drafts for the next one. Raises
        WorkerFailedError and StepStalledError."""
        started = time.monotonic()
        drafting = [step.sequence for step in steps if self._may_draft(step.sequence)]
        wanted = {id(sequence): self._choose_source(sequence, len(drafting)) for sequence in drafting}
        following = [step for step in steps if step.sequence.drafts.predicts]
        if following:
            try:
                self._predict(following, wanted, ways)
            except DiskError as error:
                _log.error("nothing is predicted any more for %d requests: %s", len(following), error)
                for step in following:
                    step.sequence.drafts.give_up()
        seconds = time.monotonic() - started
        for step in steps:
            step.sequence.drafts.seconds += seconds

    def _may_draft(self, sequence: Sequence) -> bool:
        return not sequence.is_prefilling and sequence.finish_reason is None and self._room(sequence) > 0

    def _room(self, sequence: Sequence) -> int:
        """Drafts that there is use for: the last token of an answer is not followed by one."""
        return min(self._most, sequence.request.max_new_tokens - sequence.num_output_tokens - 1)

    def _choose_source(self, sequence: Sequence, num_sequences: int) -> int:
        """Drafts what was said before where that pays best; how many are wanted of the prediction block."""
        drafts, most, payoff = sequence.drafts, self._room(sequence), self.payoff
        predicted = payoff.how_many(Source.PREDICTION, num_sequences, most) if drafts.predicts else 0
        if not self._uses_suffixes:
            return predicted
        found, num_alike = drafts.lookup.find(sequence.token_ids, most)
        if not found:
            return predicted
        source = Source.LONG_SUFFIX if num_alike >= _LONG_MATCH else Source.SUFFIX
        number = payoff.how_many(source, num_sequences, len(found))
        rate = payoff.rate(source, num_sequences, number)
        usual = payoff.usual(Source.PREDICTION, predicted)
        if not number or rate <= payoff.rate(Source.PREDICTION, num_sequences, usual):
            return predicted
        drafts.token_ids, drafts.source = found[:number], source
        return 0

    def _predict(self, steps: Items[Followed], wanted: dict[int, int], ways: Ways) -> None:
        """Has the block see what the trunk has computed, then drafts with it."""
        started = time.monotonic()
        streams = self._see(steps, ways)
        seen = [(step.sequence, _predicted(step.sequence)) for step in steps]
        group = [place for place, step in enumerate(steps) if wanted.get(id(step.sequence))]
        sequences = [steps[place].sequence for place in group]
        streams = _chosen(streams, group)
        num_drafts = 0
        while sequences:
            num_drafts += 1
            going_on = self._take_likeliest(sequences, streams, wanted)
            sequences = [sequences[place] for place in going_on]
            if sequences:
                token_ids = [[sequence.drafts.token_ids[-1]] for sequence in sequences]
                streams = self._run(sequences, token_ids, _chosen(streams, going_on), ways)
        for sequence, predicted in seen:
            if num_wanted := wanted.get(id(sequence), 0):
                num_drafted = len(sequence.drafts.token_ids)
                self.payoff.note_reached(Source.PREDICTION, num_wanted, num_drafted)
            assert sequence.state is not None
            # What was drafted is computed anew by the trunk, and seen then.
            sequence.state.predicted = predicted
        self.payoff.note_drafts(Source.PREDICTION, num_drafts, time.monotonic() - started)

    def _take_likeliest(
        self, sequences: Items[Sequence], streams: Tensor, wanted: dict[int, int]
    ) -> list[int]:
        """Drafts a token for each sequence, unless it is too unlikely; the places of those that go on."""
        logits = self._model.prediction_logits(streams).cpu().numpy()
        going_on = []
        for place, (sequence, token_id, probability) in enumerate(
            zip(sequences, *(found.tolist() for found in likeliest_tokens(logits)), strict=True)
        ):
            # NaN is not likely enough either.
            if not probability >= self._min_probability:
                continue
            drafts = sequence.drafts
            drafts.token_ids.append(token_id)
            drafts.source = Source.PREDICTION
            if len(drafts.token_ids) < wanted[id(sequence)] and not sequence.is_end(token_id):
                going_on.append(place)
        return going_on

    def _see(self, steps: Items[Followed], ways: Ways) -> Tensor:
        """The block computes the positions of a step: its streams at the last one of each sequence."""
        token_ids, inputs, snapshots = [], [], []
        room = self._max_tokens - sum(len(step.streams) for step in steps)
        for step in steps:
            sequence, drafts = step.sequence, step.sequence.drafts
            streams = step.streams
            if drafts.is_behind and drafts.streams is not None:
                streams = torch.cat([drafts.streams, streams])
                drafts.is_behind = False
            drafts.streams = streams[-1:].clone()
            # Chunks of a prompt may be larger than what the cpu_worker takes.
            while len(streams) > 1 and room < 0:
                size = min(len(streams) - 1, self._max_tokens)
                first = _predicted(sequence) + 1
                own_ids = sequence.token_ids[first : first + size]
                own = [snapshot for snapshot in step.snapshots if first <= snapshot.position < first + size]
                self._run([sequence], [own_ids], streams[:size], ways, [own])
                streams, room = streams[size:], room + size
            first = _predicted(sequence) + 1
            token_ids.append(sequence.token_ids[first : first + len(streams)])
            inputs.append(streams)
            snapshots.append([snapshot for snapshot in step.snapshots if snapshot.position >= first])
        joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        sequences = [step.sequence for step in steps]
        outputs = self._run(sequences, token_ids, joined, ways, snapshots)
        last_rows = np.cumsum([len(own_ids) for own_ids in token_ids]) - 1
        return _chosen(outputs, last_rows.tolist())

    def _run(
        self,
        sequences: Items[Sequence],
        token_ids: Items[Items[int]],
        streams: Tensor,
        ways: Ways,
        snapshots: Items[Items[Checkpoint]] = (),
    ) -> Tensor:
        """Computes the block for the positions that come next in these sequences, with the tokens after
        them."""
        all_ids: list[int] = []
        positions: list[int] = []
        spans = []
        for place, (sequence, own_ids) in enumerate(zip(sequences, token_ids, strict=True)):
            assert sequence.state is not None
            start, first = len(all_ids), sequence.state.predicted
            all_ids += own_ids
            positions += range(first, first + len(own_ids))
            taken = snapshots[place] if snapshots else ()
            spans.append(Span(start, len(all_ids), sequence.state, taken))
        stops = [span.stop for span in spans]
        counts = ways.experts.counts
        counts.begin(stops)
        batch = Batch.of(all_ids, positions, spans, self._device)
        try:
            outputs = self._model.predict(batch, streams, ways.experts)
        except Exception:
            # What was read for it has been read all the same.
            for sequence, span in zip(sequences, spans, strict=True):
                sequence.clock.add_expert_reads(counts, span.start, span.stop)
            raise
        for sequence, span in zip(sequences, spans, strict=True):
            sequence.clock.add_experts(counts, span.start, span.stop, self._model.config.num_experts_used)
            if counts.failure(span.start, span.stop) is not None:
                sequence.drafts.give_up()
        return outputs


def _chosen(streams: Tensor, rows: list[int]) -> Tensor:
    """These rows; a copy only where it is not all of them, or one."""
    if len(rows) == len(streams):
        return streams
    return streams[rows[0] : rows[0] + 1] if len(rows) == 1 else streams[rows]


def _predicted(sequence: Sequence) -> int:
    assert sequence.state is not None
    return sequence.state.predicted
