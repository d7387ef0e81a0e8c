"""What the slots of the two rings hold: expert work for the cpu_worker, n-gram rows from the stager.

Both sides of a ring build its shape from the model's metadata and the number of tokens in a step, which the
gpu_worker announces with Init, so neither tells the other where an array lies.
"""

from enum import IntEnum

import numpy as np

from shared.model_config import NgramConfig, Qwen4ExpConfig
from shared.ring import RingShape

# One slot is filled while the other is worked on.
_NUM_SLOTS = 2


_HEADER_WORDS = 8


class ExpertHeader(IntEnum):
    """Places in the `header` of an expert slot. Those from COMPUTE_NS on are written by the cpu_worker."""

    LAYER = 0
    NUM_TOKENS = 1
    COMPUTE_NS = 2
    DISK_WAIT_NS = 3
    """The part of it in which there was nothing to compute for want of weights that were being read."""


class NgramHeader(IntEnum):
    """Places in the `header` of an n-gram slot. Those from SERVE_NS on are written by the stager."""

    NUM_TOKENS = 0
    SERVE_NS = 1
    DISK_WAIT_NS = 2
    """The part of it in which rows were being read."""


def expert_ring(config: Qwen4ExpConfig, max_tokens: int) -> RingShape:
    """gpu_worker -> cpu_worker: the routed experts of one layer for all tokens of a step.

    In: `activations` [tokens, hidden], `expert_ids` and `expert_weights` [tokens, experts used].
    A negative id is a route that is not the cpu_worker's.
    Out: `outputs` [tokens, hidden], each token's weighted sum over its experts, in their order.
    """
    routes = (max_tokens, config.num_experts_used)
    return RingShape(
        _NUM_SLOTS,
        {
            "header": (np.int64, (_HEADER_WORDS,)),
            "activations": (np.float32, (max_tokens, config.hidden)),
            "expert_ids": (np.int32, routes),
            "expert_weights": (np.float32, routes),
            "outputs": (np.float32, (max_tokens, config.hidden)),
        },
    )


def ngram_ring(config: NgramConfig, max_tokens: int) -> RingShape:
    """gpu_worker -> stager: the n-gram features of all tokens of a step.

    In: `windows` [tokens, n-gram size], each token's own id first, then the ids before it, -1
    where there is none.
    Out: `features` [tokens, feature width], the concatenated rows of the table; and for each token how many
    of its rows were in memory (`hits`), the reads that were made for it (`reads`) and their bytes, and the
    errno of a read that failed (`failures`, 0 for none; its features are then zeros).
    """
    return RingShape(
        _NUM_SLOTS,
        {
            "header": (np.int64, (_HEADER_WORDS,)),
            "windows": (np.int32, (max_tokens, config.ngram_size)),
            "features": (np.float32, (max_tokens, config.feature_width)),
            "hits": (np.int32, (max_tokens,)),
            "reads": (np.int32, (max_tokens,)),
            "read_bytes": (np.int32, (max_tokens,)),
            "failures": (np.int32, (max_tokens,)),
        },
    )


def shared_memory_needed(config: Qwen4ExpConfig, max_tokens: int) -> int:
    """Bytes of /dev/shm that a stack takes with steps of so many tokens."""
    shapes = [expert_ring(config, max_tokens)]
    if config.ngram is not None:
        shapes.append(ngram_ring(config.ngram, max_tokens))
    return sum(shape.layout().num_bytes for shape in shapes)
