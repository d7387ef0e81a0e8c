"""The real model's extents and the original engine's logged numbers, to plan with; no file is needed."""

from shared.model_config import IndexerConfig, NgramConfig, Qwen4ExpConfig
from shared.placement.memory_plan import Placement, slots_of, work_space
from shared.placement.sizes import ExpertSizes
from shared.rope_scaling import RopeScaling, ScalingType

GIB, MIB = 1 << 30, 1 << 20

REAL_CONFIG = Qwen4ExpConfig(
    num_layers=48,
    num_prediction_layers=0,
    vocab_size=248320,
    hidden=2560,
    num_streams=4,
    stream_rank=320,
    rms_epsilon=1e-6,
    num_query_heads=24,
    num_kv_heads=2,
    head_dim=256,
    rope_dim=64,
    rope_base=1e7,
    rope_scaling=RopeScaling(ScalingType.NONE, 262144),
    indexer=IndexerConfig(num_heads=4, head_dim=128, token_budget=2048),
    compress_ratios=(0, 0, 0, 4) * 12,
    is_recurrent=(True, True, True, False) * 12,
    conv_kernel=4,
    delta_head_dim=128,
    num_delta_key_heads=16,
    num_delta_value_heads=48,
    num_experts=512,
    num_experts_used=10,
    expert_weights_scale=1.0,
    ngram=NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=8,
        conv_kernel=4,
        eos_token_id=248044,
        multipliers=(1, 1, 1),
        head_vocab_sizes=(20_000_003,) * 16,
        head_offsets=tuple(20_000_003 * head for head in range(16)),
        row_width=160,
    ),
)

LOGGED_SLOTS = 13432
"""18.00 GiB of IQ2_XS blobs."""
# The experts without a slot were logged as 15.02 GiB. They are larger than those that have one, 1.372 MiB on
# average: the file's types differ by layer.
_COMPLEMENT_BLOB = 15.02 * GIB / (24576 - LOGGED_SLOTS)


def logged_placement(num_slots: int = LOGGED_SLOTS) -> Placement:
    """The original's placement on a card of 24 GB, every blob as large as those of its complement."""
    sizes = ExpertSizes((round(_COMPLEMENT_BLOB),) * 48, num_experts=512, num_used=10)
    return Placement(sizes, slots_of(sizes, num_slots), work_space(REAL_CONFIG, sizes, 1024))
