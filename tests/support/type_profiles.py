"""Which tensor types published files are made of, class by class: the mixes that quantised tests write.

Widths that 256 does not divide take a type of smaller blocks, here as there: rows of the n-gram table, of the
mixers' up matrices, and of both kinds of down matrices.
"""

from tests.support.model_cases import Case
from tests.support.model_file import FileLayout
from tests.support.model_shapes import Shape

# As in published files the hidden width takes blocks of 256, and expert and table widths only smaller ones.
_SHAPE = Shape(
    hidden_size=256,
    head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_value_heads=4,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    hc_lowrank=32,
    ple_embed_dim=256,
)


def _profile(
    *,
    embedding: str,
    head: str,
    mixers: str,
    inject: str,
    rates: str,
    router: str,
    dense: str,
    ngram: str,
    shared: str,
    shared_down: str,
    experts: str,
    experts_down: str,
) -> Case:
    types = {
        "norm": "F32",
        "inject": inject,
        "hc_": mixers,
        "per_layer_token_embd": "IQ4_NL",
        "token_embd": embedding,
        "attn_output": dense,
        "output.weight": head,
        "indexer": "BF16",
        "ple_conv1d": "F16",
        "ple_": ngram,
        "ffn_gate_inp": router,
        "down_exps": experts_down,
        "_exps": experts,
        "down_shexp": shared_down,
        "_shexp": shared,
        "ssm_alpha": rates,
        "ssm_beta": rates,
        "ssm_out": dense,
        "ssm_": "F32",
        "attn_": dense,
    }
    return Case(_SHAPE, FileLayout(types))


PROFILES = {
    "ista-iq2xs": _profile(
        embedding="IQ4_XS",
        head="IQ4_XS",
        mixers="BF16",
        inject="BF16",
        rates="BF16",
        router="F32",
        dense="IQ4_XS",
        ngram="BF16",
        shared="IQ4_XS",
        shared_down="IQ4_NL",
        experts="IQ2_S",
        experts_down="Q2_0",
    ),
    "ista-q2_0": _profile(
        embedding="Q3_K",
        head="Q5_K",
        mixers="BF16",
        inject="BF16",
        rates="BF16",
        router="BF16",
        dense="Q3_K",
        ngram="Q2_0",
        shared="Q4_K",
        shared_down="Q5_0",
        experts="Q2_0",
        experts_down="Q2_0",
    ),
    "unsloth-q2kxl": _profile(
        embedding="Q5_K",
        head="Q4_K",
        mixers="Q8_0",
        inject="F32",
        rates="F32",
        router="F32",
        dense="Q5_K",
        ngram="Q8_0",
        shared="Q5_K",
        shared_down="Q8_0",
        experts="IQ2_XS",
        experts_down="IQ4_NL",
    ),
    "iq2_xs": _profile(
        embedding="Q4_K",
        head="Q4_K",
        mixers="Q8_0",
        inject="F32",
        rates="F32",
        router="F32",
        dense="Q4_K",
        ngram="Q8_0",
        shared="Q4_K",
        shared_down="IQ4_NL",
        experts="IQ2_XS",
        experts_down="IQ4_NL",
    ),
    "q4_k": _profile(
        embedding="Q4_K",
        head="Q6_K",
        mixers="Q8_0",
        inject="F32",
        rates="F32",
        router="F32",
        dense="Q4_K",
        ngram="Q8_0",
        shared="Q8_0",
        shared_down="Q8_0",
        experts="Q4_K",
        experts_down="Q5_1",
    ),
}
