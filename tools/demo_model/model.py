"""The demo model in torch, made for training on a CPU.

Parameter names are those of transformers' `Qwen4ExpForCausalLM`, so a state dict moves between the two as
it is, and `check_model` shows that the logits agree. What differs is speed: experts run as grouped
products, the delta net in chunks, element-wise parts can be compiled, and attention is dense, which is
exact while the visible tokens fit the indexer's budget.

Shapes: B sequences of S tokens, T = B·S tokens in all, H = hidden size, C residual streams. Between modules
activations are `[T, H]` and the residual is `[T, C, H]`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.attention import GatedAttention, Projected, Rotation
from tools.demo_model.config import DemoConfig
from tools.demo_model.delta_net import CHUNK, GatedDeltaNet
from tools.demo_model.experts import MixtureOfExperts, Routing
from tools.demo_model.hyper_connection import HyperConnection
from tools.demo_model.ngram_layer import NgramLayer


@dataclass(slots=True)
class Trace:
    """What a forward pass leaves behind for losses: handed in empty, filled on the way."""

    routing: list[Routing] = field(default_factory=list)
    """For each layer."""
    attention: list[tuple[Tensor, Projected]] = field(default_factory=list)
    """For each attention layer its input `[T, H]`, which is also the indexer's, and what it made of it."""


class Block(nn.Module):
    """One layer: n-grams where there are any, then attention or delta net, then experts."""

    def __init__(self, config: DemoConfig, is_attention: bool, has_ngrams: bool = False) -> None:
        super().__init__()
        if is_attention:
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.is_attention = is_attention
        self.mlp = MixtureOfExperts(config)
        self.ple = NgramLayer(config) if has_ngrams else None
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)

    def forward(self, residual: Tensor, token_ids: Tensor, rotation: Rotation, trace: Trace) -> Tensor:
        """The residual after this layer."""
        batch = token_ids.shape[0]

        def mix_tokens(x: Tensor) -> Tensor:
            if not self.is_attention:
                return self.linear_attn(x, batch)
            output, projected = self.self_attn(x, batch, rotation)
            trace.attention.append((x, projected))
            return output

        if self.ple is not None:
            residual = residual + self.ple(residual, token_ids)
        return self.mix_features(self.attn_hyper_connection.around(mix_tokens, residual), trace)

    def mix_features(self, residual: Tensor, trace: Trace) -> Tensor:
        """The second half of the layer: experts."""

        def experts(x: Tensor) -> Tensor:
            output, routing = self.mlp(x)
            trace.routing.append(routing)
            return output

        return self.mlp_hyper_connection.around(experts, residual)


class Trunk(nn.Module):
    """Embedding, layers and the final mixer (transformers' `model.`)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, config.is_attention(layer), layer == config.ple_layer)
            for layer in range(config.num_hidden_layers)
        )
        self.hyper_connection_mixer = HyperConnection(config, has_inject=False)

    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def attentions(self) -> list[GatedAttention]:
        """The attention of each layer that has one."""
        return [block.self_attn for block in self.blocks() if block.is_attention]


class DemoModel(nn.Module):
    """The whole language model, without the prediction block."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def streams(self, token_ids: Tensor, trace: Trace | None = None) -> Tensor:
        """The residual after the last layer, `[T, C, H]`, for token ids `[B, S]`.

        Raises ValueError where S is not a multiple of the delta net's chunk.
        """
        batch, length = token_ids.shape
        if length % CHUNK:
            raise ValueError(f"sequences of {length} tokens, not a multiple of {CHUNK}")
        rotation = Rotation.of(self.config, torch.arange(length))
        embedded = self.model.embed_tokens(token_ids).view(batch * length, 1, -1)
        residual = embedded.expand(-1, self.config.hc_count, -1).contiguous()
        trace = Trace() if trace is None else trace
        for block in self.model.blocks():
            residual = block(residual, token_ids, rotation, trace)
        return residual

    def hidden(self, token_ids: Tensor, trace: Trace | None = None) -> Tensor:
        """What the head multiplies, `[T, H]`."""
        return self.model.hyper_connection_mixer.read(self.streams(token_ids, trace))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits `[B, S, vocab_size]`; pads S to the chunk length inside."""
        batch, length = token_ids.shape
        padded = F.pad(token_ids, (0, -length % CHUNK), value=self.config.eos_token_id)
        return self.lm_head(self.hidden(padded).view(batch, padded.shape[1], -1)[:, :length])
