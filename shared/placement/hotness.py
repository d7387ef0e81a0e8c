"""How much each expert is used: for a while, for exchanges; and for long, for the profile.

Routes of steps are gathered as they are planned (`shared.placement.planner`), and counted when somebody wants
to know. Gathering apart what steps of prompts bring is what keeps these in bounds: all prompts between two
counts together weigh as much as `MOST_PROMPT_TOKENS`, however long they are and into however many chunks they
were divided, since the experts of a prompt need not be those of its answer.
"""

import numpy as np
from numpy.typing import NDArray

MOST_PROMPT_TOKENS = 4
"""As how many tokens all prompts between two counts weigh at most: as the 4 windows of a round of
`AdaptivePolicy` do. Chosen by replays (docs/decisions/placement-in-shared.md): where prompts need other
experts than answers, more would leave an answer's experts outside."""
_REMEMBERED_TOKENS = 100_000
"""The profile is about so many tokens, and those before weigh less and less."""
_START_TOKENS = 13
"""Of a profile as many tokens are remembered as of a long answer: 4 windows a round, of which the next one
keeps 0.7: 4 / (1 - 0.7)."""

Counts = NDArray[np.float32]
"""Of uses: float32 [layers, experts]."""


class Hotness:
    """Uses of all experts of a model."""

    def __init__(self, num_layers: int, num_experts: int, num_used: int) -> None:
        """`num_used`: experts that a token uses in a layer."""
        shape = num_layers, num_experts
        self.num_used = num_used
        self.counts: Counts = np.zeros(shape, np.float32)
        """Uses that are remembered for a while, as of the last `settle`."""
        self.long_counts: Counts = np.zeros(shape, np.float32)
        """Uses that are remembered for long, as of the last `settle`: the profile."""
        self.last_used: NDArray[np.int64] = np.full(shape, -1, np.int64)
        """int64 [layers, experts]: the last ticket that used the expert, -1 for none."""
        # Routes since the last count, of windows and of steps with prompts, and the tokens of the latter.
        self.window_routes: Counts = np.zeros(shape, np.float32)
        self.prompt_routes: Counts = np.zeros(shape, np.float32)
        self.prompt_tokens: NDArray[np.int64] = np.zeros(num_layers, np.int64)

    def start_from(self, profile: Counts) -> None:
        """Begins with what an earlier run has counted: float32 [layers, experts]."""
        self.long_counts[:] = profile
        totals = profile.sum(1, keepdims=True, dtype=np.float64)
        shares = np.divide(profile, totals, out=np.zeros(profile.shape), where=totals > 0)
        self.counts[:] = shares * (_START_TOKENS * self.num_used)

    def add(self, layer: int, expert_ids: NDArray[np.int32], ticket: int, *, is_prompt: bool = False) -> None:
        """Routes of a step that was not planned: int32 [tokens, k], negative ones left out. `is_prompt`:
        whether there are tokens of prompts among them."""
        chosen = expert_ids[expert_ids >= 0]
        routes = np.bincount(chosen, minlength=self.counts.shape[1])
        if is_prompt:
            self.prompt_routes[layer] += routes
            self.prompt_tokens[layer] += len(expert_ids)
        else:
            self.window_routes[layer] += routes
        self.last_used[layer, chosen] = np.maximum(self.last_used[layer, chosen], ticket)

    def settle(self) -> None:
        """Counts what was gathered."""
        if self.prompt_tokens.any():
            tokens = np.maximum(self.prompt_tokens, 1)
            weights = (np.minimum(tokens, MOST_PROMPT_TOKENS) / tokens).astype(np.float32)
            self.prompt_routes *= weights[:, None]
            self.window_routes += self.prompt_routes
            self.prompt_routes[:] = 0
            self.prompt_tokens[:] = 0
        self.counts += self.window_routes
        self.long_counts += self.window_routes
        self.window_routes[:] = 0
        if self.long_counts[0].sum() > 2 * _REMEMBERED_TOKENS * self.num_used:
            self.long_counts *= np.float32(0.5)

    def profile(self) -> Counts:
        """What to save: a copy of `long_counts`, everything counted."""
        self.settle()
        return self.long_counts.copy()

    def decay(self, share: float) -> None:
        """Of what is remembered for a while, only this share counts from now on, 0 to 1."""
        self.counts *= np.float32(share)
