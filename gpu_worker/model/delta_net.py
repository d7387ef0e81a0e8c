"""The gated delta net: attention with a state of fixed size instead of a cache.

Per value head, with state S (key dim x value dim), decay l, rate b, key k, value v and query q of a token:

    S <- l S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q

One token at a time that is the recurrence above. Many tokens are computed in chunks: within a chunk the d of
all tokens solve one triangular system, and the state is touched once. The updates of the last tokens are kept
back (`gpu_worker.state.sequence_state`).
With G_i the sum of log decays up to token i, and S_0 the state before the chunk,

    d_i + b_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j = b_i (v_i - exp(G_i) S_0^T k_i)
    o_i = exp(G_i) S_0^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) d_j
    S_n = exp(G_n) S_0 + sum_j exp(G_n - G_j) k_j d_j^T

All exponents are at most 0, so nothing overflows however strong the decay. (Algorithm: Yang et al., "Gated
Delta Networks", 2024, in the form that follows from the recurrence by substitution.)
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.device.interface import Device
from gpu_worker.model.batch import Batch
from gpu_worker.model.convolution import convolve, load_kernel
from gpu_worker.model.hyper_connection import rms_norm
from gpu_worker.state.sequence_state import DeltaState, num_kept
from shared.model_config import Qwen4ExpConfig
from shared.tensor_catalog import block_prefix

# Tokens per triangular system. The system's cost grows with its square, the number of steps falls.
CHUNK_TOKENS = 64


class DeltaNet:
    """The token mixer of one delta-net layer."""

    def __init__(self, device: Device, layer: int, config: Qwen4ExpConfig) -> None:
        prefix = block_prefix(layer)
        self._layer = layer
        self._config = config
        self._qkv = device.linear(f"{prefix}attn_qkv.weight")
        self._gate = device.linear(f"{prefix}attn_gate.weight")
        self._alpha = device.linear(f"{prefix}ssm_alpha.weight")
        self._beta = device.linear(f"{prefix}ssm_beta.weight")
        self._out = device.linear(f"{prefix}ssm_out.weight")
        self._kernel = load_kernel(device.tensor(f"{prefix}ssm_conv1d.weight"))
        self._decay_rate = device.tensor(f"{prefix}ssm_a")
        self._decay_bias = device.tensor(f"{prefix}ssm_dt.bias")
        self._norm = device.tensor(f"{prefix}ssm_norm.weight")

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; advances the state of every sequence in the batch."""
        config = self._config
        heads, head_dim = config.num_delta_value_heads, config.delta_head_dim
        qkv = self._qkv(x)
        rate = torch.sigmoid(self._beta(x))
        log_decay = self._decay_rate * functional.softplus(self._alpha(x) + self._decay_bias)
        outputs = []
        for span in batch.spans:
            rows = slice(span.start, span.stop)
            state = span.state.delta[self._layer]
            num_pending = span.state.num_pending
            snapshots = [snapshot.delta[self._layer] for snapshot in span.snapshots]
            cuts = span.cuts
            earlier = [snapshot.conv_inputs for snapshot in snapshots]
            convolved = convolve(
                qkv[rows],
                state.conv_inputs,
                num_pending,
                self._kernel,
                snapshots=list(zip(cuts, earlier, strict=True)),
            )
            inputs = *self._heads(convolved), rate[rows], log_decay[rows]
            start = 0
            for cut, snapshot in zip(cuts, snapshots, strict=True):
                settle(state, num_pending)
                outputs.append(mix(state, 1, *(x[start:cut] for x in inputs)))
                snapshot.matrices.copy_(state.matrices)
                for of_state, of_snapshot in zip(state.updates, snapshot.updates, strict=True):
                    of_snapshot.copy_(of_state[:1])
                start, num_pending = cut, 1
            settle(state, num_pending)
            outputs.append(mix(state, num_kept(span.num_tokens), *(x[start:] for x in inputs)))
        mixed = rms_norm(torch.cat(outputs), self._norm, config.rms_epsilon)
        gate = torch.sigmoid(self._gate(x)).view(-1, heads, head_dim)
        return self._out((mixed * gate).flatten(1))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every value head: [tokens, value heads, head dim] each.

        Value head h uses key head h mod (number of key heads), the order GGUF files store them in.
        """
        config = self._config
        heads, key_heads, head_dim = (
            config.num_delta_value_heads,
            config.num_delta_key_heads,
            config.delta_head_dim,
        )
        queries_and_keys, value = torch.split(qkv, [2 * key_heads * head_dim, heads * head_dim], -1)
        unit = _unit(queries_and_keys.view(-1, 2, 1, key_heads, head_dim), config.rms_epsilon)
        repeated = unit.expand(-1, -1, heads // key_heads, -1, -1).flatten(2, 3)
        return repeated[:, 0] * head_dim**-0.5, repeated[:, 1], value.view(-1, heads, head_dim)


def _unit(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)


def settle(state: DeltaState, num_pending: int) -> None:
    """Makes the updates of the pending tokens part of the matrices."""
    for decay, key, delta in zip(
        state.decays[:num_pending], state.keys[:num_pending], state.deltas[:num_pending], strict=True
    ):
        state.matrices.mul_(decay[:, None, None]).baddbmm_(key[:, :, None], delta[:, None, :])


def mix(
    state: DeltaState,
    num_pending: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    log_decay: Tensor,
) -> Tensor:
    """query, key, value [tokens, heads, head dim], rate and log_decay [tokens, heads] -> [tokens, heads,
    head dim]. No token is pending before, so many of the last ones are then."""
    num_settled = len(query) - num_pending
    outputs = []
    for start in range(0, num_settled, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, num_settled))
        output, delta, total = _solved(
            query[rows], key[rows], value[rows], rate[rows], log_decay[rows], state
        )
        until_end = (total[:, -1:] - total).float().exp()[:, :, None]
        update = (until_end * key[rows].transpose(0, 1)).transpose(1, 2) @ delta
        state.matrices = total[:, -1:, None].float().exp() * state.matrices + update
        outputs.append(output)
    rows = slice(num_settled, None)
    recur = _recurrent if len(query) == 1 else _solved
    output, delta, _ = recur(query[rows], key[rows], value[rows], rate[rows], log_decay[rows], state)
    state.decays[:num_pending] = log_decay[rows].exp()
    state.keys[:num_pending] = key[rows]
    state.deltas[:num_pending] = delta.transpose(0, 1)
    outputs.append(output)
    return torch.cat(outputs, 1).transpose(0, 1)


def _recurrent(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, log_decay: Tensor, state: DeltaState
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_solved`, of one token."""
    decay = log_decay[0].exp()[:, None]
    both = torch.stack([key[0], query[0]], 1)
    recalled, answered = torch.bmm(both, state.matrices).unbind(1)
    delta = rate[0][:, None] * (value[0] - decay * recalled)
    match = (query[0] * key[0]).sum(-1, keepdim=True)
    output = decay * answered + match * delta
    return output[:, None], delta[:, None], log_decay.t()


def _solved(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, log_decay: Tensor, state: DeltaState
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and deltas [heads, tokens, head dim] of one chunk, which leaves the matrices as they are, and
    the summed log decays [heads, tokens]."""
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    rate = rate.t()[:, :, None]
    # In float64: a strong decay early in the chunk makes all sums large, and what counts is their
    # differences.
    total = log_decay.t().cumsum(1, dtype=torch.float64)
    num_tokens = total.shape[1]
    before = state.matrices
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=total.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).float().masked_fill(is_later, -torch.inf).exp()
    since_start = total.float().exp()[:, :, None]
    # The solver reads the strictly lower triangle and takes the diagonal as ones.
    system = rate * between * (key @ key.transpose(1, 2))
    wanted = rate * (value - since_start * (key @ before))
    delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = since_start * (query @ before) + (between * (query @ key.transpose(1, 2))) @ delta
    return output, delta, total
