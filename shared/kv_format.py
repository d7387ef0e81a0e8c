"""How keys and values are kept: the formats of `--kv-type`, and what a row of each takes.

::

    type   keys   values
    f32    F32    F32
    f16    F16    F16
    int8   INT8   INT8
    k8v4   INT8   INT4

A row is what one position keeps of one kv head: `dim` values. Rows of integers begin with their scales::

    INT8    scales f16[groups of 64]   codes i8[dim]
    INT4    scales f16[groups of 32]   codes u8[dim / 2]

value = code * scale. Codes of INT8 are -127 to 127, and the scale is the largest magnitude of the group /
127. Codes of INT4 are -8 to 7, and the scale is the value farthest from 0 / -8, so that this one has the code
-8 whatever its sign: of the ways to spend 4.5 bits on a value that were tried, the closest one
(docs/long-context.md). The last group of a row has what is left. Byte j of an INT4 group of n has code j in
its lower half and code n / 2 + j in its upper one, each plus 8, where n / 2 is rounded up. A row of integers
takes an even number of bytes, so that the scales of the next one lie where halves may.

What encodes and decodes rows is in `gpu_worker.state.kv_rows` and `gpu_worker.native.kv_rows`.
"""

from dataclasses import dataclass

HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows. `number` names it in records of machine code; `scaled` is how many values share a
    scale, 0 where there are none."""

    number: int
    bits: int
    scaled: int = 0

    def num_scales(self, dim: int) -> int:
        """Of a row of so many values."""
        return -(-dim // self.scaled) if self.scaled else 0

    def row_bytes(self, dim: int) -> int:
        """Of a row of so many values."""
        codes = -(-dim * self.bits // 8)
        return HALF_BYTES * self.num_scales(dim) + (codes + 1 & -2)


F32 = RowFormat(0, 32)
F16 = RowFormat(1, 16)
INT8 = RowFormat(2, 8, scaled=64)
INT4 = RowFormat(3, 4, scaled=32)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A way to keep both."""

    keys: RowFormat
    values: RowFormat

    def position_bytes(self, num_heads: int, dim: int) -> int:
        """What an attention layer keeps of a position."""
        return num_heads * (self.keys.row_bytes(dim) + self.values.row_bytes(dim))


KV_FORMATS = {
    "f32": KvFormat(F32, F32),
    "f16": KvFormat(F16, F16),
    "int8": KvFormat(INT8, INT8),
    "k8v4": KvFormat(INT8, INT4),
}
"""By the name they have in `--kv-type`."""

EXACT = KV_FORMATS["f32"]
"""Keeps what was computed."""

KV_TYPES = ("auto", *KV_FORMATS)


def kv_format(kv_type: str) -> KvFormat:
    """Of a `--kv-type`. `auto` is exact whatever computes: what changes outputs has to be asked for."""
    return EXACT if kv_type == "auto" else KV_FORMATS[kv_type]
