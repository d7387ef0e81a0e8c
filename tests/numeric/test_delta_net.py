"""The recurrence of the delta net, one token at a time and in chunks, against a loop in float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.model.convolution import convolve
from gpu_worker.model.delta_net import CHUNK_TOKENS, mix, settle
from gpu_worker.state.sequence_state import DeltaState, num_kept
from shared.window import WINDOW_TOKENS

HEADS, DIM = 3, 16
Exact = NDArray[np.float64]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_inputs(num_tokens: int, seed: int = 0) -> Inputs:
    """Queries, keys, values, rates and log decays as a layer makes them: unit vectors, rates in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, num_tokens, HEADS, DIM, generator=generator)
    rate = torch.rand(num_tokens, HEADS, generator=generator)
    log_decay = -torch.rand(num_tokens, HEADS, generator=generator) * 2
    return (
        query / query.norm(dim=-1, keepdim=True) * DIM**-0.5,
        key / key.norm(dim=-1, keepdim=True),
        value,
        rate,
        log_decay,
    )


def new_state(seed: int = 5) -> DeltaState:
    matrices = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(seed))
    decays = torch.zeros(WINDOW_TOKENS, HEADS)
    keys, deltas = torch.zeros(2, WINDOW_TOKENS, HEADS, DIM)
    return DeltaState(matrices, decays, keys, deltas, torch.empty(0))


def exact(inputs: Inputs, state: DeltaState) -> tuple[Exact, Exact]:
    """Outputs and the state afterwards, by the recurrence as it is written down."""
    query, key, value, rate, log_decay = (tensor.double().numpy() for tensor in inputs)
    matrices = state.matrices.double().numpy().copy()
    outputs = np.empty_like(value)
    for token in range(len(query)):
        for head in range(HEADS):
            decayed = np.exp(log_decay[token, head]) * matrices[head]
            correction = rate[token, head] * (value[token, head] - decayed.T @ key[token, head])
            matrices[head] = decayed + np.outer(key[token, head], correction)
            outputs[token, head] = matrices[head].T @ query[token, head]
    return outputs, matrices


def in_steps(inputs: Inputs, state: DeltaState, size: int) -> Tensor:
    """In steps of so many tokens; none is pending at last."""
    outputs, num_pending = [], 0
    for start in range(0, len(inputs[0]), size):
        rows = slice(start, start + size)
        settle(state, num_pending)
        num_pending = num_kept(len(inputs[0][rows]))
        outputs.append(mix(state, num_pending, *(x[rows] for x in inputs)))
    settle(state, num_pending)
    return torch.cat(outputs)


def assert_both_ways(inputs: Inputs, tolerance: float) -> None:
    expected, expected_state = exact(inputs, new_state())
    for size in (len(inputs[0]), 1, WINDOW_TOKENS, WINDOW_TOKENS + 1):
        state = new_state()
        outputs = in_steps(inputs, state, size)
        assert np.abs(outputs.numpy() - expected).max() <= tolerance
        assert np.abs(state.matrices.numpy() - expected_state).max() <= tolerance


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 200])
def test_random(num_tokens: int) -> None:
    """Lengths on both sides of a chunk's border."""
    assert_both_ways(random_inputs(num_tokens), tolerance=1e-5)


def test_no_decay() -> None:
    """The state forgets nothing by itself."""
    query, key, value, rate, log_decay = random_inputs(150)
    assert_both_ways((query, key, value, rate, torch.zeros_like(log_decay)), tolerance=1e-5)


def test_full_decay() -> None:
    """Every token begins anew: what came before counts for exp(-200), which is 0."""
    query, key, value, rate, log_decay = random_inputs(150)
    assert_both_ways((query, key, value, rate, torch.full_like(log_decay, -200.0)), tolerance=1e-6)


def test_one_strong_decay_among_weak_ones() -> None:
    """The weak ones must not drown in the sum that the strong one makes large."""
    query, key, value, rate, log_decay = random_inputs(130)
    log_decay = log_decay * 0.01
    log_decay[3] = -10_000.0
    log_decay[70] = -100_000.0
    assert_both_ways((query, key, value, rate, log_decay), tolerance=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_identical_keys(rate: float) -> None:
    """Each token overwrites what the one before wrote: the triangular system is as full as it can be."""
    query, key, value, rates, log_decay = random_inputs(140)
    inputs = query, key[:1].expand_as(key), value, torch.full_like(rates, rate), log_decay * 0.001
    assert_both_ways(inputs, tolerance=3e-5)


def test_zero_keys() -> None:
    """A key of zeros writes nothing."""
    query, key, value, rate, log_decay = random_inputs(70)
    assert_both_ways((query, torch.zeros_like(key), value, rate, log_decay), tolerance=1e-5)


def test_convolution() -> None:
    """Against its formula, with zeros before the start, dilated and not, in one go and in pieces."""
    generator = torch.Generator().manual_seed(1)
    for taps, dilation in ((2, 1), (4, 1), (4, 3), (3, 2)):
        inputs = torch.randn(30, 5, generator=generator)
        kernel = torch.randn(taps, 5, generator=generator)
        reach = (taps - 1) * dilation
        expected = torch.zeros(30, 5, dtype=torch.float64)
        for token in range(30):
            for tap in range(taps):
                source = token - (taps - 1 - tap) * dilation
                if source >= 0:
                    expected[token] += kernel[tap].double() * inputs[source]
        expected = expected / (1 + (-expected).exp())
        earlier, num_pending = torch.zeros(reach + WINDOW_TOKENS, 5), 0
        pieces = []
        for piece in inputs.split([1, 2, 1, 20, 6]):
            # Tokens that are taken back leave no trace.
            convolve(torch.ones(7, 5), earlier, num_pending, kernel, dilation)
            num_pending = num_kept(7) - 7
            pieces.append(convolve(piece, earlier, num_pending, kernel, dilation))
            num_pending = num_kept(len(piece))
        whole = convolve(inputs, torch.zeros(reach + WINDOW_TOKENS, 5), 0, kernel, dilation)
        assert (whole - expected).abs().max() <= 1e-5
        assert (torch.cat(pieces) - expected).abs().max() <= 1e-5
