"""Decides how the experts of a model are kept: all of them in RAM, some of them in a pool, or mapped.

Values in, a decision out; what they are is measured by `shared.memory_budget`.
"""

import logging
from dataclasses import dataclass

from shared.errors import ResourceError
from shared.expert_blobs import BlobLayout, ExpertMode
from shared.memory_budget import Memory, Needs
from shared.model_config import Qwen4ExpConfig

_log = logging.getLogger(__name__)

_MIB, _GIB = 1 << 20, 1 << 30
_HOW_TO_ENLARGE = "docker: shm_size; elsewhere: mount -o remount,size=... /dev/shm"


@dataclass(frozen=True, slots=True)
class Experts:
    """What there is to keep, in bytes: of all experts, and of one place in every layer; and how many."""

    num_bytes: int
    place_bytes: int
    num_per_layer: int
    num_used: int

    @property
    def smallest_pool(self) -> int:
        """Places of a layer, at least: a wave of a step takes half of them at a time, and one token's experts
        are one wave."""
        return min(2 * self.num_used, self.num_per_layer)


def experts_of(config: Qwen4ExpConfig, layout: BlobLayout) -> Experts:
    """Those of a model."""
    num_bytes = sum(part.num_bytes for layer in layout.layers for part in layer.parts) * config.num_experts
    return Experts(num_bytes, layout.place_bytes, config.num_experts, config.num_experts_used)


@dataclass(frozen=True, slots=True)
class Residency:
    """The decision. `places_per_layer` is 0 but for a pool."""

    mode: ExpertMode
    places_per_layer: int = 0


def decide(
    setting: str, budget_gib: float, experts: Experts, memory: Memory, needs: Needs, free_shared: int
) -> Residency:
    """The mode for a setting of `--experts` and `--ram-budget` (0 for none). `free_shared` is what /dev/shm
    has left for a pool, in bytes. Raises ResourceError for what was asked for and cannot be had."""
    if setting == ExpertMode.MAPPED:
        return Residency(ExpertMode.MAPPED)
    above_floor = max(0, memory.available - memory.floor)
    room = max(0, above_floor - needs.total)
    if budget_gib:
        budget = int(budget_gib * _GIB)
        if min(budget, experts.num_bytes) > above_floor:
            raise ResourceError(
                f"--ram-budget is {budget_gib:g} GiB, but {_size(memory.available)} of memory are "
                f"available, of which {_size(memory.floor)} stay free; lower it to "
                f"{_gib(above_floor, down=True)}, or free memory"
            )
        room = budget
    if experts.num_bytes <= room:
        return Residency(ExpertMode.RESIDENT)
    what = _account(budget_gib, memory, needs)
    if setting == ExpertMode.RESIDENT:
        raise ResourceError(
            f"--experts resident: all experts are {_size(experts.num_bytes)}, and "
            f"{_size(room, down=True)} can be had for them ({what}); free memory, or take --experts auto, "
            "which keeps those in use"
        )
    # Of a budget that was asked for, nothing is left for others.
    kept = 0 if budget_gib else needs.lent
    return _pool(experts, max(0, room - kept), free_shared, bool(budget_gib), what)


def _pool(experts: Experts, room: int, free_shared: int, is_asked_for: bool, what: str) -> Residency:
    most = min(room, free_shared)
    num_places = most // experts.place_bytes
    if num_places < experts.smallest_pool:
        is_shared = free_shared < room
        short = "shared memory (/dev/shm)" if is_shared else "memory"
        remedy = f"enlarge /dev/shm ({_HOW_TO_ENLARGE})" if is_shared else "free memory"
        needed = experts.smallest_pool * experts.place_bytes
        reason = (
            f"a pool of experts needs {_size(needed)} of {short}, and {_size(most, down=True)} can be "
            f"had ({what})"
        )
        if is_asked_for:
            raise ResourceError(f"{reason}; raise --ram-budget, {remedy}, or take --experts mapped")
        _log.warning("%s; experts are left to the page cache. To mend that, %s", reason, remedy)
        return Residency(ExpertMode.MAPPED)
    if free_shared < min(room, experts.num_per_layer * experts.place_bytes):
        _log.warning(
            "the pool of experts takes %s, which is what /dev/shm has left; %s of memory could "
            "be had for it: enlarge /dev/shm (%s)",
            _size(num_places * experts.place_bytes),
            _size(room, down=True),
            _HOW_TO_ENLARGE,
        )
    return Residency(ExpertMode.POOL, min(num_places, experts.num_per_layer))


def _account(budget_gib: float, memory: Memory, needs: Needs) -> str:
    if budget_gib:
        return f"--ram-budget {budget_gib:g}"
    slots = f", slots of experts {_size(needs.slots)}" if needs.slots else ""
    slots += f", experts of slots that are lent {_size(needs.lent)}" if needs.lent else ""
    kept = f"conversations {_size(needs.conversations)}, " if needs.conversations else ""
    return (
        f"available {_size(memory.available)}, of which {_size(memory.floor)} stay free; dense weights "
        f"{_size(needs.dense)}, context {_size(needs.context + needs.states)}, {kept}n-gram rows "
        f"{_size(needs.rows)}, "
        f"processes {_size(needs.processes)}{slots}"
    )


def _size(num_bytes: int, *, down: bool = False) -> str:
    """In GiB with two digits, below that in whole MiB; rounded down where more would not be had."""
    if num_bytes >= _GIB:
        return f"{_gib(num_bytes, down=down)} GiB"
    return f"{num_bytes // _MIB if down else -(-num_bytes // _MIB)} MiB"


def _gib(num_bytes: int, *, down: bool = False) -> str:
    hundredths = num_bytes * 100 // _GIB if down else -(-num_bytes * 100 // _GIB)
    return f"{hundredths / 100:.2f}"
