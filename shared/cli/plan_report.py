"""A plan of `strata plan` as text for someone in a hurry, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shared.config import GpuWorkerConfig
from shared.placement.chunk_choice import Candidate, Obstacle
from shared.placement.device import runs_on_cuda
from shared.placement.memory_plan import KV_GROW_FIRST
from shared.placement.rates import Rates
from shared.placement.stack_plan import StackPlan

_MIB, _GIB = 1 << 20, 1 << 30
_MARKS = {None: "yes", Obstacle.SLOTS: "no, slots", Obstacle.HALF: "over half", Obstacle.RAM: "no, RAM"}
# How a rate is told: its name, unit, and what that is in.
_RATES = {
    "link": ("link", "GB/s", 1e9),
    "cpu": ("CPU", "GB/s", 1e9),
    "disk": ("disk", "MB/s", 1e6),
    "device": ("device memory", "GB/s", 1e9),
    "prompt_tokens": ("prompts", "tokens/s", 1.0),
}


def as_text(
    plan: StackPlan, name: str, gpu_worker: GpuWorkerConfig, rates: Rates, origins: dict[str, str]
) -> Iterator[str]:
    """The lines of the report; the verdict comes last, where it stays in sight."""
    experts = plan.facts.experts
    table = f", n-gram table {size(plan.facts.table)}" if plan.facts.table else ""
    yield (
        f"model    {name}: {experts.num_layers} layers of {experts.num_experts} experts, "
        f"{size(experts.num_bytes)} in all{table}"
    )
    yield from _device(plan, gpu_worker)
    yield from _ram(plan)
    if plan.candidates:
        yield from _chunks(plan)
    yield from _savings(plan)
    yield from _expected(plan, rates, origins)
    yield from _verdict(plan)


def _device(plan: StackPlan, gpu_worker: GpuWorkerConfig) -> Iterator[str]:
    placement, needs = plan.placement, plan.device
    slots = f"{placement.num_slots} slots, {placement.coverage:.1%} of experts"
    if needs is None or plan.device_bytes is None:
        reason = "--device cpu" if gpu_worker.device == "cpu" else "no --vram given"
        if gpu_worker.device == "auto" and runs_on_cuda("auto"):
            reason += ", though this machine seems to have a CUDA device"
        kept = f"{slots}, kept in RAM" if placement.num_slots else "no slots for experts"
        yield f"device   none ({reason}): {kept}"
        return
    context = f"{plan.max_context} tokens, shared by all requests"
    if gpu_worker.kv_grow and plan.max_context > KV_GROW_FIRST:
        context = f"{KV_GROW_FIRST} of {plan.max_context} tokens, grows"
    yield f"device   {size(plan.device_bytes)} free"
    yield _line("dense weights", needs.dense)
    yield _line("keys and values", needs.context, context)
    yield _line("states", needs.states, f"{gpu_worker.parallel} requests")
    yield _line("buffers", needs.buffers)
    yield _line("reserve", needs.reserve, "stays free")
    if not gpu_worker.prefill_borrow:
        yield _line("work space", max(0, plan.device_bytes - needs.total - placement.cache_bytes))
    yield _line("experts", placement.cache_bytes, slots)


def _ram(plan: StackPlan) -> Iterator[str]:
    needs, complement = plan.ram, plan.complement
    what = "all experts"
    if plan.placement.num_slots:
        what = f"experts without a slot, while chunks of {plan.chunk} are read"
    yield f"RAM      {size(plan.memory.available)} available"
    if needs.dense:
        yield _line("dense weights", needs.dense)
    if needs.context:
        yield _line("keys and values", needs.context)
    if needs.slots:
        yield _line("slots", needs.slots, "the device's memory is RAM")
    if plan.facts.table:
        yield _line("n-gram rows", needs.rows, "the whole table" if needs.rows == plan.facts.table else "")
    yield _line("processes", needs.processes)
    yield _line("headroom", plan.headroom, "stays free")
    yield _line("for experts", plan.for_experts, f"{size(complement)} wanted: {what}")


def _chunks(plan: StackPlan) -> Iterator[str]:
    yield f"chunks   tokens   lent slots        lent     in RAM   {plan.max_context} tokens   fits"
    for candidate in plan.candidates:
        is_shown = candidate.tokens & (candidate.tokens - 1) == 0 or candidate is plan.candidates[-1]
        if not is_shown and candidate.tokens != plan.chunk:
            continue
        yield _chunk(candidate, candidate.tokens == plan.chunk, len(f"{plan.max_context} tokens"))


def _chunk(candidate: Candidate, is_chosen: bool, width: int) -> str:
    return (
        f"       {'>' if is_chosen else ' '} {candidate.tokens:>6}{candidate.lent_slots:>13}"
        f"{size(candidate.lent_bytes):>12}{size(candidate.complement_bytes):>11}"
        f"{_duration(candidate.seconds):>{width + 3}}   {_MARKS[candidate.obstacle]}"
    )


def _savings(plan: StackPlan) -> Iterator[str]:
    width = max((len(saving.setting) for saving in plan.savings), default=0)
    for number, saving in enumerate(plan.savings):
        more = f", {saving.num_slots} slots more" if saving.num_slots else ""
        heading = "frees" if number == 0 else ""
        yield f"{heading:<9}{saving.setting:<{width}}{size(saving.num_bytes):>12} of {saving.memory}{more}"


def _expected(plan: StackPlan, rates: Rates, origins: dict[str, str]) -> Iterator[str]:
    shares = plan.shares
    prompts = ", ".join(f"{_duration(s)} after {tokens} tokens" for tokens, s in plan.seconds.items())
    yield (
        f"expect   at most {_number(1 / plan.token_s)} tokens/s of one request; experts found on the device "
        f"{shares.device:.1%}, in RAM {shares.ram:.1%}, on the disk {shares.disk:.1%}"
    )
    yield f"         first token {prompts}, n-gram rows at hand"
    told = []
    for rate, origin in origins.items():
        label, unit_name, unit = _RATES[rate]
        told.append(f"{label} {_number(getattr(rates, rate) / unit)} {unit_name} ({origin})")
    yield f"         by {', '.join(told)}"


def _verdict(plan: StackPlan) -> Iterator[str]:
    for shortage in plan.shortages:
        yield f"does not fit: short of {size(shortage.num_bytes)} of {shortage.memory}; {shortage.remedy}"
    if not plan.shortages:
        slots = plan.placement.num_slots
        yield f"fits: chunks of {plan.chunk} tokens, {slots or 'no'} slots of experts on the device"


def as_json(plan: StackPlan, name: str, rates: Rates, origins: dict[str, str]) -> dict[str, Any]:
    """The plan for programs: sizes in bytes, times in seconds, rates in bytes per second."""
    placement = plan.placement
    return {
        "model": name,
        "fits": not plan.shortages,
        "max_context": plan.max_context,
        "experts": {
            "layers": plan.facts.experts.num_layers,
            "per_layer": plan.facts.experts.num_experts,
            "used": plan.facts.experts.num_used,
            "bytes": plan.facts.experts.num_bytes,
        },
        "device": None if plan.device is None else {"free": plan.device_bytes, **asdict(plan.device)},
        "slots": {
            "count": placement.num_slots,
            "bytes": placement.cache_bytes,
            "coverage": placement.coverage,
            "per_layer": list(placement.slots_per_layer),
        },
        "ram": {
            "available": plan.memory.available,
            "headroom": plan.headroom,
            **asdict(plan.ram),
            "for_experts": plan.for_experts,
            "complement": plan.complement,
        },
        "chunk": plan.chunk,
        "chunks": [asdict(candidate) for candidate in plan.candidates],
        "shares": asdict(plan.shares),
        "decode_tokens_s": 1 / plan.token_s,
        "first_token_s": {str(tokens): seconds for tokens, seconds in plan.seconds.items()},
        "rates": {
            rate: {"value": getattr(rates, rate), "origin": origin} for rate, origin in origins.items()
        },
        "frees": [asdict(saving) for saving in plan.savings],
        "short": [asdict(shortage) for shortage in plan.shortages],
    }


def size(num_bytes: float) -> str:
    """In GiB with two digits, below that in MiB, below a tenth of one in KiB."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if num_bytes >= _MIB / 10:
        return f"{num_bytes / _MIB:.{0 if num_bytes >= 10 * _MIB else 1}f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"


def _line(what: str, num_bytes: int, more: str = "") -> str:
    return f"  {what:<20}{size(num_bytes):>12}  {more}".rstrip()


def _number(value: float) -> str:
    """With three digits, or whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
