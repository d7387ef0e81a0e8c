"""Which kernels a process computes with."""

import numpy as np
import pytest

from shared.config import CPU_ACTIVATIONS, CPU_KERNELS
from shared.errors import ResourceError
from shared.gguf.types import tensor_type_named
from shared.quants import (
    ACTIVATIONS,
    CHOICES,
    block_format,
    choice,
    choose_kernels,
    kernel_target,
    matmul,
    uses_codes,
)
from shared.quants.simd.instruction_set import ALL, AVX2, Target
from tests.support.kernels import using_kernels
from tests.support.quant_blocks import dequantize, random_rows


def test_the_setting_names_them_all() -> None:
    """The settings list them by hand, since importing the kernels takes long."""
    assert set(CPU_KERNELS) == set(CHOICES)
    assert ACTIVATIONS == CPU_ACTIVATIONS


def test_auto_takes_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, instructions in enumerate(ALL):
        monkeypatch.setattr(choice, "supported", lambda number=number: ALL[number:])
        with using_kernels("auto"):
            for activations, num_bytes in (("int16", 2), ("int8", 1)):
                assert choose_kernels("auto", activations) == f"{instructions.name}-{activations}"
                assert kernel_target() == Target(instructions, num_bytes)
                rows = choose_kernels("auto", activations, deterministic=True)
                assert rows == f"{instructions.name}-{activations}-rows"
            assert choose_kernels("auto") == f"{instructions.name}-int16"
    monkeypatch.setattr(choice, "supported", tuple)
    with using_kernels("auto"):
        assert kernel_target() is None
        assert choose_kernels("auto") == "portable"
        assert choose_kernels("auto", deterministic=True) == "portable-rows"


def test_what_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with what would do."""
    monkeypatch.setattr(choice, "supported", lambda: (AVX2,))
    with pytest.raises(ResourceError, match=r"'avx512'.*it can use avx2, portable; use --cpu-kernels auto"):
        choose_kernels("avx512")


def test_portable_rounds_nothing() -> None:
    """Products with quantised weights are then those of the activations as they are."""
    fmt = block_format(tensor_type_named("Q4_K").type_id)
    raw = random_rows("Q4_K", 8, 512, seed=1)
    x = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    out = np.empty((2, 8), np.float32)
    with using_kernels("portable"):
        assert not uses_codes(fmt)
        matmul(fmt, raw, x, out)
    np.testing.assert_allclose(out, x @ dequantize("Q4_K", raw).T, rtol=1e-4, atol=1e-4)
