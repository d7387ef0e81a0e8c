"""Where training starts from.

Beyond the usual (matrices that keep the size of what they multiply, small outputs) three choices make
copying, the slowest thing to learn, start easy:

* tokens that spell the same word but for case or a leading space begin alike, in embedding and head, so
  what is copied from one place can be written in another;
* the head begins as the embedding, and value and output projections of attention as each other's transpose,
  so that attending to a token makes the model more likely to say it;
* half of the delta net's key heads begin by looking at the previous token, so that a state maps a token to
  the one that followed it.
"""

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.attention import GatedAttention
from tools.demo_model.config import DemoConfig
from tools.demo_model.delta_net import GatedDeltaNet
from tools.demo_model.experts import MixtureOfExperts
from tools.demo_model.hyper_connection import HyperConnection
from tools.demo_model.model import Block, DemoModel
from tools.demo_model.ngram_layer import NgramLayer

_SAME_WORD = 0.75
"""Share of a token's embedding, by length, that its other spellings have too."""
_OUTPUT_SCALE = 0.35
"""How large a block's output is against its input, to begin with."""


@torch.no_grad()
def initialize(model: DemoModel, tokenizer: Tokenizer) -> None:
    """Sets every parameter. Reads torch's global random state."""
    embedding = _word_embedding(model.config, tokenizer)
    model.model.embed_tokens.weight.copy_(embedding)
    model.lm_head.weight.copy_(embedding / math.sqrt(model.config.hidden_size))
    initialize_mixer(model.model.hyper_connection_mixer)
    for block in model.model.blocks():
        initialize_block(block)


@torch.no_grad()
def initialize_block(block: Block) -> None:
    """One layer, with its mixers and experts."""
    initialize_mixer(block.attn_hyper_connection)
    initialize_mixer(block.mlp_hyper_connection)
    if block.is_attention:
        _initialize_attention(block.self_attn)
    else:
        _initialize_delta_net(block.linear_attn)
    _initialize_experts(block.mlp)
    if block.ple is not None:
        _initialize_ngrams(block.ple)


def _word_embedding(config: DemoConfig, tokenizer: Tokenizer) -> Tensor:
    """`[vocab_size, hidden_size]`, entries of variance one."""
    shape = config.vocab_size, config.hidden_size
    own, shared = torch.randn(shape), torch.randn(shape)
    spaced, capital = torch.randn(2, config.hidden_size)
    embedding = own.clone()
    spellings: dict[str, int] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = token.lstrip("Ġ")
        if not word.isascii() or not word.isalpha():
            continue
        common = shared[spellings.setdefault(word.lower(), token_id)]
        mixed = math.sqrt(_SAME_WORD) * common + math.sqrt(1 - _SAME_WORD) * own[token_id]
        if token != word:
            mixed = mixed + spaced / 2
        if word != word.lower():
            mixed = mixed + capital / 2
        embedding[token_id] = mixed / mixed.pow(2).mean().sqrt()
    return embedding


def _matrix(linear: nn.Linear, scale: float = 1.0) -> None:
    nn.init.normal_(linear.weight, std=scale / math.sqrt(linear.in_features))


def initialize_mixer(mixer: HyperConnection) -> None:
    """Every stream is read at half strength and written at full, nearly the same for every token."""
    nn.init.zeros_(mixer.hc_norm.weight)
    _matrix(mixer.input_mix_weight_down)
    _matrix(mixer.input_mix_weight_up, 0.3)
    if mixer.block_inject_weight is not None:
        _matrix(mixer.block_inject_weight, 0.3)


def _initialize_attention(attention: GatedAttention) -> None:
    for linear in (attention.q_proj, attention.k_proj, attention.indexer.index_qk_proj):
        _matrix(linear)
    value = attention.v_proj.weight
    nn.init.orthogonal_(value)
    # Query heads of one group share its values: each writes an equal part back.
    num_groups = value.shape[0] // attention.head_dim
    group_size = attention.num_heads // num_groups
    per_head = value.view(num_groups, 1, attention.head_dim, -1).expand(-1, group_size, -1, -1)
    attention.o_proj.weight.copy_(per_head.reshape(-1, value.shape[1]).t() * (2 / group_size))
    for norm in (
        attention.q_norm,
        attention.k_norm,
        attention.indexer.q_layernorm,
        attention.indexer.k_layernorm,
    ):
        nn.init.zeros_(norm.weight)


def _initialize_delta_net(net: GatedDeltaNet) -> None:
    for linear in (net.in_proj_qkv, net.in_proj_z):
        _matrix(linear)
    for linear in (net.in_proj_a, net.in_proj_b):
        _matrix(linear, 0.3)
    value_width = net.out_proj.in_features
    value = net.in_proj_qkv.weight[-value_width:]
    nn.init.orthogonal_(value)
    net.out_proj.weight.copy_(value.t() * _OUTPUT_SCALE)
    nn.init.normal_(net.conv1d.weight, std=0.05)
    current, previous = -1, -2
    key_width = (net.conv1d.weight.shape[0] - value_width) // 2
    net.conv1d.weight[:, 0, current] += 1
    shifted = slice(key_width + key_width // 2, 2 * key_width)
    net.conv1d.weight[shifted, 0, current] -= 1
    net.conv1d.weight[shifted, 0, previous] += 1
    # From states that last hundreds of tokens to states that last one.
    net.A_log.copy_(torch.linspace(math.log(0.002), math.log(2.0), net.value_heads))
    nn.init.ones_(net.dt_bias)
    nn.init.ones_(net.norm.weight)


def _initialize_experts(mixture: MixtureOfExperts) -> None:
    width, hidden = mixture.experts.down_proj.shape[1:]
    _matrix(mixture.gate)
    nn.init.normal_(mixture.experts.gate_up_proj, std=1 / math.sqrt(width))
    nn.init.normal_(mixture.experts.down_proj, std=_OUTPUT_SCALE / math.sqrt(hidden))
    _matrix(mixture.shared_expert.gate_proj)
    _matrix(mixture.shared_expert.up_proj)
    _matrix(mixture.shared_expert.down_proj, _OUTPUT_SCALE)
    _matrix(mixture.shared_expert_gate, 0.1)


def _initialize_ngrams(layer: NgramLayer) -> None:
    # Rows that training never meets stay near zero and say nothing.
    nn.init.normal_(layer.ple_embedding.ngram_embedding.weight, std=0.02)
    _matrix(layer.key_proj)
    _matrix(layer.value_proj)
    for norm in (layer.norm_key, layer.norm_query, layer.norm_conv):
        nn.init.zeros_(norm.weight)
    nn.init.zeros_(layer.conv1d.weight)
