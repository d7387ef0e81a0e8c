"""The tensor types of GGUF files that Strata knows: number, name, block size.

A tensor's bytes are rows of equal blocks; a block holds `block_size` weights in `block_bytes` bytes. The
numbers are ggml's; the `gguf` package has them all but Q2_0, which its release on PyPI does not know yet.
How a block decodes is not said here but in `shared.quants`.
"""

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml tensor type."""

    type_id: int
    name: str
    block_size: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` weights; `width` is a multiple of the block size."""
        return width // self.block_size * self.block_bytes


Q2_0 = TensorType(type_id=42, name="Q2_0", block_size=64, block_bytes=18)

_BY_ID: dict[int, TensorType] = {
    int(kind): TensorType(int(kind), kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType
} | {Q2_0.type_id: Q2_0}
_BY_NAME: dict[str, TensorType] = {kind.name: kind for kind in _BY_ID.values()}


def tensor_type(type_id: int) -> TensorType | None:
    """The type with ggml's number `type_id`, or None where it is unknown."""
    return _BY_ID.get(type_id)


def tensor_type_named(name: str) -> TensorType:
    """The type with ggml's name, for example "Q4_K". Raises KeyError where it is unknown."""
    return _BY_NAME[name]
