"""One request in the gpu_worker: its windows of token ids, how far it is, why it ends, where time went."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.experts.counts import Way
from gpu_worker.sampler import Sampler
from gpu_worker.sequence import Clock, Sequence
from shared.messages import REPETITION, ExpertBytes, GenerateRequest, RouteCounts, Sampling

SAMPLING = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def sequence(
    prompt: list[int], generated: list[int] | None = None, max_new_tokens: int = 3, may_repeat: bool = False
) -> Sequence:
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        eos_token_ids=[7, 8],
        stop_token_ids=[8, 9],
        sampling=SAMPLING,
        may_repeat=may_repeat,
    )
    return Sequence(request, Sampler(SAMPLING), Clock(0.0), [*prompt, *(generated or [])])


def test_windows_at_the_start() -> None:
    """Own id first, then backwards; nothing before the first token."""
    windows = sequence([5, 6, 9]).windows(0, 3, 3)
    assert windows.dtype == np.int32
    assert windows.tolist() == [[5, -1, -1], [6, 5, -1], [9, 6, 5]]


@settings(deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    start=st.integers(0, 19),
    size=st.integers(1, 20),
    ngram_size=st.integers(2, 5),
)
def test_windows_anywhere(token_ids: list[int], start: int, size: int, ngram_size: int) -> None:
    """A chunk's windows reach back over what came before it."""
    start = min(start, len(token_ids) - 1)
    stop = min(start + size, len(token_ids))
    expected = [
        [token_ids[place - back] if place >= back else -1 for back in range(ngram_size)]
        for place in range(start, stop)
    ]
    assert sequence(token_ids).windows(start, stop, ngram_size).tolist() == expected


@pytest.mark.parametrize(
    ("generated", "max_new_tokens", "reason"),
    [
        ([], 3, None),
        ([1, 2], 3, None),
        ([1, 2, 3], 3, "length"),
        ([1, 7], 3, "stop"),
        ([1, 2, 8], 3, "stop"),
        ([7, 1], 3, None),
        ([], 0, "length"),
    ],
)
def test_finish_reason(generated: list[int], max_new_tokens: int, reason: str | None) -> None:
    """An end-of-text token wins over the limit it just meets; one in the prompt ends nothing."""
    assert sequence([1, 7], generated, max_new_tokens).finish_reason == reason


@pytest.mark.parametrize(
    ("generated", "ending"),
    [
        ([1, 9], ("stop", 9)),
        ([1, 2, 9], ("stop", 9)),
        ([1, 8], ("stop", None)),
        ([1, 2, 3], ("length", None)),
    ],
)
def test_a_stop_token_is_named(generated: list[int], ending: tuple[str, int | None]) -> None:
    """It wins over the limit too; an end-of-text token among them is one as ever."""
    ended = sequence([9], generated)
    assert (ended.finish_reason, ended.stop_reason) == ending


@pytest.mark.parametrize(
    ("generated", "ending"),
    [
        ([4] * 80, (None, None)),
        ([4] * 255, (None, None)),
        ([4] * 256, ("length", REPETITION)),
        ([1, *[4] * 256], ("length", REPETITION)),
        ([4] * 256 + [1], (None, None)),
        ([4] * 200 + [1] + [4] * 200, (None, None)),
        ([4, 5] * 200, (None, None)),
    ],
)
def test_one_token_over_and_over_ends_it(generated: list[int], ending: tuple[str | None, str | None]) -> None:
    """What the prompt repeats does not count, nor does a ruled line; and who wants it may have it."""
    ended = sequence([4] * 300, generated, 1000)
    assert (ended.finish_reason, ended.stop_reason) == ending
    exempt = sequence([4], generated, 1000, may_repeat=True)
    assert (exempt.finish_reason, exempt.stop_reason) == (None, None)
    full = sequence([4], generated, len(generated))
    assert (full.finish_reason, full.stop_reason) == ("length", None)


def test_before_the_first_step() -> None:
    """There is no state, so nothing is computed."""
    fresh = sequence([1, 2, 3])
    assert (fresh.num_computed, fresh.is_prefilling) == (0, True)
    assert (fresh.num_prompt_tokens, fresh.num_output_tokens) == (3, 0)


def test_timings() -> None:
    """Queue, prompt and answer add up to the whole."""
    clock = Clock(arrived_at=10.0, started_at=12.0, first_token_at=15.0, ngram_wait_s=0.5, expert_wait_s=0.25)
    clock.transfer_wait_s, clock.device_wait_s = 0.125, 0.75
    timings = clock.timings(now=21.0)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (2.0, 3.0, 6.0)
    assert (timings.ngram_wait_s, timings.expert_wait_s) == (0.5, 0.25)
    assert (timings.transfer_wait_s, timings.device_wait_s) == (0.125, 0.75)


def test_routes_that_nobody_has_spoken_for_went_to_ram() -> None:
    """Those of all ways are all routes."""
    clock = Clock(arrived_at=0.0, num_routes=100, num_device_routes=40, num_disk_routes=5)
    clock.num_transferred_routes, clock.num_skipped_routes = 20, 3
    clock.expert_bytes[Way.DEVICE], clock.expert_bytes[Way.TRANSFERRED] = 7, 8
    clock.expert_bytes[Way.RAM] = 9
    timings = clock.timings(1.0)
    assert timings.routes == RouteCounts(device=40, ram=32, disk=5, transferred=20, skipped=3)
    assert timings.expert_bytes == ExpertBytes(device=7, ram=9, transferred=8)


def test_timings_of_a_request_that_never_began() -> None:
    """All its time was spent waiting."""
    timings = Clock(arrived_at=10.0).timings(now=14.0)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (4.0, 0.0, 0.0)
