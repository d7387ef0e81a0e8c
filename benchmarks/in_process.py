"""The model as the gpu_worker computes it, with the work of the other processes done on the spot.

What is real: the forward pass on its device, the experts of the cpu_worker, hash and table of the stager.
What is not there: processes, rings, the scheduler.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_worker.expert_layer import ExpertLayer
from gpu_worker.device.cpu import CpuDevice
from gpu_worker.device.interface import Device
from gpu_worker.device.torch_device import TorchDevice
from gpu_worker.model.batch import Batch, Span
from gpu_worker.model.interface import RoutedExperts
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.state.checkpoint import Checkpoint
from gpu_worker.state.sequence_state import SequenceState
from shared.config import GpuWorkerConfig
from shared.draft_model import open_model
from shared.gguf.model import GGUFModel
from shared.kv_format import EXACT, kv_format
from shared.model_config import NgramConfig, Qwen4ExpConfig, read_model_config
from shared.native.team import Team
from shared.tensor_catalog import check_tensors
from stager.ngram_hash import windows_of
from stager.ngram_rows import open_rows


class LocalExperts:
    """The routed experts, computed when they are submitted."""

    def __init__(self, model: GGUFModel, config: Qwen4ExpConfig, team: Team) -> None:
        self._layers = [ExpertLayer(model, layer) for layer in range(config.num_expert_layers)]
        self._team = team
        self._output = torch.empty(0)

    def submit(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> int:
        """Computes the layer."""
        activations = x.cpu().numpy()
        output = np.empty_like(activations)
        routes = expert_ids.cpu().numpy().astype(np.int32), weights.cpu().numpy()
        self._layers[layer].compute(activations, *routes, output, self._team)
        self._output = torch.from_numpy(output).to(x.device)
        return layer

    def collect(self, ticket: int) -> Tensor:
        """What the last `submit` computed."""
        return self._output


class LocalFeatures:
    """The n-gram features of windows that were set before the step."""

    def __init__(self, model: GGUFModel, config: NgramConfig, torch_device: torch.device) -> None:
        self._rows = open_rows(model, config)
        self._device = torch_device
        self.windows = np.empty((0, config.ngram_size), np.int32)

    def collect(self) -> Tensor:
        """Hashed and read now."""
        return torch.from_numpy(self._rows.features(self.windows)).to(self._device)


@dataclass(slots=True)
class RunningSequence:
    """One sequence and its state in the model."""

    state: SequenceState
    token_ids: list[int] = field(default_factory=list)

    def roll_back(self, num_tokens: int) -> None:
        """Takes back the last tokens of the last step, until so many are left in all."""
        self.state.roll_back(num_tokens)
        del self.token_ids[num_tokens:]


class InProcessModel:
    """A model file, ready to compute."""

    def __init__(
        self,
        path: Path,
        torch_device: torch.device | None = None,
        num_threads: int = 1,
        team: Team | None = None,
        settings: GpuWorkerConfig | None = None,
        draft_path: Path | None = None,
    ) -> None:
        """On the CpuDevice, or on a TorchDevice where `torch_device` is given. `team` computes everything
        then, instead of one of `num_threads` and, for the experts, another of one. Of `settings` only how
        positions are scaled, and how keys and values are kept, is taken."""
        self.file = model = open_model(path, draft_path)
        self.config = read_model_config(model, settings)
        check_tensors(model, self.config)
        self.device: Device
        if torch_device is None:
            self.device = CpuDevice(model, num_threads)
            self.device.team = team or self.device.team
        else:
            self.device = TorchDevice(model, torch_device)
        has_own_head = "output.weight" in model
        self.model = Qwen4Exp(
            self.device,
            self.config,
            has_own_head=has_own_head,
            report=lambda activity, progress: None,
            kv_format=kv_format(settings.kv_type) if settings is not None else EXACT,
        )
        self.experts: RoutedExperts = LocalExperts(model, self.config, team or Team(1))
        ngram = self.config.ngram
        self.features = LocalFeatures(model, ngram, self.device.torch_device) if ngram is not None else None

    def restored(self, checkpoint: Checkpoint, token_ids: Sequence[int]) -> RunningSequence:
        """A sequence that goes on from a checkpoint of one that began with these tokens."""
        sequence = self.new_sequence()
        checkpoint.restore(sequence.state, self.model.pages)
        sequence.token_ids += token_ids[: checkpoint.position]
        return sequence

    def new_sequence(self) -> RunningSequence:
        """A sequence that has not begun."""
        return RunningSequence(self.model.new_state())

    def step(
        self,
        pieces: Sequence[tuple[RunningSequence, Sequence[int]]],
        snapshots: Sequence[Checkpoint] = (),
    ) -> list[NDArray[np.float32]]:
        """Appends tokens to sequences, all in one batch; the logits [tokens, vocabulary] of each piece.
        `snapshots` are taken of the first sequence, on the way."""
        token_ids: list[int] = []
        positions: list[int] = []
        windows: list[NDArray[np.int32]] = []
        spans: list[Span] = []
        for sequence, new_ids in pieces:
            start, num_tokens = len(sequence.token_ids), len(new_ids)
            sequence.token_ids += new_ids
            first = len(token_ids)
            taken = snapshots if not spans else ()
            spans.append(Span(first, first + num_tokens, sequence.state, taken))
            token_ids += new_ids
            positions += range(start, start + num_tokens)
            if self.config.ngram is not None:
                size = self.config.ngram.ngram_size
                # Not all of a long context again.
                seen = max(0, start + 1 - size)
                own_windows = windows_of(np.array(sequence.token_ids[seen:], np.int32), size)
                windows.append(own_windows[start - seen :])
        if self.features is not None:
            self.features.windows = np.concatenate(windows)
        device = self.device.torch_device
        batch = Batch(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), spans)
        streams = self.model.forward(batch, self.experts, self.features)
        logits = self.model.logits(streams).cpu().numpy()
        return np.split(logits, [span.stop for span in spans[:-1]])

    def logits(self, token_ids: Sequence[int], chunk_sizes: Iterable[int] = ()) -> NDArray[np.float32]:
        """Of a whole sequence [tokens, vocabulary], taken in chunks of these sizes; what is left in one."""
        sequence = self.new_sequence()
        parts, at = [], 0
        for size in [*chunk_sizes, len(token_ids)]:
            if chunk := token_ids[at : at + size]:
                parts += self.step([(sequence, chunk)])
            at += size
        return np.concatenate(parts)

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation."""
        sequence = self.new_sequence()
        new_ids, output = list(token_ids), []
        for _ in range(num_tokens):
            (logits,) = self.step([(sequence, new_ids)])
            new_ids = [int(logits[-1].argmax())]
            output += new_ids
        return output
