"""What a CPU has that these kernels know how to use.

======== ================================================================= ===============================
name     instructions                                                      typical CPUs
======== ================================================================= ===============================
avx2     AVX2, FMA, F16C                                                   since 2013 (Intel), 2017 (AMD)
avxvnni  and AVX-VNNI: sums of products, of bytes or words, in one         since 2021 (Intel), 2024 (AMD)
         instruction
avx512   AVX2 and AVX-512 F, BW, VL, DQ, VNNI, VBMI, BITALG: the same,     since 2019 (Intel), 2022 (AMD)
         registers twice as wide and as many
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


AVX2 = InstructionSet("avx2", _AVX2, lanes32=8, has_vnni=False, has_multishift=False)
AVXVNNI = InstructionSet("avxvnni", (*_AVX2, "avxvnni"), lanes32=8, has_vnni=True, has_multishift=False)
AVX512 = InstructionSet("avx512", _AVX512, lanes32=16, has_vnni=True, has_multishift=True)

ALL = (AVX512, AVXVNNI, AVX2)
"""The best first."""


@dataclass(frozen=True, slots=True)
class Target:
    """What kernels are made for: the instructions, and to how many bytes activations are rounded, 1 or 2."""

    instructions: InstructionSet
    activation_bytes: int

    @property
    def name(self) -> str:
        """Of both."""
        return f"{self.instructions.name}-int{8 * self.activation_bytes}"


@functools.cache
def supported() -> tuple[InstructionSet, ...]:
    """Those this CPU has, the best first."""
    features = binding.get_host_cpu_features()
    return tuple(
        instructions
        for instructions in ALL
        if all(features.get(feature, False) for feature in instructions.features)
    )
