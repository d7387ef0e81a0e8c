"""Matrix products by ggml, the library under llama.cpp: called in the `xllamacpp` wheel's extension module.

The module exports all of ggml, which promises no layout of its structs. So none is touched: tensors are
made, placed into memory of ours and computed by functions alone; the one struct that is passed is the small
one of `ggml_init`. What the library says of a type is compared with what is known of it, so that renumbered
types are noticed.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import BenchmarkError
from shared.gguf.types import TensorType
from shared.native.task import aligned_zeros

_F32 = 0
# Tensors of one graph: weights, activations, product. More nodes than that are room for none.
_GRAPH_SIZE = 8


class LlamaUnavailableError(BenchmarkError):
    """llama.cpp cannot be used; the text says why."""


def library_path() -> Path:
    """The extension module of the wheel. Raises LlamaUnavailableError."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise LlamaUnavailableError("llama.cpp is missing: pip install xllamacpp")
    found = next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)
    if found is None:
        raise LlamaUnavailableError(f"{Path(spec.origin).parent} has no extension module")
    return found


def aligned_bytes(shape: Sequence[int]) -> NDArray[np.uint8]:
    """Zeros, uint8 of that shape, placed as ggml wants it."""
    return aligned_zeros(int(np.prod(shape, dtype=np.int64))).reshape(shape)


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Ggml:
    """The library, on one thread: that of the caller."""

    def __init__(self) -> None:
        """Raises LlamaUnavailableError."""
        self.library = _open()
        self.library.ggml_cpu_init()
        self.backend = self.library.ggml_backend_cpu_init()
        self.library.ggml_backend_cpu_set_n_threads(self.backend, 1)

    @property
    def instruction_sets(self) -> list[str]:
        """What its kernels were compiled for."""
        names = ("avx", "avx2", "f16c", "fma", "avx_vnni", "avx512", "avx512_vnni", "amx_int8")
        return [name for name in names if getattr(self.library, f"ggml_cpu_has_{name}")()]

    def check_type(self, kind: TensorType) -> None:
        """Raises LlamaUnavailableError where the library means another type by this number."""
        library, number = self.library, kind.type_id
        name = library.ggml_type_name(number)
        theirs = ((name or b"").decode().upper(), library.ggml_blck_size(number))
        if theirs != (kind.name, kind.block_size) or library.ggml_type_size(number) != kind.block_bytes:
            raise LlamaUnavailableError(f"ggml's type {number} is {theirs[0]!r}, not {kind.name}")


class GgmlProducts:
    """Products of one batch of activations with each of many matrices: `compute(number)` does one.

    `weights`: uint8 [num_matrices, num_rows, row_bytes] from `aligned_bytes`.
    `x`: float32 [num_tokens, width]. The result is in `out`, float32 [num_tokens, num_rows]. ggml rounds the
    activations anew every time.
    """

    def __init__(
        self, ggml: Ggml, kind: TensorType, weights: NDArray[np.uint8], x: NDArray[np.float32]
    ) -> None:
        ggml.check_type(kind)
        self._ggml = ggml
        self._library = library = ggml.library
        num_matrices, num_rows, _ = weights.shape
        num_tokens, width = x.shape
        self._weights = weights
        self._x = aligned_bytes((num_tokens, 4 * width)).view(np.float32)
        self._x[:] = x
        self.out = aligned_bytes((num_tokens, 4 * num_rows)).view(np.float32)
        per_matrix = 2 * library.ggml_tensor_overhead() + library.ggml_graph_overhead_custom(
            _GRAPH_SIZE, False
        )
        room = library.ggml_tensor_overhead() + num_matrices * (per_matrix + 64) + 4096
        self._context = library.ggml_init(_InitParams(room, None, True))
        if not self._context:
            raise LlamaUnavailableError("ggml makes no context")
        self._buffers = [
            library.ggml_backend_cpu_buffer_from_ptr(array.ctypes.data, array.nbytes)
            for array in (weights, self._x, self.out)
        ]
        inputs = library.ggml_new_tensor_2d(self._context, _F32, width, num_tokens)
        self._place(1, inputs, self._x)
        self._graphs = []
        for number in range(num_matrices):
            matrix = library.ggml_new_tensor_2d(self._context, kind.type_id, width, num_rows)
            self._place(0, matrix, weights[number])
            product = library.ggml_mul_mat(self._context, matrix, inputs)
            self._place(2, product, self.out)
            graph = library.ggml_new_graph_custom(self._context, _GRAPH_SIZE, False)
            library.ggml_build_forward_expand(graph, product)
            self._graphs.append(graph)

    def compute(self, number: int) -> None:
        """Multiplies with one matrix. Raises LlamaUnavailableError."""
        if code := self._library.ggml_backend_graph_compute(self._ggml.backend, self._graphs[number]):
            raise LlamaUnavailableError(f"ggml's graph ends with {code}")

    def close(self) -> None:
        """Gives ggml's memory back; the arrays are numpy's."""
        for buffer in self._buffers:
            self._library.ggml_backend_buffer_free(buffer)
        self._library.ggml_free(self._context)
        self._buffers, self._graphs = [], []

    def __enter__(self) -> "GgmlProducts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, buffer: int, tensor: int, array: NDArray[np.generic]) -> None:
        library, address = self._library, array.ctypes.data
        code = library.ggml_backend_tensor_alloc(self._buffers[buffer], tensor, address)
        if code or library.ggml_get_data(tensor) != address:
            raise LlamaUnavailableError("ggml does not take a tensor where it is put")


def _open() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    pointer, size, number, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_bool
    extent, text = ctypes.c_int64, ctypes.c_char_p
    for name, result, *arguments in (
        ("ggml_cpu_init", None),
        ("ggml_backend_cpu_init", pointer),
        ("ggml_backend_cpu_set_n_threads", None, pointer, number),
        ("ggml_init", pointer, _InitParams),
        ("ggml_free", None, pointer),
        ("ggml_tensor_overhead", size),
        ("ggml_graph_overhead_custom", size, size, flag),
        ("ggml_type_name", text, number),
        ("ggml_type_size", size, number),
        ("ggml_blck_size", extent, number),
        ("ggml_new_tensor_2d", pointer, pointer, number, extent, extent),
        ("ggml_get_data", pointer, pointer),
        ("ggml_mul_mat", pointer, pointer, pointer, pointer),
        ("ggml_new_graph_custom", pointer, pointer, size, flag),
        ("ggml_build_forward_expand", None, pointer, pointer),
        ("ggml_backend_cpu_buffer_from_ptr", pointer, pointer, size),
        ("ggml_backend_buffer_free", None, pointer),
        ("ggml_backend_tensor_alloc", number, pointer, pointer, pointer),
        ("ggml_backend_graph_compute", number, pointer, pointer),
    ):
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LlamaUnavailableError(f"this release of xllamacpp does not export {name}") from None
        function.restype, function.argtypes = result, arguments
    return library
