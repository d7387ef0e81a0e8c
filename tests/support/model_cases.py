"""The models that numeric tests run: each is there for what the one named in its comment would not show."""

from dataclasses import dataclass, field

from tests.support.model_file import FileLayout
from tests.support.model_shapes import Shape


@dataclass(frozen=True, slots=True)
class Case:
    """One model and how it is stored."""

    shape: Shape
    layout: FileLayout = field(default_factory=FileLayout)


CASES = {
    # Three delta nets with value heads in threes, one attention layer that drops blocks, trigrams.
    "plain": Case(Shape()),
    # An odd number of layers, the interval 2, one kv head, bigrams in a late layer, short kernels.
    "two-streams-bigrams": Case(
        Shape(
            hc_count=2,
            num_hidden_layers=5,
            full_attention_interval=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            ngram_size=2,
            heads_per_ngram=8,
            ple_layer=2,
            ple_conv_kernel_size=2,
            linear_conv_kernel_dim=3,
            num_experts_per_tok=1,
        )
    ),
    # No mixing of streams, 4-grams, n-gram features wider than the model, every expert used.
    "one-stream-fourgrams": Case(
        Shape(
            hc_count=1,
            ngram_size=4,
            heads_per_ngram=2,
            ple_embed_dim=96,
            num_experts=4,
            num_experts_per_tok=4,
        )
    ),
    # Delta nets with as many value heads as key heads, attention with as many kv heads as query heads.
    "no-ngrams-equal-heads": Case(
        Shape(has_ngram=False, linear_num_key_heads=3, linear_num_value_heads=3, num_key_value_heads=4)
    ),
    # A budget of one block, and long blocks.
    "one-block-of-eight": Case(Shape(indexer_budget=8, indexer_compress_ratio=8, full_attention_interval=3)),
    # Blocks of which most score exactly zero.
    "ties": Case(
        Shape(
            indexer_n_heads=2,
            indexer_budget=6,
            indexer_compress_ratio=2,
            full_attention_interval=2,
            ple_layer=2,
        )
    ),
    # Blocks of one token, and the whole head rotated.
    "blocks-of-one": Case(
        Shape(
            indexer_budget=20,
            indexer_compress_ratio=1,
            partial_rotary_factor=1.0,
            num_hidden_layers=3,
            full_attention_interval=3,
        )
    ),
    # The indexer's tensors are there, but a ratio of 0 says not to use them.
    "dense": Case(Shape(is_dense=True, full_attention_interval=2, ple_layer=0)),
    # Attention in the first layer and in neighbours: only a list can say that.
    "listed-layers": Case(Shape(attention_layers=(0, 2, 3), num_hidden_layers=5, ple_layer=1)),
    # The n-gram table in a file of its own, and a block that is not part of the trunk.
    "split-with-prediction": Case(
        Shape(num_hidden_layers=3, full_attention_interval=3),
        FileLayout(is_split=True, has_prediction=True, lists_recurrent_layers=True),
    ),
    # Positions stretched by YaRN: of eight pairs one not at all, two in part, the rest in full.
    "yarn": Case(Shape(yarn_factor=4.0, full_attention_interval=2, ple_layer=0)),
    # No output matrix; norms of all streams as matrices.
    "tied-head": Case(Shape(hc_count=3), FileLayout(has_head=False, has_norm_matrices=True)),
    # Everything in half precision, vectors and the n-gram table too.
    "float16": Case(Shape(), FileLayout({"": "F16"})),
    # Some files keep the convolutions in F16 and other small tensors in BF16.
    "bfloat16": Case(Shape(), FileLayout({"conv1d": "F16", "": "BF16"})),
}
PREDICTION_CASES = {
    # The block drops positions as the trunk's attention does, from its 36th on.
    "prediction": Case(Shape(), FileLayout(has_prediction=True)),
    # The block sees everything, while the trunk drops blocks; an interval that would have it a delta net.
    "dense-prediction": Case(
        Shape(hc_count=2, num_hidden_layers=3, full_attention_interval=3, num_key_value_heads=1),
        FileLayout(has_prediction=True, has_dense_prediction=True),
    ),
    # No output matrix, one stream, and no n-grams.
    "tied-prediction": Case(
        Shape(hc_count=1, has_ngram=False, num_experts_per_tok=1),
        FileLayout(has_prediction=True, has_head=False),
    ),
}
