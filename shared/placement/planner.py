"""Which way each route of a layer takes: the device, a transfer to it, the CPU, or none.

Routes of one expert are a *group*, and a group goes one way. An expert that is resident is computed on the
device. Of those that are missed, a share is transferred to the device and computed there, those first that
most tokens want, since a transfer costs the same for one token as for many; the CPU computes the others.

`LayerPlanner.plan` is one call into machine code for each layer of each step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.native.records import record
from shared.native.task import address_of
from shared.placement.hotness import Hotness
from shared.placement.layer_plan import LayerPlan
from shared.placement.plan_kernel import NO_LAYER, PLAN, TOO_MANY, WRONG_WIDTH, plan_layer_kernel
from shared.placement.table import ResidencyTable

SKIPS_NONE_FROM = 0.9
"""Coverage from which on no routes are skipped: so few are missed that leaving them out gains nothing. The
original engine's value."""


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What becomes of experts that are missed."""

    transfer_share: float = 0.0
    """The share of missed groups that are transferred, 0 to 1. It is met over time: what is left of one layer
    goes to the next one."""
    most_transfers: int = 1 << 30
    """Of one layer in one step."""
    skip_rank: int = 0
    """A missed expert that no token ranks among its first so many is left out; 0 leaves out none."""

    def __post_init__(self) -> None:
        if not 0 <= self.transfer_share <= 1:
            raise ValueError(f"the share of transfers is {self.transfer_share}; it can be 0 to 1")
        if self.most_transfers < 0 or self.skip_rank < 0:
            raise ValueError(
                f"{self.most_transfers} transfers at most, ranks from {self.skip_rank} on: neither can be "
                "negative"
            )


def skip_rank_at(coverage: float, skip_rank: int) -> int:
    """What `PlanRules.skip_rank` is to be where so many experts are resident (`ResidencyTable.coverage`)."""
    return 0 if coverage >= SKIPS_NONE_FROM else skip_rank


class LayerPlanner:
    """Makes plans against one table; counts uses of experts. Calls come from the table's thread."""

    def __init__(self, table: ResidencyTable, hotness: Hotness, num_used: int, max_tokens: int) -> None:
        """Steps have up to `max_tokens` tokens, which use `num_used` experts each. Raises ValueError for a
        hotness of other experts than the table's."""
        if hotness.counts.shape != table.slot_of.shape:
            raise ValueError(
                f"uses are of {hotness.counts.shape} layers and experts, slots of {table.slot_of.shape}"
            )
        self._plan = LayerPlan(table.num_experts, num_used, max_tokens)
        scratch = {
            name: np.zeros(table.num_experts, np.int32)
            for name in ("route_counts", "best_ranks", "ways", "cursors")
        }
        scratch["groups_of_size"] = np.zeros(max_tokens * num_used + 1, np.int32)
        self._table = table
        self._kept = hotness, scratch
        self._record = record(
            PLAN,
            slot_of=table.slot_of,
            read_marks=table.read_marks,
            last_used=hotness.last_used,
            window_routes=hotness.window_routes,
            prompt_routes=hotness.prompt_routes,
            prompt_tokens=hotness.prompt_tokens,
            num_layers=table.num_layers,
            num_experts=table.num_experts,
            num_used=num_used,
            max_tokens=max_tokens,
            **scratch,
            **self._plan.arrays(),
        )
        self._address = address_of(self._record)
        self._run = plan_layer_kernel()

    def plan(
        self,
        layer: int,
        expert_ids: NDArray[np.int32],
        ticket: int,
        rules: PlanRules,
        *,
        is_prompt: bool = False,
    ) -> LayerPlan:
        """The ways of a layer's routes. `expert_ids`: int32 [tokens, num_used], contiguous, each token's best
        expert first; negative ones are nobody's. Slots that are used get the ticket as a mark of reading.
        `is_prompt`: whether there are tokens of prompts in the step, whose uses weigh less (`Hotness`).

        Raises ValueError for a layer or an expert that there is not, too many tokens, or a ticket whose work
        has ended; nothing is marked then.
        """
        self._table.check_ticket(ticket)
        refusal = self._run(
            self._address,
            layer,
            expert_ids,
            ticket,
            rules.transfer_share,
            rules.most_transfers,
            rules.skip_rank,
            int(is_prompt),
        )
        if refusal:
            raise self._refused(refusal, layer, expert_ids)
        self._plan.num_tokens = len(expert_ids)
        return self._plan

    def _refused(self, refusal: int, layer: int, expert_ids: NDArray[np.int32]) -> ValueError:
        made = self._record[0]
        if refusal == NO_LAYER:
            return ValueError(f"there is no layer {layer}; there are {made['num_layers']}")
        if refusal == TOO_MANY:
            return ValueError(
                f"layer {layer}: a step of {len(expert_ids)} tokens; plans are made for up to "
                f"{made['max_tokens']}"
            )
        if refusal == WRONG_WIDTH:
            return ValueError(
                f"layer {layer}: {expert_ids.shape[1]} experts a token; plans are made for {made['num_used']}"
            )
        token, rank = int(made["wrong_token"]), int(made["wrong_rank"])
        return ValueError(
            f"layer {layer}: token {token} has expert {expert_ids[token, rank]} at rank {rank}; "
            f"there are {made['num_experts']}"
        )
