"""llama.cpp without a server: a process that computes what it is told on standard input, line by line.

    python -m benchmarks.llama_cpp MODEL.gguf --threads 2 --context 4096 [--lazy] [--plain]

The wheel's extension module exports the functions of `llama.h`, which ctypes can call. This is the stricter
of the two anchors: no HTTP, no sampler chain, nothing but `llama_decode` and a search for the largest logit.
Batch sizes, types of the KV cache and everything else are the library's defaults.

Structs change between releases without notice, so what the library says its defaults are is compared with
what is known of them. One JSON object per line each way::

    -> {"do": "generate", "prompt": [ids], "num_new": n}
    <- {"token_ids": [n ids], "seconds": [n]}              from the request to each of them
    -> {"do": "logits", "prompt": [ids], "out": "file.npy"}
    <- {"shape": [tokens, vocabulary]}

The first line it says is `{"ready": true}`. It ends with its input.
"""

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ggml import LlamaUnavailableError, library_path
from benchmarks.llama_process import begin

LAZY, PLAIN = "--lazy", "--plain"
"""Switches of the command line."""

F32, F16 = 0, 1
"""ggml's numbers of these types."""
_DEFAULT_BATCH = 2048
_ERROR_LEVEL = 4
# Of `enum llama_load_mode` and `llama_lazy_mode`.
_AUTO_LOAD, _AUTO_LAZY, _LAZY = -1, 1, 2


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

    def check(self) -> None:
        """Raises LlamaUnavailableError where fields do not hold the defaults they are known to."""
        looks_right = (
            (self.n_ctx, self.n_batch, self.n_ubatch, self.n_seq_max) == (512, _DEFAULT_BATCH, 512, 1)
            and self.n_threads == self.n_threads_batch
            and (self.rope_scaling_type, self.pooling_type, self.attention_type) == (-1, -1, -1)
            and self.cb_eval is None
            and (self.type_k, self.type_v) == (F16, F16)
        )
        if not looks_right:
            raise LlamaUnavailableError("this release of llama.cpp lays its parameters out in another way")


class _ModelParams(ctypes.Structure):
    """`llama_model_params` as far as it is needed, with room for the rest."""

    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress", "progress_data", "kv_overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        ("rest", ctypes.c_byte * 512),
    )

    def check(self) -> None:
        """Raises LlamaUnavailableError where fields do not hold the defaults they are known to."""
        looks_right = (
            (self.devices, self.tensor_buft_overrides, self.tensor_split) == (None, None, None)
            and (self.load_mode, self.lazy_mode, self.main_gpu) == (_AUTO_LOAD, _AUTO_LAZY, 0)
            and (self.vocab_only, self.check_tensors, self.use_extra_bufts) == (False, False, True)
        )
        if not looks_right:
            raise LlamaUnavailableError("this release of llama.cpp lays its parameters out in another way")


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


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _log_error(level: int, text: bytes, _: int | None) -> None:
    if level == _ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


# Kept here, since the library calls it for as long as it is there.
_log_errors = _LogCallback(_log_error)


class LlamaCpp:
    """One model and one sequence."""

    def __init__(
        self,
        path: str,
        num_threads: int,
        context: int,
        cache_type: int = F16,
        *,
        is_lazy: bool = False,
        repacks: bool = True,
    ) -> None:
        """`cache_type` is that of keys and values; `is_lazy`: rows of the n-gram table are read when they are
        needed, even of a small one; without `repacks` no weights are copied into an order that is faster to
        compute with. Raises LlamaUnavailableError."""
        self._library = library = _open()
        library.llama_log_set(_log_errors, None)
        library.llama_backend_init()
        model_params = library.llama_model_default_params()
        if is_lazy or not repacks:
            model_params.check()
            model_params.lazy_mode = _LAZY if is_lazy else _AUTO_LAZY
            model_params.use_extra_bufts = repacks
        self._model = library.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise LlamaUnavailableError(f"llama.cpp does not load {path}")
        params = library.llama_context_default_params()
        params.check()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = cache_type
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise LlamaUnavailableError("llama.cpp makes no context")
        self._batch = library.llama_batch_init(_DEFAULT_BATCH, 0, 1)
        vocabulary = library.llama_model_get_vocab(self._model)
        self._vocab_size: int = library.llama_vocab_n_tokens(vocabulary)

    def generate(self, prompt: Sequence[int], num_new: int) -> tuple[list[int], list[float]]:
        """Greedy tokens after a prompt, and the time from the call to each of them in seconds."""
        began = time.perf_counter()
        self._clear()
        num_rows = 0
        for first in range(0, len(prompt), _DEFAULT_BATCH):
            num_rows = self._decode(prompt[first : first + _DEFAULT_BATCH], first, wants_all=False)
        token_ids: list[int] = []
        seconds: list[float] = []
        for place in range(len(prompt), len(prompt) + num_new):
            token_ids.append(int(self._logits(num_rows - 1).argmax()))
            seconds.append(time.perf_counter() - began)
            if len(token_ids) < num_new:
                num_rows = self._decode(token_ids[-1:], place, wants_all=False)
        return token_ids, seconds

    def logits(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Of every position [tokens, vocabulary]; at most a batch of tokens."""
        self._clear()
        num_rows = self._decode(prompt, 0, wants_all=True)
        return np.stack([self._logits(row) for row in range(num_rows)])

    def _clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _decode(self, token_ids: Sequence[int], first: int, wants_all: bool) -> int:
        """Computes tokens at places from `first` on; returns how many."""
        batch = self._batch
        batch.n_tokens = len(token_ids)
        last = len(token_ids) - 1
        for row, token_id in enumerate(token_ids):
            batch.token[row], batch.pos[row], batch.logits[row] = token_id, first + row, 0
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = wants_all or row == last
        if code := self._library.llama_decode(self._context, batch):
            raise LlamaUnavailableError(f"llama_decode answers {code}")
        return len(token_ids)

    def _logits(self, row: int) -> NDArray[np.float32]:
        """Where the library keeps them: valid until the next step."""
        address = self._library.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(address, (self._vocab_size,))


def _open() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    for name, result, *arguments in (
        ("llama_log_set", None, _LogCallback, pointer),
        ("llama_backend_init", None),
        ("llama_model_default_params", _ModelParams),
        ("llama_context_default_params", _ContextParams),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _ModelParams),
        ("llama_init_from_model", pointer, pointer, _ContextParams),
        ("llama_model_get_vocab", pointer, pointer),
        ("llama_vocab_n_tokens", integer, pointer),
        ("llama_batch_init", _Batch, integer, integer, integer),
        ("llama_decode", integer, pointer, _Batch),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, integer),
        ("llama_get_memory", pointer, pointer),
        ("llama_memory_clear", None, pointer, ctypes.c_bool),
    ):
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LlamaUnavailableError(f"this release of xllamacpp does not export {name}") from None
        function.restype, function.argtypes = result, arguments
    return library


def _answer(llama: LlamaCpp, request: dict[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "generate":
            token_ids, seconds = llama.generate(request["prompt"], request["num_new"])
            return {"token_ids": token_ids, "seconds": seconds}
        case "logits":
            logits = llama.logits(request["prompt"])
            np.save(request["out"], logits)
            return {"shape": list(logits.shape)}
        case unknown:
            raise ValueError(f"cannot do {unknown!r}")


def main() -> None:
    """Answers until its input ends."""
    parsed, answers = begin(
        __doc__, {LAZY: "read rows of the n-gram table on demand", PLAIN: "repack nothing"}
    )
    try:
        llama = LlamaCpp(
            parsed.model, parsed.threads, parsed.context, is_lazy=parsed.lazy, repacks=not parsed.plain
        )
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(llama, json.loads(line))), file=answers, flush=True)
    except LlamaUnavailableError as error:
        sys.exit(f"llama.cpp: {error}")


if __name__ == "__main__":
    main()
