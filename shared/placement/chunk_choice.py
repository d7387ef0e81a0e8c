"""How many tokens of a prompt are computed in one step, where experts are on the device.

Every chunk needs nearly all experts of every layer, so those that are not on the device are brought there, or
computed in RAM, once a chunk. Larger chunks do that less often, but borrow more slots, so that more experts
are not on the device. From some size on computing takes longer than bringing, and more tokens in a chunk gain
nothing: `--prefill auto` takes that knee, not the largest that fits.

The rule: of 256, 384, 512, 768, 1024 ... up to the cap, the cap itself, and the whole prompt rounded up to
1024, those are considered that borrow at most half of the slots, and whose complement fits into RAM. The
smallest from 512 on whose time for a prompt as long as the context is within 3 % of the best is taken, a
smaller one where there is none. Where RAM has room for none, it is not asked for: what it lacks is read from
the disk, which the time counts.

The time of a chunk is the longest of three that run side by side: computing its tokens, moving missed experts
(from the streaming size on all of them over the link; below it those that some token chose, the link and the
CPU at the same time), and reading from the disk what RAM does not hold. A streamed chunk takes 25 us for each
missed expert besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shared.config import DEFAULT_PREFILL, PrefillSetting
from shared.placement.memory_plan import Placement
from shared.placement.rates import Rates

_SMALLEST = 256
_PROMPT_MULTIPLE = 1024
# What measurements of the same thing differ by, as the original's calibration has it.
_TOLERANCE = 0.03
_LARGEST_LENT_SHARE = 0.5
# So many tokens of an expert a CPU computes in the time it takes to read it; more take longer. By the table
# in the README, which has prompts read eight times as fast as tokens are decoded.
_CPU_TOKENS = 8
# Of a chunk that streams, for each expert that is moved: by what the original's times of 4,392 tokens in
# chunks of 1024 and 2048 have beyond moving.
_STREAM_SECONDS = 25e-6


class Obstacle(StrEnum):
    """Why a chunk is not considered."""

    SLOTS = "borrows more slots than there are"
    HALF = "borrows more than half of the slots"
    RAM = "its experts do not fit into RAM"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A size of chunks: what it borrows, what is to be in RAM meanwhile, and the time for the prompt."""

    tokens: int
    lent_slots: int
    lent_bytes: int
    complement_bytes: int
    seconds: float
    obstacle: Obstacle | None


def sizes_to_weigh(cap: int, prompt_tokens: int) -> list[int]:
    """The sizes that are considered, in rising order."""
    sizes = {cap, min(cap, -(-prompt_tokens // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE)}
    size = _SMALLEST
    while size < cap:
        sizes |= {size, min(cap, size + size // 2)}
        size *= 2
    return sorted(sizes)


def weigh(
    sizes: Sequence[int], placement: Placement, ram_bytes: int, rates: Rates, prompt_tokens: int
) -> list[Candidate]:
    """What each size takes; `ram_bytes` is what experts can have of RAM."""
    candidates = []
    for tokens in sizes:
        lent, complement = placement.lent_slots(tokens), placement.complement_bytes(tokens)
        obstacle = None
        if complement > ram_bytes:
            obstacle = Obstacle.RAM
        if lent > _LARGEST_LENT_SHARE * placement.num_slots:
            obstacle = Obstacle.SLOTS if lent > placement.num_slots else Obstacle.HALF
        seconds = prompt_seconds(prompt_tokens, tokens, placement, ram_bytes, rates)
        candidates.append(
            Candidate(tokens, lent, placement.lent_bytes(tokens), complement, seconds, obstacle)
        )
    return candidates


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The knee. Where slots are too few for any, the smallest."""
    for passable in ((None,), (None, Obstacle.RAM)):
        left = [candidate for candidate in candidates if candidate.obstacle in passable]
        if left:
            limit = (1 + _TOLERANCE) * min(candidate.seconds for candidate in left)
            good = [candidate for candidate in left if candidate.seconds <= limit]
            usual = [candidate for candidate in good if candidate.tokens >= DEFAULT_PREFILL]
            return min(usual or good, key=lambda candidate: candidate.tokens)
    return min(candidates, key=lambda candidate: candidate.tokens)


def resolve_prefill(
    setting: PrefillSetting, placement: Placement | None, ram_bytes: int, rates: Rates, max_context: int
) -> int:
    """Tokens of a chunk: what `--prefill` says, or for auto the knee; 512 without slots on the device."""
    if setting.tokens is not None:
        return setting.tokens
    if placement is None or not placement.num_slots:
        return min(DEFAULT_PREFILL, setting.cap)
    sizes = sizes_to_weigh(setting.cap, max_context)
    return choose(weigh(sizes, placement, ram_bytes, rates, max_context)).tokens


def prompt_seconds(
    prompt_tokens: int, chunk: int, placement: Placement, ram_bytes: int, rates: Rates
) -> float:
    """Time to read a prompt, an estimate. Filling the slots again that were lent is left out: it is done
    beside what comes next."""
    num_full, rest = divmod(prompt_tokens, chunk)
    missed = placement.complement_bytes(chunk)
    unread = max(0, missed - ram_bytes)
    seconds = 0.0
    for count, tokens in ((num_full, chunk), (1, rest)):
        if count and tokens:
            seconds += count * _chunk_seconds(tokens, missed, unread, placement, rates)
    return seconds


def _chunk_seconds(tokens: int, missed: int, unread: int, placement: Placement, rates: Rates) -> float:
    sizes = placement.sizes
    # Of experts chosen with equal odds; a router that prefers some leaves more out.
    touched = 1.0 - (1.0 - sizes.num_used / sizes.num_experts) ** tokens
    if placement.num_slots and tokens >= placement.work_space.stream_min:
        touched, beside = 1.0, missed / sizes.mean_slot_bytes * _STREAM_SECONDS
        moving = missed / rates.link
    else:
        beside = 0.0
        tokens_each = tokens * sizes.num_used / sizes.num_experts
        moving = touched * missed / (rates.link + rates.cpu / max(1.0, tokens_each / _CPU_TOKENS))
    return max(tokens / rates.prompt_tokens, moving, touched * unread / rates.disk) + beside
