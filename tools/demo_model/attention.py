"""Gated attention with rotary positions, and the indexer that makes it sparse on long sequences."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import ZeroCentredNorm


@dataclass(slots=True)
class Rotation:
    """Cosines and sines of the rotary embedding, `[S, rotary_dim]`."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: DemoConfig, positions: Tensor) -> Self:
        """For `positions` `[S]`."""
        exponents = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
        angles = positions.float()[:, None] * config.rope_theta**-exponents
        both = torch.cat([angles, angles], -1)
        return cls(both.cos(), both.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates the leading entries of `[…, S, head_dim]`."""
        rotary, kept = x[..., : self.cos.shape[-1]], x[..., self.cos.shape[-1] :]
        left, right = rotary.chunk(2, -1)
        return torch.cat([rotary * self.cos + torch.cat([-right, left], -1) * self.sin, kept], -1)


class Indexer(nn.Module):
    """Scores blocks of the past for sparse attention. Trained after the trunk, by `train_prediction`."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.indexer_n_heads, config.indexer_head_dim
        self.block_length = config.indexer_compress_ratio
        self.index_qk_proj = nn.Linear(config.hidden_size, (self.num_heads + 1) * self.head_dim, bias=False)
        self.q_layernorm = ZeroCentredNorm(self.head_dim)
        self.k_layernorm = ZeroCentredNorm(self.head_dim)

    def scores(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`[B, S, H]` to scores `[B, S, S / block_length]`; blocks to come are scored too, to be masked."""
        batch, length, _ = x.shape
        projected = self.index_qk_proj(x)
        query = (
            projected[..., : -self.head_dim]
            .view(batch, length, self.num_heads, self.head_dim)
            .transpose(1, 2)
        )
        query = rotation(self.q_layernorm(query))
        pooled = projected[..., -self.head_dim :].unflatten(1, (-1, self.block_length)).mean(2)
        at_block = Rotation(rotation.cos[:: self.block_length], rotation.sin[:: self.block_length])
        key = at_block(self.k_layernorm(pooled))
        return torch.relu(query @ key.unsqueeze(1).transpose(-1, -2)).sum(1) * self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class Projected:
    """What attention computes of its input: all but the attending itself.

    `query` is `[B, num_heads, S, head_dim]`, `key` and `value` have `num_key_value_heads`; norm and
    rotation are done.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    """`[T, num_heads · head_dim]`, before its sigmoid."""


class GatedAttention(nn.Module):
    """Grouped-query attention with an output gate; dense here."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = ZeroCentredNorm(self.head_dim)
        self.k_norm = ZeroCentredNorm(self.head_dim)
        self.indexer = Indexer(config)

    @torch.no_grad()
    def initialize_indexer(self) -> None:
        """Starts the indexer from what it is to imitate: the query heads, and the mean of the key heads."""
        per_head = self.q_proj.weight.view(self.num_heads, 2, self.head_dim, -1)
        queries = per_head[:, 0].reshape(-1, per_head.shape[-1])
        keys = self.k_proj.weight.view(-1, self.head_dim, per_head.shape[-1]).mean(0)
        self.indexer.index_qk_proj.weight.copy_(torch.cat([queries, keys]))
        self.indexer.q_layernorm.load_state_dict(self.q_norm.state_dict())
        self.indexer.k_layernorm.load_state_dict(self.k_norm.state_dict())

    def project(self, x: Tensor, batch: int, rotation: Rotation) -> Projected:
        """`x` is `[T, H]`, sequence after sequence."""

        def heads(projected: Tensor) -> Tensor:
            num_heads = projected.shape[1] // self.head_dim
            return projected.view(batch, -1, num_heads, self.head_dim).transpose(1, 2)

        query, gate = self.q_proj(x).view(-1, self.num_heads, 2, self.head_dim).unbind(2)
        return Projected(
            rotation(self.q_norm(heads(query.flatten(1)))),
            rotation(self.k_norm(heads(self.k_proj(x)))),
            heads(self.v_proj(x)),
            gate.flatten(1),
        )

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        """`[B, num_heads, S, head_dim]` to `[T, H]`."""
        flat = attended.transpose(1, 2).reshape(gate.shape)
        result: Tensor = self.o_proj(flat * torch.sigmoid(gate))
        return result

    def forward(self, x: Tensor, batch: int, rotation: Rotation) -> tuple[Tensor, Projected]:
        """Causal attention over the whole sequence."""
        projected = self.project(x, batch, rotation)
        attended = F.scaled_dot_product_attention(
            projected.query, projected.key, projected.value, is_causal=True, enable_gqa=True
        )
        return self.output(attended, projected.gate), projected
