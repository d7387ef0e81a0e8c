"""What of a plan keeps the stack from starting: how much of which memory is missing, and what to do about it.

Experts that RAM has no room for are no shortage: they are read from the disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.config import CpuWorkerConfig, GpuWorkerConfig, expert_cache_slots, prefill_setting
from shared.memory_budget import Memory, Needs
from shared.placement.chunk_choice import Candidate, Obstacle
from shared.placement.memory_plan import DeviceNeeds, Placement, slots_in
from shared.placement.sizes import size_text

DEVICE_MEMORY, RAM = "device memory", "RAM"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shortage:
    """What does not fit: `needed` of a memory `purpose`, where `there` is so much, both in bytes."""

    memory: str
    purpose: str
    needed: int
    there: int
    remedy: str

    @property
    def num_bytes(self) -> int:
        """What is missing."""
        return self.needed - self.there


def device_shortages(
    settings: GpuWorkerConfig,
    device_bytes: int,
    needs: DeviceNeeds,
    least: DeviceNeeds,
    placement: Placement,
) -> Iterator[Shortage]:
    """Of a device with so much free memory; `least` is what is needed once all is done that frees some."""
    asked = expert_cache_slots(settings.expert_cache)
    if needs.total > device_bytes:
        remedy = "see what frees some above, or take --device cpu"
        if least.total > device_bytes:
            remedy = (
                f"with all that frees some above {size_text(least.total)} are needed still: take a device "
                "that has them free, or --device cpu"
            )
        yield Shortage(DEVICE_MEMORY, "before any expert", needs.total, device_bytes, remedy)
    elif asked is not None and needs.total + placement.cache_bytes > device_bytes:
        fitting = sum(slots_in(placement.sizes, device_bytes - needs.total))
        yield Shortage(
            DEVICE_MEMORY,
            f"with {placement.num_slots} slots",
            needs.total + placement.cache_bytes,
            device_bytes,
            f"--expert-cache {fitting} fits, or auto",
        )


def chunk_shortages(
    settings: GpuWorkerConfig, placement: Placement, chunk: int, candidates: Sequence[Candidate]
) -> Iterator[Shortage]:
    """Of slots to lend to a chunk, on a device whose memory is not RAM: there activations need them."""
    chosen = [each for each in candidates if each.tokens == chunk and each.obstacle is Obstacle.SLOTS]
    if not chosen:
        return
    ways = []
    smaller = [
        each.tokens for each in candidates if each.tokens < chunk and each.obstacle is not Obstacle.SLOTS
    ]
    if smaller:
        ways.append(f"--prefill {smaller[-1]} fits")
        if prefill_setting(settings.prefill).tokens is not None:
            ways.append("--prefill auto takes what does")
    if expert_cache_slots(settings.expert_cache) is not None:
        ways.append("raise --expert-cache")
    elif not smaller:
        ways.append("see what frees some above")
    if not smaller:
        ways.append("take --expert-cache 0")
    (candidate,) = chosen
    yield Shortage(
        DEVICE_MEMORY,
        f"for a chunk of {chunk} tokens to borrow",
        candidate.lent_bytes,
        placement.cache_bytes,
        ", or ".join(ways),
    )


def ram_shortages(
    settings: CpuWorkerConfig, memory: Memory, needs: Needs, placement: Placement
) -> Iterator[Shortage]:
    """Of RAM, as the stack counts it when it starts: what has to stay free is needed too."""
    sizes, fixed = placement.sizes, memory.floor + needs.total
    all_experts = sizes.num_bytes + needs.prediction
    if fixed - needs.slots > memory.available:
        yield Shortage(
            RAM, "before any expert", fixed - needs.slots, memory.available, _ways(settings, needs)
        )
    elif fixed > memory.available:
        fitting = sum(slots_in(sizes, memory.available - fixed + needs.slots))
        remedy = f"--expert-cache {fitting} fits"
        yield Shortage(RAM, f"with {placement.num_slots} slots", fixed, memory.available, remedy)
    elif settings.experts == "resident":
        # A budget takes the place of what is left of RAM.
        there = int(settings.ram_budget * _GIB) or memory.available - fixed
        if all_experts > there:
            remedy = "take --experts auto, which keeps those in use"
            yield Shortage(RAM, "for --experts resident", all_experts, there, remedy)
    budget = min(int(settings.ram_budget * _GIB), all_experts)
    if settings.experts != "mapped" and budget and memory.floor + budget > memory.available:
        most = max(0, memory.available - memory.floor) / _GIB
        remedy = f"lower it to {int(most * 100) / 100:.2f}, or leave it out"
        purpose = f"for --ram-budget {settings.ram_budget:g}"
        yield Shortage(RAM, purpose, memory.floor + budget, memory.available, remedy)


def _ways(settings: CpuWorkerConfig, needs: Needs) -> str:
    ways = ["free memory"]
    if settings.ple_io == "ram" and needs.rows:
        ways.append("take --ple-io direct")
    return ", or ".join(ways)


def ways_out_of_reading(
    settings: CpuWorkerConfig, needs: Needs, chunk: int, candidates: Sequence[Candidate]
) -> str:
    """What gets experts into RAM that are read from the disk otherwise."""
    smaller = [each.tokens for each in candidates if each.tokens < chunk and not each.obstacle]
    if smaller:
        return f"--prefill {smaller[-1]} fits"
    raised = ", or raise --ram-budget" if settings.ram_budget else ""
    return _ways(settings, needs) + raised
