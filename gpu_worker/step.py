"""Computes one step: gathers its tokens, asks for their n-gram rows, runs the model."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.experts.cpu_way import CpuExperts
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.ngram_way import StagedFeatures
from gpu_worker.scheduler import Work
from gpu_worker.sequence import Sequence

# Logits of so many positions are made at once where a request wants them for its whole prompt.
_LOGIT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Ways:
    """What the model needs from other processes."""

    experts: CpuExperts
    ngram: StagedFeatures | None


def compute(
    model: Qwen4Exp, works: Items[Work], ways: Ways, torch_device: torch.device
) -> list[tuple[Sequence, NDArray[np.float32]]]:
    """Advances the state of every sequence of the step; returns the logits [vocabulary] of those whose next
    token is to be chosen.

    Raises GenerationError; the sequences of the step are then in no usable state.
    """
    if ways.ngram is not None and model.config.ngram is not None:
        ngram_size = model.config.ngram.ngram_size
        windows = [work.sequence.windows(work.start, work.stop, ngram_size) for work in works]
        ways.ngram.submit(np.concatenate(windows))
    streams = model.forward(_batch(works, torch_device), ways.experts, ways.ngram)
    last_rows = []
    at = 0
    for work in works:
        rows = streams[at : at + work.num_tokens]
        at += work.num_tokens
        if work.sequence.request.logits_path:
            _append_logits(model, rows, work.sequence.request.logits_path)
        last_rows.append(rows[-1])
    choosing = [
        (work.sequence, row)
        for work, row in zip(works, last_rows, strict=True)
        if work.reaches_end and work.sequence.request.max_new_tokens
    ]
    if not choosing:
        return []
    logits = model.logits(torch.stack([row for _, row in choosing])).cpu().numpy()
    return [(sequence, row) for (sequence, _), row in zip(choosing, logits, strict=True)]


def _batch(works: Items[Work], torch_device: torch.device) -> Batch:
    token_ids: list[int] = []
    positions: list[int] = []
    spans = []
    for work in works:
        start = len(token_ids)
        token_ids += work.sequence.token_ids[work.start : work.stop]
        positions += range(work.start, work.stop)
        spans.append(Span(start, len(token_ids), work.sequence.state))
    return Batch(
        torch.tensor(token_ids, device=torch_device), torch.tensor(positions, device=torch_device), spans
    )


def _append_logits(model: Qwen4Exp, streams: Tensor, path: str) -> None:
    with open(path, "ab") as file:
        for start in range(0, len(streams), _LOGIT_ROWS):
            logits = model.logits(streams[start : start + _LOGIT_ROWS])
            file.write(logits.cpu().numpy().tobytes())
