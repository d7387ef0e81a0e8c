"""A slice of the real model, as benchmarks write them, that is written in no time."""

from benchmarks.slices import REAL, replaced
from tools.demo_model.config import CONTROL_TOKENS

_VOCABULARY = 512
# The real one but for its extents; every profile's blocks of 256 still divide the hidden width.
TINY_SLICE = replaced(
    REAL,
    vocab_size=_VOCABULARY,
    eos_token_id=_VOCABULARY - len(CONTROL_TOKENS),
    hidden_size=256,
    num_attention_heads=4,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    hc_lowrank=32,
    indexer_head_dim=64,
    ple_embed_dim=512,
    ngram_vocab_size_base=50,
)
