"""The n-gram module (transformers' PLE): what a table knows of the last tokens, added to all streams."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import ZeroCentredNorm, causal_convolution, kernel, unit_rms
from tools.demo_model.ngrams import ngram_hash


class NgramEmbedding(nn.Module):
    """The hashed table: each token's last two and three ids become rows of it."""

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        constants = ngram_hash(config)
        self.eos_token_id = config.eos_token_id
        self.heads_per_ngram = config.heads_per_ngram
        self.ngram_embedding = nn.Embedding(
            constants.num_rows, config.ple_embed_dim // config.num_ngram_heads
        )
        self.register_buffer("layer_multipliers", torch.tensor(constants.multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(constants.head_vocab_sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(constants.head_offsets))

    def rows(self, token_ids: Tensor) -> Tensor:
        """Row numbers `[B, S, heads]` for token ids `[B, S]`; an end of text hides what is before it."""
        history = [token_ids]
        is_hidden = torch.zeros_like(token_ids, dtype=torch.bool)
        for distance in range(1, len(self.layer_multipliers)):
            earlier = F.pad(token_ids, (distance, 0), value=self.eos_token_id)[:, : token_ids.shape[1]]
            is_hidden = is_hidden | (earlier == self.eos_token_id)
            history.append(torch.where(is_hidden, self.eos_token_id, earlier))
        mixed = history[0] * self.layer_multipliers[0]
        hashes = []
        for distance in range(1, len(history)):
            mixed = mixed ^ (history[distance] * self.layer_multipliers[distance])
            hashes += [mixed] * self.heads_per_ngram
        return torch.stack(hashes, -1) % self.ngram_heads_vocab_sizes + self.ngram_heads_offsets

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ngram_embedding(self.rows(token_ids)).flatten(-2)


@kernel
def _gate_ngrams(
    residual: Tensor, key: Tensor, value: Tensor, norm_key: Tensor, norm_query: Tensor, norm_conv: Tensor
) -> tuple[Tensor, Tensor]:
    """The value weighed for each stream by how its key meets the stream, raw and normed."""
    num_tokens, num_streams, width = residual.shape
    key = unit_rms(key.view(num_tokens, num_streams, width)) * (1 + norm_key.view(num_streams, width))
    query = unit_rms(residual) * (1 + norm_query.view(num_streams, width))
    score = (key * query).sum(-1, keepdim=True) * width**-0.5
    gated = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign()) * value.unsqueeze(1)
    return gated, unit_rms(gated) * (1 + norm_conv.view(num_streams, width))


class NgramLayer(nn.Module):
    """Adds what the n-gram table knows of the last tokens to every stream (transformers' `PLELayer`)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width = config.stream_width
        self.dilation = config.ngram_size
        self.ple_embedding = NgramEmbedding(config)
        self.key_proj = nn.Linear(config.ple_embed_dim, width, bias=False)
        self.value_proj = nn.Linear(config.ple_embed_dim, config.hidden_size, bias=False)
        self.norm_key = ZeroCentredNorm(width)
        self.norm_query = ZeroCentredNorm(width)
        self.norm_conv = ZeroCentredNorm(width)
        self.conv1d = nn.Conv1d(width, width, config.ple_conv_kernel_size, groups=width, bias=False)

    def forward(self, residual: Tensor, token_ids: Tensor) -> Tensor:
        batch, length = token_ids.shape
        embedding = self.ple_embedding(token_ids).view(batch * length, -1)
        gated, normed = _gate_ngrams(
            residual,
            self.key_proj(embedding),
            self.value_proj(embedding),
            self.norm_key.weight,
            self.norm_query.weight,
            self.norm_conv.weight,
        )
        convolved = causal_convolution(normed.view(batch, length, -1), self.conv1d.weight, self.dilation)
        result: Tensor = gated + F.silu(convolved).view_as(gated)
        return result
