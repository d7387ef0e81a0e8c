"""The gated delta net: attention whose memory is a matrix for each head instead of a cache."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import causal_convolution, kernel, unit_rms

CHUNK = 32
"""Tokens taken at a time; sequences must be a multiple of it long."""


@kernel
def _delta_terms(
    projected: Tensor,
    conv: Tensor,
    beta: Tensor,
    decay_input: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    key_heads: int,
) -> tuple[Tensor, ...]:
    """Everything of the gated delta rule that needs no state, in chunks: see `GatedDeltaNet`."""
    batch, length, _ = projected.shape
    value_heads = beta.shape[-1]
    ratio = value_heads // key_heads
    size = projected.shape[-1] // (2 * key_heads + value_heads)
    num_chunks = length // CHUNK
    activated = F.silu(causal_convolution(projected, conv))
    query, key, value = activated.split([key_heads * size, key_heads * size, value_heads * size], -1)

    def chunked(x: Tensor, heads: int) -> Tensor:
        return x.view(batch, num_chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    def per_value_head(x: Tensor) -> Tensor:
        spread = chunked(x, key_heads).unsqueeze(2).expand(-1, -1, ratio, -1, -1, -1)
        return spread.reshape(batch * value_heads, num_chunks, CHUNK, size)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    query = unit(per_value_head(query)) * size**-0.5
    key = unit(per_value_head(key))
    value = chunked(value, value_heads).reshape(batch * value_heads, num_chunks, CHUNK, size)
    beta = chunked(beta.sigmoid(), value_heads).reshape(batch * value_heads, num_chunks, CHUNK, 1)
    decay = -decay_log.exp() * F.softplus(decay_input + decay_bias)
    total_decay = chunked(decay, value_heads).reshape(batch * value_heads, num_chunks, CHUNK).cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (total_decay.unsqueeze(-1) - total_decay.unsqueeze(-2)).masked_fill(future, -1e30).exp()
    weighted_key = key * beta
    since_start = total_decay.exp().unsqueeze(-1)
    until_end = (total_decay[..., -1:] - total_decay).exp().unsqueeze(-1)
    transposed = key.transpose(-1, -2)
    return (
        (weighted_key @ transposed) * between,
        (query @ transposed) * between,
        torch.cat([value * beta, weighted_key * since_start], -1),
        query * since_start,
        (key * until_end).transpose(-1, -2),
        total_decay[..., -1].exp()[..., None, None],
    )


def _delta_scan(
    overlap: Tensor,
    attention: Tensor,
    targets: Tensor,
    query: Tensor,
    key_to_end: Tensor,
    chunk_decay: Tensor,
) -> Tensor:
    """Runs the state over the chunks: `[heads, num_chunks, chunk, size]` outputs."""
    size = query.shape[-1]
    solved = torch.linalg.solve_triangular(overlap, targets, upper=False, unitriangular=True)
    values, corrections = solved.split(size, -1)
    outputs = [torch.bmm(attention[:, 0], values[:, 0])]
    state = torch.bmm(key_to_end[:, 0], values[:, 0])
    for chunk in range(1, query.shape[1]):
        fresh = torch.baddbmm(values[:, chunk], corrections[:, chunk], state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(query[:, chunk], state), attention[:, chunk], fresh))
        state = torch.baddbmm(state * chunk_decay[:, chunk], key_to_end[:, chunk], fresh)
    return torch.stack(outputs, 1)


@kernel
def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return unit_rms(x) * weight * torch.sigmoid(gate)


class GatedNorm(nn.Module):
    """The delta net's output norm, the one norm that is not centred on zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return _gated_norm(x, gate, self.weight)


class GatedDeltaNet(nn.Module):
    """Linear attention with a forgetting, error-correcting state (Yang et al. 2024, Gated Delta Networks).

    Within a chunk the corrections that later tokens make to earlier writes form a triangular system;
    solving it leaves plain matrix products, and only one state for each chunk passes on.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.key_heads = config.linear_num_key_heads
        self.value_heads = config.linear_num_value_heads
        channels = 2 * config.linear_key_dim + config.linear_value_dim
        self.in_proj_qkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, config.linear_value_dim, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False
        )
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.norm = GatedNorm(config.linear_value_head_dim)
        self.out_proj = nn.Linear(config.linear_value_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        length = x.shape[0] // batch
        terms = _delta_terms(
            self.in_proj_qkv(x).view(batch, length, -1),
            self.conv1d.weight,
            self.in_proj_b(x).view(batch, length, -1),
            self.in_proj_a(x).view(batch, length, -1),
            self.A_log,
            self.dt_bias,
            self.key_heads,
        )
        heads = _delta_scan(*terms)
        outputs = heads.view(batch, self.value_heads, length, -1).transpose(1, 2).flatten(0, 1)
        gate = self.in_proj_z(x).view_as(outputs)
        return self.out_proj(self.norm(outputs, gate).flatten(1))
