"""Which drafts are right: the sampler chooses a token for each position of a window, from the model's logits
there, and a draft is right where it is the token that was chosen.

That is rejection sampling with drafts that are certain: a draft d is accepted with the probability p(d) that
the model gives it, and else the token is one of the others, by their probabilities (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023, for a draft model that is sure). Since each token
costs one draw of the request's own generator, whoever was drafted or not, a seed gives the same answer with
and without drafts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_worker.sequence import Sequence
from shared.messages import TokenLogprobs


class Verified(NamedTuple):
    """The tokens that a window has given, at least one; `num_accepted` of them were drafted."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_accepted: int


def verify(sequence: Sequence, logits: NDArray[np.float32]) -> Verified:
    """Chooses tokens from logits [1 + drafts, vocabulary], and appends them to the sequence, until one is not
    what was drafted or ends the sequence. Raises ModelOutputError."""
    drafts = sequence.drafts.token_ids
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for place, row in enumerate(logits):
        choice = sequence.sampler.choose(row)
        sequence.token_ids.append(choice.token_id)
        token_ids.append(choice.token_id)
        if choice.logprobs is not None:
            logprobs.append(choice.logprobs)
        is_over = sequence.finish_reason is not None
        if is_over or place == len(drafts) or choice.token_id != drafts[place]:
            break
    return Verified(token_ids, logprobs, len(token_ids) - 1)
