"""The plan of one layer: which group goes which way, as `shared.placement.planner` has left it."""

import numpy as np
from numpy.typing import NDArray

DEVICE, TRANSFER, CPU, SKIPPED = range(4)
"""The ways: computed from a slot, transferred and computed on the device, computed by the CPU, left out."""
NUM_WAYS = 4


class LayerPlan:
    """The plan of one layer. All of it is valid until the next one is made.

    Groups are those of the device, in the order of their experts, then those that are transferred, likewise.
    Routes of a group are in the order of the tokens. A route that is neither in a group nor in `cpu_ids` is
    skipped. What goes which way adds up to all routes that were given.
    """

    def __init__(self, num_experts: int, num_used: int, max_tokens: int) -> None:
        most_routes = max_tokens * num_used
        most_groups = min(num_experts, most_routes)
        self.num_tokens = 0
        """Of the step."""
        self._cpu_ids = np.full((max_tokens, num_used), -1, np.int32)
        self._group_experts = np.zeros(most_groups, np.int32)
        self._group_slots = np.zeros(most_groups, np.int32)
        self._group_starts = np.zeros(most_groups + 1, np.int32)
        self._route_tokens = np.zeros(most_routes, np.int32)
        self._route_places = np.zeros(most_routes, np.int32)
        self._token_routes = np.zeros((NUM_WAYS - 1, max_tokens), np.int32)
        self._group_totals = np.zeros(NUM_WAYS, np.int64)
        self._route_totals = np.zeros(NUM_WAYS, np.int64)
        # Reading an item of a memoryview takes a third of the time of reading one of an array.
        self._groups, self._routes = self._group_totals.data, self._route_totals.data

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What a planner writes to, by the names it has there (`shared.placement.plan_kernel.PLAN`)."""
        names = ("cpu_ids", "group_experts", "group_slots", "group_starts", "route_tokens", "route_places")
        arrays = {name: getattr(self, f"_{name}") for name in names}
        arrays["token_routes"] = self._token_routes
        return arrays | {"group_totals": self._group_totals, "route_totals": self._route_totals}

    @property
    def num_device_groups(self) -> int:
        """Experts that are resident."""
        return self._groups[DEVICE]

    @property
    def num_transfer_groups(self) -> int:
        """Experts to be transferred."""
        return self._groups[TRANSFER]

    @property
    def num_groups(self) -> int:
        """Experts that the device computes: both of the above."""
        return self._groups[DEVICE] + self._groups[TRANSFER]

    @property
    def num_cpu_groups(self) -> int:
        """Experts that the CPU computes."""
        return self._groups[CPU]

    @property
    def num_skipped_groups(self) -> int:
        """Experts that are left out."""
        return self._groups[SKIPPED]

    @property
    def num_device_routes(self) -> int:
        """Routes of resident experts."""
        return self._routes[DEVICE]

    @property
    def num_transfer_routes(self) -> int:
        """Routes of experts to be transferred."""
        return self._routes[TRANSFER]

    @property
    def num_cpu_routes(self) -> int:
        """Routes of experts that the CPU computes."""
        return self._routes[CPU]

    @property
    def num_skipped_routes(self) -> int:
        """Routes that are left out."""
        return self._routes[SKIPPED]

    @property
    def cpu_ids(self) -> NDArray[np.int32]:
        """int32 [tokens, num_used]: the CPU's experts in their places, negative elsewhere."""
        return self._cpu_ids[: self.num_tokens]

    @property
    def group_experts(self) -> NDArray[np.int32]:
        """int32 [num_groups]."""
        return self._group_experts[: self.num_groups]

    @property
    def group_slots(self) -> NDArray[np.int32]:
        """int32 [num_groups]: the slot of a resident expert, -1 of one to be transferred."""
        return self._group_slots[: self.num_groups]

    @property
    def group_starts(self) -> NDArray[np.int32]:
        """int32 [num_groups + 1]: where the routes of each group begin, and where the last ones end."""
        return self._group_starts[: self.num_groups + 1]

    @property
    def route_tokens(self) -> NDArray[np.int32]:
        """int32 [routes of groups]: the token."""
        return self._route_tokens[: self._routes[DEVICE] + self._routes[TRANSFER]]

    @property
    def route_places(self) -> NDArray[np.int32]:
        """int32 [routes of groups]: the place among the step's routes, token x num_used + rank."""
        return self._route_places[: self._routes[DEVICE] + self._routes[TRANSFER]]

    @property
    def token_device_routes(self) -> NDArray[np.int32]:
        """int32 [tokens]: how many routes of each token are of resident experts."""
        return self._token_routes[0, : self.num_tokens]

    @property
    def token_transfer_routes(self) -> NDArray[np.int32]:
        """int32 [tokens]: how many are of experts to be transferred."""
        return self._token_routes[1, : self.num_tokens]

    @property
    def token_skipped_routes(self) -> NDArray[np.int32]:
        """int32 [tokens]: how many are left out."""
        return self._token_routes[2, : self.num_tokens]
