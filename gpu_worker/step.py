"""Computes one step: gathers its tokens, asks for their n-gram rows, runs the model."""

import contextlib
import errno
import os
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.ngram_way import StagedFeatures
from gpu_worker.scheduler import Work
from gpu_worker.sequence import Sequence
from gpu_worker.ways import Ways
from shared.errors import DiskError, GenerationError, WorkerFailedError

# Logits of so many positions are made at once where a request wants them for its whole prompt.
_LOGIT_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepResult:
    """`choices` are the works after which tokens are to be chosen, each with the logits of its last token and
    of its drafts [1 + drafts, vocabulary]; `failures` the sequences that cannot go on, though the step itself
    succeeded; `streams` [tokens, streams, hidden] are valid until the next step."""

    choices: list[tuple[Work, NDArray[np.float32]]]
    failures: list[tuple[Sequence, GenerationError]]
    streams: Tensor


def compute(model: Qwen4Exp, works: Items[Work], ways: Ways, torch_device: torch.device) -> StepResult:
    """Advances the state of every sequence of the step.

    Raises GenerationError; the sequences of the step are then in no usable state.
    """
    if ways.ngram is not None and model.config.ngram is not None:
        ngram_size = model.config.ngram.ngram_size
        windows = [work.sequence.windows(work.start, work.stop, ngram_size, work.drafts) for work in works]
        ways.ngram.submit(windows[0] if len(windows) == 1 else np.concatenate(windows))
    batch = _batch(model, works, torch_device)
    streams = model.forward(batch, ways.experts, ways.ngram)
    choosing: list[Work] = []
    last_rows: list[int] = []
    failures: list[tuple[Sequence, GenerationError]] = []
    for work, span in zip(works, batch.spans, strict=True):
        request = work.sequence.request
        try:
            if ways.ngram is not None:
                _account_rows(work.sequence, ways.ngram, span.start, span.stop)
            if (failure := ways.experts.counts.failure(span.start, span.stop)) is not None:
                raise failure
            if request.logits_path:
                _append_logits(model, streams[span.start : span.stop], request.logits_path)
        except OSError as error:
            failures.append((work.sequence, GenerationError(f"the logits cannot be written: {error}")))
            continue
        except GenerationError as error:
            failures.append((work.sequence, error))
            continue
        if work.reaches_end and request.max_new_tokens:
            choosing.append(work)
            last_rows += range(span.stop - 1 - len(work.drafts), span.stop)
    if not choosing:
        return StepResult([], failures, streams)
    # Where every token of the step is the last of its sequence, no row is copied.
    chosen_rows = streams if len(last_rows) == batch.num_tokens else streams[last_rows]
    logits = model.logits(chosen_rows).cpu().numpy()
    stops = np.cumsum([1 + len(work.drafts) for work in choosing])
    return StepResult(list(zip(choosing, np.split(logits, stops[:-1]), strict=True)), failures, streams)


def places(works: Items[Work]) -> Iterator[tuple[Work, int, int]]:
    """Each work, with the first of its tokens among those of the step, and the first behind them."""
    stop = 0
    for work in works:
        start, stop = stop, stop + work.num_tokens
        yield work, start, stop


def account_failed(works: Items[Work], ways: Ways) -> None:
    """Books what was read for a step that has failed on its requests, as far as it is known."""
    for work, start, stop in places(works):
        work.sequence.clock.add_expert_reads(ways.experts.counts, start, stop)
        if ways.ngram is not None and ways.ngram.has_come:
            with contextlib.suppress(GenerationError):
                _account_rows(work.sequence, ways.ngram, start, stop)


def _account_rows(sequence: Sequence, ngram: StagedFeatures, start: int, stop: int) -> None:
    """Books n-gram rows of the step's tokens `start` to `stop` on the request whose they are.

    Raises DiskError where some were not read, WorkerFailedError where the stager has left it: what was
    computed without them is worth nothing, but others of the step do not need them.
    """
    reads = ngram.reads(start, stop)
    clock = sequence.clock
    clock.ngram_rows += (stop - start) * ngram.rows_per_token
    clock.ngram_hits += reads.num_hits
    clock.ngram_read_s += ngram.read_s
    clock.add_reads(ngram.file, reads.num_reads, reads.num_bytes, ngram.disk_wait_s)
    if reads.error_number == errno.ECANCELED:
        raise WorkerFailedError("the stager was asked to stop while it read rows of the n-gram table")
    if reads.error_number:
        raise DiskError.of(ngram.file, "rows of the n-gram table", reads.error_number)


def _batch(model: Qwen4Exp, works: Items[Work], torch_device: torch.device) -> Batch:
    token_ids: list[int] = []
    positions: list[int] = []
    spans = []
    for work in works:
        sequence = work.sequence
        assert sequence.state is not None, "a sequence that runs has its state"
        start = len(token_ids)
        token_ids += sequence.token_ids[work.start : work.stop]
        token_ids += work.drafts
        positions += range(work.start, work.start + work.num_tokens)
        spans.append(Span(start, len(token_ids), sequence.state, work.snapshots))
    return Batch.of(token_ids, positions, spans, torch_device)


def _append_logits(model: Qwen4Exp, streams: Tensor, path: str) -> None:
    # Not made anew where the client has left and the gateway has removed it.
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "ab") as file:
        for start in range(0, len(streams), _LOGIT_ROWS):
            logits = model.logits(streams[start : start + _LOGIT_ROWS])
            file.write(logits.cpu().numpy().tobytes())
