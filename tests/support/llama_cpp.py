"""Logits by llama.cpp, the other program that reads these files (`benchmarks.llama_cpp`), in a process of its
own, which may crash.

    python -m tests.support.llama_cpp MODEL.gguf IDS.npy LOGITS.npy
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.ggml import LlamaUnavailableError, library_path
from benchmarks.llama_cpp import F32, LlamaCpp

__all__ = ["LlamaUnavailableError", "logits"]

_TIMEOUT_S = 100
_NUM_THREADS = 2
_CONTEXT = 1024


def logits(path: Path, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Of every position [tokens, vocabulary]; keys and values are kept in float32.

    Raises LlamaUnavailableError.
    """
    library_path()
    with tempfile.TemporaryDirectory() as directory:
        ids, out = Path(directory) / "ids.npy", Path(directory) / "logits.npy"
        np.save(ids, np.array(token_ids, np.int32))
        command = [sys.executable, "-m", __name__, str(path), str(ids), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise LlamaUnavailableError(f"llama.cpp took more than {_TIMEOUT_S} s") from None
        if done.returncode or not out.exists():
            last_words = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise LlamaUnavailableError(
                f"llama.cpp ended with {done.returncode}; its last words: {last_words}"
            )
        result: NDArray[np.float32] = np.load(out)
        return result


def _compute(path: str, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    try:
        return LlamaCpp(path, _NUM_THREADS, _CONTEXT, cache_type=F32).logits(token_ids.tolist())
    except LlamaUnavailableError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    np.save(sys.argv[3], _compute(sys.argv[1], np.load(sys.argv[2])))
