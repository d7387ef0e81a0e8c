"""Frequencies of scaled positions against their published definition and against transformers; logits of a
model with YaRN beyond its trained length, also against llama.cpp, which reads the same metadata."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen4ExpTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_worker.model.rotary import Rotary, inverse_frequencies
from shared.rope_scaling import RopeScaling, ScalingType
from tests.support import llama_cpp
from tests.support.prepared import Prepared

CPU = torch.device("cpu")
REAL = RopeScaling(ScalingType.YARN, 262144, 4.0)
"""Of the real model, whose 64 rotary dimensions have the base 1e7."""
# llama.cpp's own distance from transformers on such models.
TO_LLAMA_CPP = 2e-3


def defined(dim: int, base: float, scaling: RopeScaling) -> NDArray[np.float64]:
    """As Peng et al. define them, with a ramp that is linear in the number of the pair and has whole ends."""
    wavelengths = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    # The number of the pair at which a wavelength fits into the trained length so many times.
    ends = [
        dim / 2 * math.log(scaling.original_context / (turns * 2 * math.pi), base)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    ramp = np.interp(np.arange(dim // 2), [first, last], [0, 1])
    return 2 * math.pi / wavelengths * ((1 - ramp) + ramp / scaling.factor)


@pytest.mark.parametrize(
    ("dim", "base", "scaling"),
    [
        (64, 1e7, REAL),
        (64, 1e7, replace(REAL, factor=1.0)),
        (64, 1e7, replace(REAL, factor=2.5, beta_fast=64.0, beta_slow=0.5)),
        (128, 1e6, RopeScaling(ScalingType.YARN, 32768, 4.0, 0.9)),
        (16, 1e4, RopeScaling(ScalingType.YARN, 256, 8.0)),
    ],
    ids=str,
)
def test_yarn(dim: int, base: float, scaling: RopeScaling) -> None:
    """Against the definition, and against transformers to the last bit but one."""
    found = inverse_frequencies(dim, base, scaling)
    np.testing.assert_allclose(found, defined(dim, base, scaling), rtol=1e-6)
    config = Qwen4ExpTextConfig(
        head_dim=2 * dim,
        max_position_embeddings=int(scaling.factor * scaling.original_context),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": base,
            "partial_rotary_factor": 0.5,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        },
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    np.testing.assert_allclose(found, theirs, rtol=2.5e-7)
    assert scaling.attention_factor == pytest.approx(scaling.attention_multiplier * attention_factor)


def test_real_model() -> None:
    """Pairs that turn more than 32 times in the trained length are left alone, those that do not turn once
    are stretched by the factor."""
    plain = inverse_frequencies(64, 1e7, RopeScaling(ScalingType.NONE, 262144))
    ratios = plain / inverse_frequencies(64, 1e7, REAL)
    turns = plain * 262144 / (2 * math.pi)
    assert (turns > 32).sum() == 15
    assert torch.equal(ratios[:15], torch.ones(15))
    assert (turns < 1).sum() == 10
    np.testing.assert_allclose(ratios[22:], 4, rtol=1e-6)
    assert ((ratios[15:22] > 1) & (ratios[15:22] < 4)).all()


def test_linear() -> None:
    """Every pair by the factor, and scores as they were."""
    plain = inverse_frequencies(64, 1e7, RopeScaling(ScalingType.NONE, 1024))
    scaling = RopeScaling(ScalingType.LINEAR, 1024, 4.0)
    assert torch.equal(inverse_frequencies(64, 1e7, scaling), plain / 4)
    rotation = Rotary(64, 1e7, scaling, CPU).at(torch.arange(3))
    assert torch.equal(rotation.cos[0], torch.ones(1, 32))


def test_ramps_of_no_width() -> None:
    """A trained length in which every pair turns often, or hardly any does: as llama.cpp, no pair is divided
    by something negative or by nothing."""
    often = RopeScaling(ScalingType.YARN, 1 << 24, 4.0)
    assert torch.equal(
        inverse_frequencies(8, 2.0, often), inverse_frequencies(8, 2.0, replace(often, factor=1.0))
    )
    hardly = inverse_frequencies(8, 1e4, RopeScaling(ScalingType.YARN, 1, 4.0))
    plain = inverse_frequencies(8, 1e4, RopeScaling(ScalingType.NONE, 1))
    assert torch.equal(hardly, plain / torch.tensor([1, 4, 4, 4]))


def test_attention_factor() -> None:
    """On cosines and sines alike."""
    turned = Rotary(16, 1e4, RopeScaling(ScalingType.YARN, 256, 4.0, 0.5), CPU).at(torch.arange(600))
    squares = turned.cos.square() + turned.sin.square()
    np.testing.assert_allclose(squares, (0.5 * (0.1 * math.log(4) + 1)) ** 2, rtol=1e-5)


def test_beyond_the_trained_length(prepare: Callable[[str], Prepared]) -> None:
    """Twice as many tokens as the model was trained for, in one chunk and token by token at the end."""
    prepared = prepare("yarn")
    token_ids = prepared.prompt(2 * prepared.model.config.rope_scaling.original_context)
    expected = prepared.expected(token_ids)
    found = prepared.model.logits(token_ids, [len(token_ids) - 8, *[1] * 8])
    assert np.abs(found - expected).max() <= 2e-4
    try:
        theirs = llama_cpp.logits(prepared.reference.path, token_ids)
    except llama_cpp.LlamaUnavailableError as error:
        pytest.skip(str(error))
    assert np.abs(found - theirs).max() <= TO_LLAMA_CPP
