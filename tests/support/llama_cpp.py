"""Logits by llama.cpp, the other program that reads these files: the C library in the `xllamacpp` wheel.

The wheel's own interface gives text, not logits, but its extension module exports the functions of `llama.h`,
which ctypes can call. Structs change between releases without notice. So what the library says its defaults
are is compared with what is known of them, and all of it runs in a process of its own, which may crash.

    python -m tests.support.llama_cpp MODEL.gguf IDS.npy LOGITS.npy
"""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_TIMEOUT_S = 100
_NUM_THREADS = 2
_CONTEXT = 1024
_F16, _F32 = 1, 0


class LlamaUnavailableError(Exception):
    """llama.cpp cannot be asked; the text says why."""


def logits(path: Path, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Of every position [tokens, vocabulary]; keys and values are kept in float32.

    Raises LlamaUnavailableError.
    """
    if _library_path() is None:
        raise LlamaUnavailableError("the xllamacpp wheel is not installed")
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


def _library_path() -> Path | None:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)


class _ContextParams(ctypes.Structure):
    """`llama_context_params` as far as it is needed; the rest is room for whatever follows. A struct of this
    size is passed and returned in memory, so a callee that knows a shorter one does not notice."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, ctypes.c_uint32) for name in ("n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type")),
        *((name, ctypes.c_int32) for name in ("rope_scaling_type", "pooling_type", "attention_type")),
        ("flash_attn_type", ctypes.c_int32),
        *((f"rope_or_yarn_{number}", ctypes.c_float) for number in range(6)),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("rest", ctypes.c_byte * 512),
    )

    def looks_right(self) -> bool:
        """Whether fields from the beginning to the last that is set hold the defaults they are known to."""
        return (
            (self.n_ctx, self.n_batch, self.n_ubatch, self.n_seq_max) == (512, 2048, 512, 1)
            and self.n_threads == self.n_threads_batch
            and (self.rope_scaling_type, self.pooling_type, self.attention_type) == (-1, -1, -1)
            and self.cb_eval is None
            and (self.type_k, self.type_v) == (_F16, _F16)
        )


class _ModelParams(ctypes.Structure):
    """`llama_model_params`, of which nothing is changed."""

    _fields_ = (("whole", ctypes.c_byte * 512),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _open_library() -> ctypes.CDLL:
    path = _library_path()
    if path is None:
        raise SystemExit("the xllamacpp wheel is not installed")
    library = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    for name, result, *arguments in (
        ("llama_model_default_params", _ModelParams),
        ("llama_context_default_params", _ContextParams),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _ModelParams),
        ("llama_init_from_model", pointer, pointer, _ContextParams),
        ("llama_model_get_vocab", pointer, pointer),
        ("llama_vocab_n_tokens", integer, pointer),
        ("llama_set_n_threads", None, pointer, integer, integer),
        ("llama_batch_init", _Batch, integer, integer, integer),
        ("llama_decode", integer, pointer, _Batch),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, integer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compute(path: str, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    library = _open_library()
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {path}")
    params = library.llama_context_default_params()
    if not params.looks_right():
        raise SystemExit("this release of llama.cpp lays its parameters out in another way")
    params.n_ctx = _CONTEXT
    params.type_k = params.type_v = _F32
    context = library.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    library.llama_set_n_threads(context, _NUM_THREADS, _NUM_THREADS)
    batch = library.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for place, token_id in enumerate(token_ids.tolist()):
        batch.token[place], batch.pos[place], batch.logits[place] = token_id, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    if code := library.llama_decode(context, batch):
        raise SystemExit(f"llama_decode answers {code}")
    num_tokens = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    rows = [library.llama_get_logits_ith(context, place) for place in range(len(token_ids))]
    return np.stack([np.ctypeslib.as_array(row, (num_tokens,)).copy() for row in rows])


if __name__ == "__main__":
    np.save(sys.argv[3], _compute(sys.argv[1], np.load(sys.argv[2])))
