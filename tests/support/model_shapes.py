"""Shapes of small random models: the demo model's config, and what published files vary beyond it."""

from dataclasses import dataclass
from typing import Any

from tools.demo_model.config import DemoConfig

MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"))
NUM_ORDINARY_TOKENS = 256 + len(MERGES)


@dataclass(frozen=True, slots=True)
class Shape(DemoConfig):
    """A model small enough to compute a few hundred tokens of in a second.

    One n-gram head has some 50 rows, so that collisions occur. The token after the ordinary ones ends text.
    """

    vocab_size: int = 280
    hidden_size: int = 64
    max_position_embeddings: int = 1024

    num_attention_heads: int = 4
    head_dim: int = 32

    indexer_n_heads: int = 4
    indexer_head_dim: int = 32
    indexer_budget: int = 32

    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 16
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 6

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 48

    hc_lowrank: int = 16

    ple_embed_dim: int = 64
    ngram_vocab_size_base: int = 50
    eos_token_id: int = NUM_ORDINARY_TOKENS

    attention_layers: tuple[int, ...] = ()
    """The layers that attend, where no interval describes them."""
    has_ngram: bool = True
    is_dense: bool = False
    """Attention sees everything: the file says so with a compress ratio of 0."""
    yarn_factor: float = 1.0
    """How much longer contexts are than `yarn_original`; 1 leaves positions alone."""
    yarn_original: int = 256

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` attends."""
        if self.attention_layers:
            return layer in self.attention_layers
        return DemoConfig.is_attention(self, layer)

    def to_transformers(self) -> dict[str, Any]:
        """The keyword arguments of `Qwen4ExpTextConfig`.

        It knows no dense attention, but a budget that no prompt exhausts is the same; and it refuses a single
        stream, which has to be set afterwards.
        """
        arguments = DemoConfig.to_transformers(self)
        for own in ("attention_layers", "has_ngram", "is_dense", "yarn_factor", "yarn_original"):
            del arguments[own]
        arguments["layer_types"] = [
            "full_attention" if self.is_attention(layer) else "linear_attention"
            for layer in range(self.num_hidden_layers)
        ]
        del arguments["full_attention_interval"]
        arguments["hc_count"] = max(2, self.hc_count)
        third = self.rotary_dim // 6
        arguments["rope_parameters"]["mrope_section"] = [self.rotary_dim // 2 - 2 * third, third, third]
        if self.yarn_factor > 1:
            arguments["rope_parameters"] |= {
                "rope_type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.yarn_original,
            }
        if self.is_dense:
            arguments["indexer_budget"] = self.max_position_embeddings * self.indexer_compress_ratio
        if not self.has_ngram:
            arguments["ple_layer_ids"] = []
        return arguments
