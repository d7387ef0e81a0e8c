"""What a CPU has that these kernels know how to use.

======== ================================================================= ===============================
name     instructions                                                      typical CPUs
======== ================================================================= ===============================
avx2     AVX2, FMA, F16C                                                   since 2013 (Intel), 2017 (AMD)
avx512   and AVX-512 F, BW, VL, DQ, VNNI, VBMI, BITALG: sums of products   since 2019 (Intel), 2022 (AMD)
         of bytes in one instruction, registers twice as wide and as many
======== ================================================================= ===============================

On any other CPU the portable kernels serve.
"""

import functools
from dataclasses import dataclass

from llvmlite import binding

_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "popcnt", "movbe")
_AVX512 = (
    *_AVX2,
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vnni", "avx512vbmi", "avx512bitalg"),
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`lanes32`: 32-bit lanes of the registers the tile kernel uses, and so rows of a tile."""

    name: str
    features: tuple[str, ...]
    lanes32: int
    has_vnni: bool
    has_multishift: bool
    most_row_tokens: int


AVX2 = InstructionSet("avx2", _AVX2, lanes32=8, has_vnni=False, has_multishift=False, most_row_tokens=4)
AVX512 = InstructionSet("avx512", _AVX512, lanes32=16, has_vnni=True, has_multishift=True, most_row_tokens=8)

ALL = (AVX512, AVX2)
"""The best first."""


@functools.cache
def supported() -> tuple[InstructionSet, ...]:
    """Those this CPU has, the best first."""
    features = binding.get_host_cpu_features()
    return tuple(
        instructions
        for instructions in ALL
        if all(features.get(feature, False) for feature in instructions.features)
    )
