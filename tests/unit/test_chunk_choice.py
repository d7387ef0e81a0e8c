"""The chunk that is chosen for `--prefill auto`: the knee, not the largest that fits."""

from dataclasses import replace

import pytest

from shared.config import DEFAULT_PREFILL, prefill_setting
from shared.placement.chunk_choice import (
    Obstacle,
    choose,
    prompt_seconds,
    resolve_prefill,
    sizes_to_weigh,
    weigh,
)
from shared.placement.rates import Rates
from tests.support.real_sizes import GIB, logged_placement

# 17,458 tokens in 5.34 s of computing; the link and the CPU as two of the logged machines had them.
TOKENS_S = 17_458 / 5.34
LARGE_MACHINE = Rates(link=13.1e9, cpu=45.4e9, disk=0.5e9, device=468e9, prompt_tokens=TOKENS_S)
SMALL_MACHINE = Rates(link=17.9e9, cpu=5.9e9, disk=0.5e9, device=468e9, prompt_tokens=TOKENS_S)
AMPLE = 64 * GIB


def seconds(prompt: int, chunk: int, rates: Rates = SMALL_MACHINE) -> float:
    return prompt_seconds(prompt, chunk, logged_placement(), AMPLE, rates)


@pytest.mark.parametrize(("chunk", "logged"), [(256, 13.28), (1024, 6.14), (2048, 3.54)])
def test_times_are_near_those_of_the_original(chunk: int, logged: float) -> None:
    """A prompt of 4,392 tokens on an RTX 3090: what is moved takes most of the time, so that an estimate of
    it is at most a seventh off."""
    assert seconds(4392, chunk) == pytest.approx(logged, rel=1 / 7)


def test_without_the_cpu() -> None:
    """Chunks below the streaming size share missed experts with the CPU; the original without: 16.11 s."""
    assert seconds(4392, 256, replace(SMALL_MACHINE, cpu=0.0)) == pytest.approx(16.11, rel=0.05)


def test_the_largest_is_not_faster() -> None:
    """A prompt of 17,458 tokens: chunks of 18432 and of 32768 take it whole, in the same time (5.960 and
    5.952 s were logged, 13.486 with smaller ones), but the larger borrows 14.25 of the 18 GiB of slots."""
    assert seconds(17_458, 18432, LARGE_MACHINE) == pytest.approx(
        seconds(17_458, 32768, LARGE_MACHINE), rel=0.03
    )
    assert seconds(17_458, 2048, LARGE_MACHINE) > 2 * seconds(17_458, 18432, LARGE_MACHINE)
    placement = logged_placement()
    weighed = weigh([2048, 18432, 32768], placement, AMPLE, LARGE_MACHINE, 17_458)
    assert [candidate.obstacle for candidate in weighed] == [None, None, Obstacle.HALF]
    assert choose(weighed).tokens == 18432
    # Neither for want of slots nor of RAM, but because it gains nothing.
    assert choose([replace(candidate, obstacle=None) for candidate in weighed]).tokens == 18432
    chosen = resolve_prefill(prefill_setting("auto:32768"), placement, AMPLE, LARGE_MACHINE, 17_458)
    assert chosen <= 18432
    assert seconds(17_458, chosen, LARGE_MACHINE) <= 1.03 * seconds(17_458, 18432, LARGE_MACHINE)


def test_memory_bounds_the_chunk() -> None:
    """On the machine of 62.8 GiB with the table in RAM (26.82) and 5 for programs and the rest, 4 stay free:
    the complement of 18432 (23.16) fits, that of 32768 (29.26) does not."""
    ram = int((62.8 - 26.82 - 5.1 - 4) * GIB)
    weighed = weigh([18432, 32768], logged_placement(), ram, LARGE_MACHINE, 32768)
    assert weighed[0].obstacle is None
    assert weighed[1].complement_bytes > ram
    # A machine of 32 GB: 18.79 GiB for chunks of 8192 is too much for it.
    assert (
        resolve_prefill(prefill_setting("auto"), logged_placement(), 18 * GIB, SMALL_MACHINE, 32768) == 4096
    )


def test_the_knee() -> None:
    """A slow link asks for larger chunks than a fast one, unless the CPU is faster still; computing that
    takes longer than moving, for none."""
    placement, auto = logged_placement(), prefill_setting("auto")

    def chosen(**rates: float) -> int:
        return resolve_prefill(auto, placement, AMPLE, replace(LARGE_MACHINE, **rates), 32768)

    assert chosen() == 8192
    assert chosen(link=60e9) < 4096
    assert chosen(link=4e9, cpu=4e9) == 8192
    assert chosen(link=1e9) < 1024
    assert chosen(prompt_tokens=100) <= 1024


def test_where_nothing_fits() -> None:
    """Without RAM for any chunk's complement the disk decides: it is read the less often, the larger chunks
    are. Without slots to lend, the smallest."""
    auto = prefill_setting("auto")
    assert resolve_prefill(auto, logged_placement(), 8 * GIB, SMALL_MACHINE, 32768) == 8192
    assert resolve_prefill(auto, logged_placement(100), AMPLE, SMALL_MACHINE, 32768) == 256
    weighed = weigh([256, 8192], logged_placement(100), AMPLE, SMALL_MACHINE, 32768)
    assert [candidate.obstacle for candidate in weighed] == [Obstacle.SLOTS, Obstacle.SLOTS]


def test_settings() -> None:
    """A number is what it is; auto is 512 without slots, and never above the cap."""
    assert resolve_prefill(prefill_setting("333"), logged_placement(), AMPLE, SMALL_MACHINE, 32768) == 333
    for nowhere in (None, logged_placement(0)):
        auto = resolve_prefill(prefill_setting("auto"), nowhere, AMPLE, SMALL_MACHINE, 32768)
        assert auto == DEFAULT_PREFILL
        assert resolve_prefill(prefill_setting("auto:64"), nowhere, AMPLE, SMALL_MACHINE, 32768) == 64
    capped = prefill_setting("auto:1500")
    assert resolve_prefill(capped, logged_placement(), AMPLE, SMALL_MACHINE, 32768) == 1500


def test_sizes_that_are_weighed() -> None:
    """Powers of two, one and a half of each, the cap, and the whole prompt in one chunk."""
    assert sizes_to_weigh(2000, 100_000) == [256, 384, 512, 768, 1024, 1536, 2000]
    assert 18432 in sizes_to_weigh(32768, 17_458)
    assert sizes_to_weigh(100, 50) == [100]
    assert max(sizes_to_weigh(8192, 50)) == 8192
