"""The shape of the demo model, and its translations to transformers' config and to GGUF metadata.

Field names are those of transformers' `Qwen4ExpTextConfig`. A checkpoint directory holds that config as
`config.json`; a GGUF file holds the same numbers under the keys of `qwen4exp`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

ENDOFTEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THINK = "<think>"
END_THINK = "</think>"
IMAGE_PAD = "<|image_pad|>"
CONTROL_TOKENS = (ENDOFTEXT, IM_START, IM_END, IMAGE_PAD)
"""Tokens that text never shows. The two thinking marks are ordinary added tokens: an answer contains them."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Plain ChatML."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Every number that fixes the architecture."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6

    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.5
    rope_theta: float = 1e6
    mrope_section: tuple[int, int, int] = (6, 5, 5)

    indexer_n_heads: int = 4
    indexer_head_dim: int = 64
    indexer_budget: int = 1024
    indexer_compress_ratio: int = 4

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8

    num_experts: int = 64
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 128

    hc_count: int = 4
    hc_lowrank: int = 32

    ple_layer: int = 1
    ple_embed_dim: int = 256
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 10_007
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    eos_token_id: int = 4080
    """The id that cuts n-grams: `<|endoftext|>`, not the end of a turn."""

    @property
    def stream_width(self) -> int:
        """Width of all residual streams side by side."""
        return self.hc_count * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Leading entries of a head that rotate with the position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_ngram_heads(self) -> int:
        """Hash tables of the n-gram embedding: some for each order from 2 to `ngram_size`."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def linear_key_dim(self) -> int:
        """Width of all delta-net queries, and of all its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all delta-net values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` (counted from 0) attends; the others are delta nets."""
        return (layer + 1) % self.full_attention_interval == 0

    def to_transformers(self) -> dict[str, Any]:
        """The keyword arguments of `Qwen4ExpTextConfig`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for renamed in ("partial_rotary_factor", "rope_theta", "mrope_section", "ple_layer"):
            del plain[renamed]
        return plain | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": list(self.mrope_section),
                "mrope_interleaved": True,
            },
            "ple_layer_ids": [self.ple_layer + 1],
            "indexer_kv_heads": 1,
            "norm_topk_prob": True,
            "output_gate_type": "sigmoid",
            "split_ngram_parts": 1,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "pad_token_id": None,
        }

    @classmethod
    def from_transformers(cls, stored: Mapping[str, Any]) -> Self:
        """From a parsed `config.json`: the inverse of `to_transformers`. Raises KeyError."""
        rope = stored["rope_parameters"]
        values = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
        layer_types = stored.get("layer_types")
        if layer_types is not None:
            values["full_attention_interval"] = layer_types.index("indexed_attention") + 1
        return cls(
            **values,
            rope_theta=rope["rope_theta"],
            partial_rotary_factor=rope["partial_rotary_factor"],
            mrope_section=tuple(rope["mrope_section"]),
            ple_layer=stored["ple_layer_ids"][0] - 1,
        )
