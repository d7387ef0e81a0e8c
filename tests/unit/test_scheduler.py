"""What a step holds: whose tokens, how many, and that every request gets to its end."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.prefill_share import PrefillShare
from gpu_worker.sampler import Sampler
from gpu_worker.scheduler import Scheduler, Work
from gpu_worker.sequence import Clock, Sequence
from shared.messages import GenerateRequest, Sampling

SAMPLING = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(slots=True)
class PositionOnly:
    """A state without tensors."""

    position: int = 0


def sequence(name: str, num_prompt_tokens: int, max_new_tokens: int = 1) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=list(range(num_prompt_tokens)),
        max_new_tokens=max_new_tokens,
        eos_token_ids=[],
        sampling=SAMPLING,
    )
    return Sequence(request, Sampler(SAMPLING), Clock(0.0), list(request.prompt_token_ids))


def compute(works: list[Work]) -> None:
    """What the engine does with a step, without a model: advances, and appends a token where one follows."""
    for work in works:
        advanced = work.sequence
        if advanced.state is None:
            advanced.state = PositionOnly()  # type: ignore[assignment]
        assert advanced.state is not None
        advanced.state.position = work.stop
        if work.reaches_end and advanced.request.max_new_tokens:
            advanced.token_ids.append(0)


def next_step(scheduler: Scheduler) -> list[Work]:
    """With whoever may begin."""
    reader = next(iter(scheduler.readers()), None)
    if reader is not None and reader.state is None:
        reader.state = PositionOnly()  # type: ignore[assignment]
    return scheduler.schedule(reader)


def new_scheduler(max_running: int, prefill_tokens: int) -> Scheduler:
    """With prompts that may take all the time."""
    return Scheduler(max_running, prefill_tokens, PrefillShare(1.0, 60.0))


def described(works: list[Work]) -> list[tuple[str, int, int]]:
    return [(work.sequence.request_id, work.start, work.stop) for work in works]


def test_nothing_to_do() -> None:
    """An empty step, not an error."""
    assert next_step(new_scheduler(max_running=2, prefill_tokens=8)) == []


def test_a_prompt_in_chunks_beside_one_that_generates() -> None:
    """Decoding goes on in every step, a chunk of one prompt is read with it, of each in its turn."""
    scheduler = new_scheduler(max_running=3, prefill_tokens=8)
    for name, length in (("a", 3), ("b", 20), ("c", 2)):
        scheduler.add(sequence(name, length, 100))
    steps = []
    for _ in range(6):
        works = next_step(scheduler)
        steps.append(described(works))
        compute(works)
    assert steps == [
        [("a", 0, 3)],
        [("a", 3, 4), ("b", 0, 8)],
        [("a", 4, 5), ("c", 0, 2)],
        [("a", 5, 6), ("c", 2, 3), ("b", 8, 16)],
        [("a", 6, 7), ("c", 3, 4), ("b", 16, 20)],
        [("a", 7, 8), ("b", 20, 21), ("c", 4, 5)],
    ]


def test_waiting_for_a_place() -> None:
    """In the order of arrival; who waits is found and can be removed."""
    scheduler = new_scheduler(max_running=1, prefill_tokens=8)
    first, second, third = (sequence(name, 2) for name in "abc")
    for added in (first, second, third):
        scheduler.add(added)
    next_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert list(scheduler) == [first, second, third]
    assert scheduler.find("b") is second
    assert scheduler.find("nobody") is None
    scheduler.remove(second)
    scheduler.remove(second)
    scheduler.remove(first)
    assert described(next_step(scheduler)) == [("c", 0, 2)]


@pytest.mark.parametrize(("stop", "reaches_end"), [(3, False), (5, True)])
def test_work_that_reaches_the_end(stop: int, reaches_end: bool) -> None:
    """Only then does a next token follow."""
    work = Work(sequence("a", 5), 0, stop)
    assert work.num_tokens == stop
    assert work.reaches_end == reaches_end


@settings(deadline=None)
@given(
    max_running=st.integers(1, 4),
    prefill_tokens=st.integers(1, 9),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(1, 30),
            st.integers(0, 12),
            st.one_of(st.none(), st.integers(0, 30)),
        ),
        max_size=12,
    ),
)
def test_every_request_ends_once(
    max_running: int, prefill_tokens: int, arrivals: list[tuple[int, int, int, int | None]]
) -> None:
    """Requests that arrive at any step, of any length, some aborted at some step."""
    scheduler = new_scheduler(max_running, prefill_tokens)
    ends: Counter[str] = Counter()
    started: list[str] = []
    requests = {f"{n}": arrival for n, arrival in enumerate(sorted(arrivals, key=lambda arrival: arrival[0]))}
    # Alone, each would take no more steps than that; a step never leaves everybody where they were.
    limit = 13 + sum(length // prefill_tokens + 1 + new for _, length, new, _ in requests.values())
    for step in range(limit + 1):
        for name, (arrives_at, length, new, aborted_at) in requests.items():
            if arrives_at == step:
                scheduler.add(sequence(name, length, new))
            found = scheduler.find(name)
            if aborted_at == step and found is not None:
                scheduler.remove(found)
                ends[name] += 1
        decoding = [running for running in scheduler if running.state and not running.is_prefilling]
        works = next_step(scheduler)
        assert scheduler.num_running <= max_running
        assert (works == []) == (scheduler.num_running == 0)
        # Whoever generates is in every step with one token; besides them at most one chunk of a prompt.
        one_each = [work.sequence for work in works if not work.sequence.is_prefilling]
        assert one_each == decoding
        chunks = [work for work in works if work.sequence.is_prefilling]
        assert len(chunks) <= 1
        assert all(work.num_tokens <= prefill_tokens for work in chunks)
        assert sum(work.num_tokens for work in works) <= max_running + prefill_tokens
        for work in works:
            assert work.start == work.sequence.num_computed < work.stop <= len(work.sequence.token_ids)
            if work.start == 0:
                started.append(work.sequence.request_id)
        compute(works)
        for work in works:
            if not work.sequence.is_prefilling and work.sequence.finish_reason is not None:
                scheduler.remove(work.sequence)
                ends[work.sequence.request_id] += 1
    assert ends == Counter(dict.fromkeys(requests, 1))
    assert started == sorted(started, key=int)
