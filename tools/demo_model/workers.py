"""The training loop: several processes, one model in shared memory.

Each worker has one thread and computes the gradient of its own batch. Two cores that other programs use too
give nearly twice the speed that way, where two threads in one process would mostly wait for each other.
What is trained is a `Task`: `train` and `train_prediction` have one each.

A run's directory is a checkpoint (`checkpoint`), with `training.pt` beside the weights for going on where
the run stopped, and `log.txt`.
"""

import argparse
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random
from typing import Protocol

import torch
import torch.multiprocessing as multiprocessing
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.batches import Batch, BatchSource
from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import compile_kernels
from tools.demo_model.optimizer import Hyperparameters, SharedOptimizer

_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""One thread; and glibc keeps freed activations instead of returning them and faulting them in again."""
_LOG_EVERY = 50


class Task(Protocol):
    """What is trained. Pickled to each worker; parameters stay shared."""

    @property
    def config(self) -> DemoConfig:
        """Of the model."""
        ...

    @property
    def module(self) -> nn.Module:
        """Holds the parameters that are trained: those that require a gradient."""
        ...

    @property
    def lengths(self) -> Mapping[int, float]:
        """Sequence lengths and how often a batch has each."""
        ...

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """What to minimise, and what to log."""
        ...

    def evaluate(self, tokenizer: Tokenizer) -> str:
        """A line for the log."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The weights of the checkpoint."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a run goes, by step."""

    num_steps: int
    warm_up_steps: int = 50
    decay_share: float = 0.5
    """Last part of the run, in which the rate falls to zero."""
    recall_steps: int = 600
    """Over these the share of recall exercises falls from its start to its end."""
    recall_start: float = 0.5
    recall_end: float = 0.03

    def rate(self, step: int) -> float:
        """Factor of the learning rates."""
        left = (self.num_steps - step) / (self.num_steps * self.decay_share)
        return min(1.0, (step + 1) / self.warm_up_steps, max(left, 0.01))

    def recall_share(self, step: int) -> float:
        """Share of recall exercises among the sequences."""
        progress = min(1.0, step / self.recall_steps)
        return self.recall_start + (self.recall_end - self.recall_start) * progress


@dataclass(frozen=True, slots=True)
class Run:
    """Everything about a run but what is trained."""

    output: Path
    tokenizer_json: str
    schedule: Schedule
    rates: Hyperparameters
    is_resumed: bool
    batch_tokens: int
    """Of all workers together."""
    num_workers: int
    seed: int
    save_every_s: float
    evaluate_every: int


def add_run_arguments(parser: argparse.ArgumentParser, num_steps: int) -> None:
    """The options that every training has."""
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=num_steps)
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of all workers together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate-factor", type=float, default=1.0, help="multiplies all learning rates")
    parser.add_argument(
        "--decay-share", type=float, default=0.5, help="last part of the run, with falling rate"
    )
    parser.add_argument("--recall-start", type=float, default=0.5, help="share of recall exercises at first")
    parser.add_argument("--recall-end", type=float, default=0.03, help="share of recall exercises later")
    parser.add_argument("--save-every-s", type=float, default=600.0)
    parser.add_argument("--evaluate-every", type=int, default=500)


def run_of(arguments: argparse.Namespace, tokenizer: Tokenizer, is_resumed: bool) -> Run:
    """The run that the options describe."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        arguments.steps,
        decay_share=arguments.decay_share,
        recall_start=arguments.recall_start,
        recall_end=arguments.recall_end,
    )
    return Run(
        arguments.output,
        tokenizer.to_str(),
        schedule,
        Hyperparameters().scaled(arguments.rate_factor),
        is_resumed,
        arguments.batch_tokens,
        arguments.workers,
        arguments.seed,
        arguments.save_every_s,
        arguments.evaluate_every,
    )


def train(task: Task, run: Run) -> None:
    """Runs until the last step. Raises what a worker raised."""
    optimizer = SharedOptimizer(task.module, run.rates, run.num_workers)
    first_step = 0
    if run.is_resumed:
        stored = torch.load(run.output / "training.pt")
        first_step = stored["num_steps"]
        optimizer.load_state(stored["optimizer"])
    os.environ.update(_WORKER_ENVIRONMENT)
    barrier = multiprocessing.get_context("spawn").Barrier(run.num_workers)
    multiprocessing.spawn(_work, (task, run, first_step, optimizer, barrier), nprocs=run.num_workers)


def _work(
    worker: int, task: Task, run: Run, first_step: int, optimizer: SharedOptimizer, barrier: Barrier
) -> None:
    """The loop of one worker; worker 0 also logs, evaluates and saves.

    Nothing but `optimizer.step` writes to what workers share, and it runs between two barriers.
    """
    # torch tells workers of the parent's death by this signal, which a shell's background jobs ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    compile_kernels()
    tokenizer = Tokenizer.from_str(run.tokenizer_json)
    source = BatchSource(tokenizer, task.config, run.batch_tokens // run.num_workers)
    optimizer.attach(task.module, worker)
    share = optimizer.share_of(worker, run.num_workers)
    lengths, frequencies = list(task.lengths), list(task.lengths.values())
    log = _Log(run.output / "log.txt")
    last_save = time.monotonic()
    for step in range(first_step, run.schedule.num_steps):
        # All workers draw the same length, so that none waits long for another; the texts are their own.
        length = Random(f"{run.seed} {step}").choices(lengths, frequencies)[0]
        batch = source.draw(Random(f"{run.seed} {step} {worker}"), length, run.schedule.recall_share(step))
        loss, figures = task.loss(batch)
        loss.backward()
        barrier.wait()
        rate = run.schedule.rate(step)
        optimizer.step(share, step + 1, rate)
        barrier.wait()
        if worker != 0:
            continue
        log.add(figures, run.batch_tokens)
        num_done = step + 1
        is_last = num_done == run.schedule.num_steps
        if num_done % _LOG_EVERY == 0:
            log.flush(num_done, rate)
        if num_done % run.evaluate_every == 0 or is_last:
            log.write("  " + task.evaluate(tokenizer))
        if is_last or time.monotonic() - last_save > run.save_every_s:
            state = {name: weight.clone() for name, weight in task.state().items()}
            Checkpoint(task.config, state, tokenizer).save(run.output)
            _save_progress(run.output, optimizer, num_done)
            last_save = time.monotonic()


def _save_progress(directory: Path, optimizer: SharedOptimizer, num_done: int) -> None:
    partial = directory / "training.pt.partial"
    torch.save({"num_steps": num_done, "optimizer": optimizer.state()}, partial)
    partial.rename(directory / "training.pt")


class _Log:
    """Averages what happens between two lines of the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start()

    def _start(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._num_tokens = 0
        self._since = time.monotonic()

    def write(self, line: str) -> None:
        """One line, to the file and to the terminal."""
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def add(self, figures: dict[str, float], num_tokens: int) -> None:
        """Counts one step; a figure may be missing from some steps."""
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        self._num_tokens += num_tokens

    def flush(self, step: int, rate: float) -> None:
        """Writes the averages and starts anew."""
        speed = self._num_tokens / (time.monotonic() - self._since)
        means = " ".join(f"{name} {self._sums[name] / self._counts[name]:.4f}" for name in self._sums)
        self.write(f"step {step} {means} rate {rate:.3f} tokens/s {speed:.0f}")
        self._start()
