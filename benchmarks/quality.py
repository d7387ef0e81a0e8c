"""Whether Strata's answers are as good as llama.cpp's: both against exact arithmetic on the same file.

Each rounds activations on its way, llama.cpp to 8 bits, and moves the logits a little by it. How much is the
mean Kullback-Leibler divergence of its predictions from those of Strata's portable kernels, which compute in
float32 with the decoded weights and agree with transformers.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import strata_command
from benchmarks.streaming import AnswerError

PORTABLE = ("--cpu-kernels", "portable")
MAX_RATIO = 1.5
"""Strata may be this many times as far from exact as llama.cpp is ..."""
NEGLIGIBLE = 3e-3
"""... or this far in any case: what rounding does to a real model, and below any effect on text."""

_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Quality:
    """Mean divergences from exact predictions, in nats per token."""

    strata: float
    llama_cpp: float
    strata_top1: float
    """How often the likeliest token is that of exact arithmetic."""
    llama_cpp_top1: float

    @property
    def is_equal(self) -> bool:
        """Whether Strata is as good."""
        return self.strata <= max(NEGLIGIBLE, MAX_RATIO * self.llama_cpp)


class NoReferenceError(Exception):
    """There is nothing exact to compare with; the text says why."""


def compare(
    exact: NDArray[np.float32], strata: NDArray[np.float32], llama_cpp: NDArray[np.float32]
) -> Quality:
    """From logits [tokens, vocabulary] of each. Raises AnswerError where some are no numbers, and
    NoReferenceError where Strata's are bit for bit the exact ones: then both are by the same kernels, by a
    setting that has no effect perhaps, and agreeing with oneself proves nothing."""
    for name, logits in (("exact", exact), ("Strata's", strata), ("llama.cpp's", llama_cpp)):
        if logits.shape != exact.shape or not np.isfinite(logits).all():
            raise AnswerError(f"{name} logits {list(logits.shape)} are not all numbers")
    if np.array_equal(exact, strata):
        raise NoReferenceError(f"Strata's logits are bit for bit the same with {' '.join(PORTABLE)}")
    best = exact.argmax(-1)
    return Quality(
        strata=float(divergences(exact, strata).mean()),
        llama_cpp=float(divergences(exact, llama_cpp).mean()),
        strata_top1=float((strata.argmax(-1) == best).mean()),
        llama_cpp_top1=float((llama_cpp.argmax(-1) == best).mean()),
    )


def divergences(expected: NDArray[np.float32], given: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(expected || given) at each position, from logits [tokens, vocabulary]."""
    log_expected, log_given = _log_softmax(expected), _log_softmax(given)
    result: NDArray[np.float64] = (np.exp(log_expected) * (log_expected - log_given)).sum(-1)
    return result


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def strata_logits(model: Path, token_ids: Sequence[int], flags: Sequence[str]) -> NDArray[np.float32]:
    """By a stack of its own, started and ended for it: [tokens, vocabulary]. Raises AnswerError."""
    with tempfile.TemporaryDirectory() as directory:
        ids, out = Path(directory) / "ids.npy", Path(directory) / "logits.npz"
        np.save(ids, np.array(token_ids, np.int64))
        command = [*strata_command("logits"), str(model), "--ids", str(ids), "--out", str(out), *flags]
        # Ctrl-C reaches the command as it reaches us, and it ends its stack in order.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise AnswerError(f"strata logits ends with {done.returncode}: {done.stderr.strip()[-500:]}")
        with np.load(out) as stored:
            logits: NDArray[np.float32] = stored["logits"]
            return logits


def has_portable_kernels() -> bool:
    """Whether this version of Strata can be told to compute exactly."""
    done = subprocess.run(
        [*strata_command("logits"), "--help"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return PORTABLE[0] in done.stdout
