"""A plan of `strata plan` as text for someone in a hurry, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shared.config import GpuWorkerConfig, expert_cache_slots
from shared.kv_format import EXACT, kv_format
from shared.memory_budget import COUNTED_CONTEXT_TOKENS
from shared.placement.chunk_choice import Candidate, Obstacle
from shared.placement.device import runs_on_cuda
from shared.placement.memory_plan import KV_GROW_FIRST
from shared.placement.rates import Rates
from shared.placement.sizes import context_bytes, size_text
from shared.placement.stack_plan import StackPlan
from shared.rope_scaling import ScalingType

_MARKS = {
    None: "yes",
    Obstacle.SLOTS: "no, over all slots",
    Obstacle.HALF: "no, over half of the slots",
    Obstacle.RAM: "no, over RAM",
}
# How a rate is told: its name, unit, and what that is in.
_RATES = {
    "link": ("link", "GB/s", 1e9),
    "cpu": ("CPU", "GB/s", 1e9),
    "disk": ("disk", "MB/s", 1e6),
    "device": ("device memory", "GB/s", 1e9),
    "prompt_tokens": ("prompts", "tokens/s", 1.0),
}


def as_text(
    plan: StackPlan,
    name: str,
    gpu_worker: GpuWorkerConfig,
    rates: Rates,
    origins: dict[str, str],
    *,
    is_ram_given: bool,
) -> Iterator[str]:
    """The lines of the report; the verdict comes last, where it stays in sight. RAM that is given is all
    there is, not what this machine has available."""
    experts = plan.facts.experts
    table = f", n-gram table {size_text(plan.facts.table)}" if plan.facts.table else ""
    yield (
        f"model    {name}: {experts.num_layers} layers of {experts.num_experts} experts, "
        f"{size_text(experts.num_bytes)} in all{table}"
    )
    yield from _context(plan, gpu_worker)
    yield from _device(plan, gpu_worker)
    yield from _ram(plan, gpu_worker, is_ram_given=is_ram_given)
    if plan.candidates:
        yield from _chunks(plan)
    yield from _savings(plan)
    if not plan.shortages:
        yield from _expected(plan, rates, origins)
    yield from _verdict(plan)


def _context(plan: StackPlan, gpu_worker: GpuWorkerConfig) -> Iterator[str]:
    """Where positions are scaled, or would have to be."""
    scaling = plan.facts.config.rope_scaling
    if shortfall := scaling.shortfall(gpu_worker.max_context):
        yield f"context  {shortfall}"
    elif scaling.type is not ScalingType.NONE:
        yield f"context  {plan.max_context} tokens at most; positions are scaled: {scaling.description}"


def _device(plan: StackPlan, gpu_worker: GpuWorkerConfig) -> Iterator[str]:
    placement, needs = plan.placement, plan.device
    slots = f"{placement.num_slots} slots, {placement.coverage:.1%} of experts"
    num_pairs, beyond = plan.facts.experts.num_pairs, ""
    if (expert_cache_slots(gpu_worker.expert_cache) or 0) > num_pairs:
        beyond = f"; the model has {num_pairs} experts, {num_pairs} slots are taken"
    if needs is None or plan.device_bytes is None:
        reason = "--device cpu" if gpu_worker.device == "cpu" else "no --vram given"
        if gpu_worker.device == "auto" and runs_on_cuda("auto"):
            reason += ", though this machine seems to have a CUDA device"
        kept = f"{slots}, kept in RAM" if placement.num_slots else "no slots for experts"
        yield f"device   none ({reason}): {kept}{beyond}"
        return
    context = f"{plan.max_context} tokens{_kept(gpu_worker)}, shared by all requests"
    if gpu_worker.kv_grow and plan.max_context > KV_GROW_FIRST:
        context = f"{KV_GROW_FIRST} of {plan.max_context} tokens{_kept(gpu_worker)}, grows"
    yield f"device   {size_text(plan.device_bytes)} free"
    yield _line("dense weights", needs.dense, "decoded to float16 there")
    yield _line("keys and values", needs.context, context)
    yield _line("states", needs.states, f"{gpu_worker.parallel} requests")
    yield _line("buffers", needs.buffers)
    yield _line("reserve", needs.reserve, "stays free")
    if not gpu_worker.prefill_borrow:
        yield _line("work space", max(0, plan.device_bytes - needs.total - placement.cache_bytes))
    yield _line("experts", placement.cache_bytes, slots + beyond)


def _ram(plan: StackPlan, gpu_worker: GpuWorkerConfig, *, is_ram_given: bool) -> Iterator[str]:
    needs, complement = plan.ram, plan.complement
    what = "all experts"
    if plan.placement.num_slots:
        what = f"experts without a slot, while chunks of {plan.chunk} are read"
    yield f"RAM      {size_text(plan.memory.available)} {'in all' if is_ram_given else 'available'}"
    if needs.dense:
        yield _line("dense weights", needs.dense)
    if needs.context:
        counted = min(COUNTED_CONTEXT_TOKENS, plan.facts.config.context_length)
        tokens = f"{counted} tokens{_kept(gpu_worker)}"
        yield _line("keys and values", needs.context, f"{tokens}; {_most_context(plan, gpu_worker)}")
    if needs.states:
        yield _line("states", needs.states, f"{gpu_worker.parallel} requests")
    if needs.conversations:
        yield _line("conversations", needs.conversations, "that are kept, at most")
    if needs.slots:
        yield _line("slots", needs.slots, "the device's memory is RAM")
    if plan.facts.table:
        cache = f"cache; the table of {size_text(plan.facts.table)} stays on the disk"
        yield _line("n-gram rows", needs.rows, "the whole table" if needs.rows == plan.facts.table else cache)
    yield _line("processes", needs.processes)
    if needs.prediction:
        yield _line("prediction block", needs.prediction, "its experts, computed in RAM in any case")
    yield _line("headroom", plan.headroom, "stays free")
    yield _line("for experts", plan.for_experts, f"{size_text(complement)} wanted: {what}")


def _kept(gpu_worker: GpuWorkerConfig) -> str:
    """How keys and values are kept, where that is not as they were computed."""
    return "" if kv_format(gpu_worker.kv_type) is EXACT else f" as {gpu_worker.kv_type}"


def _most_context(plan: StackPlan, gpu_worker: GpuWorkerConfig) -> str:
    """What keys and values in RAM come to where every request is as long as it may be."""
    of_one = context_bytes(plan.facts.config, plan.max_context, kv_format(gpu_worker.kv_type))
    most = size_text(gpu_worker.parallel * of_one)
    if gpu_worker.parallel == 1:
        return f"at most {most}, for {plan.max_context} tokens"
    return f"at most {most}, for {gpu_worker.parallel} requests of {plan.max_context}"


def _chunks(plan: StackPlan) -> Iterator[str]:
    yield f"chunks   tokens   lent slots        lent     in RAM   {plan.max_context} tokens   fits"
    for candidate in plan.candidates:
        is_shown = candidate.tokens & (candidate.tokens - 1) == 0 or candidate is plan.candidates[-1]
        if not is_shown and candidate.tokens != plan.chunk:
            continue
        is_taken = candidate.tokens == plan.chunk and candidate.obstacle is not Obstacle.SLOTS
        yield _chunk(candidate, is_taken and not plan.shortages, len(f"{plan.max_context} tokens"))


def _chunk(candidate: Candidate, is_taken: bool, width: int) -> str:
    return (
        f"       {'>' if is_taken else ' '} {candidate.tokens:>6}{candidate.lent_slots:>13}"
        f"{size_text(candidate.lent_bytes):>12}{size_text(candidate.complement_bytes):>11}"
        f"{_duration(candidate.seconds):>{width + 3}}   {_MARKS[candidate.obstacle]}"
    )


def _savings(plan: StackPlan) -> Iterator[str]:
    width = max((len(saving.setting) for saving in plan.helpful_savings), default=0)
    for number, saving in enumerate(plan.helpful_savings):
        more = f", {saving.num_slots} slots more" if saving.num_slots else ""
        heading = "frees" if number == 0 else ""
        yield (
            f"{heading:<9}{saving.setting:<{width}}{size_text(saving.num_bytes):>12} of {saving.memory}{more}"
            f" ({saving.price})"
        )


def _expected(plan: StackPlan, rates: Rates, origins: dict[str, str]) -> Iterator[str]:
    shares = plan.shares
    prompts = ", ".join(f"of {tokens} tokens after {_duration(s)}" for tokens, s in plan.seconds.items())
    yield (
        f"expect   about {_number(1 / plan.token_s)} tokens/s of one request; experts found on the device "
        f"{shares.device:.1%}, in RAM {shares.ram:.1%}, on the disk {shares.disk:.1%}"
    )
    yield f"         first token of a prompt {prompts}; n-gram rows at hand"
    told = []
    for rate, origin in origins.items():
        label, unit_name, unit = _RATES[rate]
        told.append(f"{label} {_number(getattr(rates, rate) / unit)} {unit_name} ({origin})")
    yield f"         by {', '.join(told)}"


def _verdict(plan: StackPlan) -> Iterator[str]:
    for shortage in plan.shortages:
        yield (
            f"does not fit: {size_text(shortage.needed)} of {shortage.memory} are needed {shortage.purpose}, "
            f"{size_text(shortage.there)} are there; short of {size_text(shortage.num_bytes)}; "
            f"{shortage.remedy}"
        )
    if plan.shortages:
        return
    if plan.unread:
        yield (
            f"runs with experts read from the disk: {size_text(plan.unread)} of them do not fit in RAM; to "
            f"have them there, {plan.keeping}"
        )
        return
    slots = plan.placement.num_slots
    yield f"fits: chunks of {plan.chunk} tokens, {slots or 'no'} slots of experts on the device"


def as_json(plan: StackPlan, name: str, rates: Rates, origins: dict[str, str]) -> dict[str, Any]:
    """The plan for programs: sizes in bytes, times in seconds, rates in bytes per second."""
    placement = plan.placement
    return {
        "model": name,
        "starts": not plan.shortages,
        "fits": not plan.shortages and not plan.unread,
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
            "unread": plan.unread,
        },
        "chunk": plan.chunk,
        "chunks": [asdict(candidate) for candidate in plan.candidates],
        "shares": asdict(plan.shares),
        "decode_tokens_s": None if plan.shortages else 1 / plan.token_s,
        "first_token_s": (
            None if plan.shortages else {str(tokens): seconds for tokens, seconds in plan.seconds.items()}
        ),
        "rates": {
            rate: {"value": getattr(rates, rate), "origin": origin} for rate, origin in origins.items()
        },
        "frees": [asdict(saving) for saving in plan.savings],
        "short": [asdict(each) | {"num_bytes": each.num_bytes} for each in plan.shortages],
    }


def _line(what: str, num_bytes: int, more: str = "") -> str:
    return f"  {what:<20}{size_text(num_bytes):>12}  {more}".rstrip()


def _number(value: float) -> str:
    """With three digits, or whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min")):
        # What would be rounded up to the limit is told in the next unit.
        if seconds < limit - unit / 20:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:.1f} h"
